"""Rows made up in the shape of public data sets, with the columns and types that these have on the Hub."""

from typing import Any, NamedTuple

from datasets import Dataset


class Shape(NamedTuple):
    """Rows for a trainer. `error`: a part of our message where TRL would not train them, or not rightly."""

    method: str
    rows: list[dict[str, Any]]
    error: str | None = None

    @property
    def dataset(self) -> Dataset:
        return Dataset.from_list(self.rows * (1 if len(self.rows) > 3 else 4))

    @property
    def is_chat(self) -> bool:
        """Whether a model with a chat template is needed."""
        return any(isinstance(x, list) and x and isinstance(x[0], dict) for x in self.rows[0].values())


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def told(role: str, value: str) -> dict[str, str]:
    return {"from": role, "value": value}


QUESTIONS = ("What is the capital of Mali?", "Write a haiku about rust.", "Hi", "Is 7 a prime?", "Name two rivers.")
ANSWERS = (
    "The capital is Bamako.",
    "Red dust on iron.",
    "Hi! How can I help?",
    "It is a prime.",
    "The Niger, the Volta.",
)
OTHERS = ("The capital is Dakar.", "Rust is red.", "Hi! Hello there.", "It is not a prime.", "The Nile.")
TURNS = tuple(zip(QUESTIONS, ANSWERS, OTHERS, strict=True))
CHATS = [
    {
        "chosen": [said("user", q), said("assistant", a)],
        "rejected": [said("user", q), said("assistant", b)],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    }
    for q, a, b in TURNS
]
REMOVE_PROMPT = 'Remove the column: `dataset.remove_columns("prompt")`'
TOOL_CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
TOOL = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]'
DIALOGUE = "\n\nHuman: {}\n\nAssistant: {}"

SHAPES: dict[str, Shape] = {
    # Preferences
    "trl-lib/ultrafeedback_binarized": Shape("dpo", CHATS),
    "trl-lib/ultrafeedback_binarized, KTO": Shape("kto", CHATS),
    "HuggingFaceH4/ultrafeedback_binarized": Shape(
        "dpo",
        [
            {**x, "prompt": q, "prompt_id": "9", "messages": x["chosen"]}
            for x, (q, _, _) in zip(CHATS, TURNS, strict=True)
        ],
        REMOVE_PROMPT,
    ),
    "HuggingFaceH4/ultrafeedback_binarized without its prompts": Shape(
        "dpo", [{**x, "prompt_id": "9", "messages": x["chosen"]} for x in CHATS]
    ),
    "mlabonne/orpo-dpo-mix-40k without its prompts": Shape(
        "dpo", [{**x, "source": "a", "question": q} for x, (q, _, _) in zip(CHATS, TURNS, strict=True)]
    ),
    "argilla/dpo-mix-7k": Shape(
        "dpo",
        [{"dataset": "a", **x, "chosen_rating": 5.0, "rejected_rating": 2.0} for x in CHATS],
    ),
    "argilla/distilabel-capybara-dpo-7k-binarized": Shape(
        "dpo",
        [
            {
                "source": "a",
                "conversation": [{"input": q, "output": a}],
                "chosen": [said("user", "First?"), said("assistant", "Yes."), *x["chosen"]],
                "rejected": [said("user", "First?"), said("assistant", "Yes."), *x["rejected"]],
                "rating_chosen": 5,
            }
            for x, (q, a, _) in zip(CHATS, TURNS, strict=True)
        ],
    ),
    "Anthropic/hh-rlhf": Shape(
        "dpo", [{"chosen": DIALOGUE.format(q, a), "rejected": DIALOGUE.format(q, b)} for q, a, b in TURNS]
    ),
    "Anthropic/hh-rlhf with prompts": Shape(
        "dpo",
        [
            {"prompt": DIALOGUE.format(q, ""), "chosen": DIALOGUE.format(q, a), "rejected": DIALOGUE.format(q, b)}
            for q, a, b in TURNS
        ],
        REMOVE_PROMPT,
    ),
    "trl-lib/hh-rlhf-helpful-base": Shape(
        "dpo",
        [
            {
                "prompt": [said("user", "Hi"), said("assistant", "Hi."), said("user", q)],
                "chosen": [said("assistant", a)],
                "rejected": [said("assistant", b)],
            }
            for q, a, b in TURNS
        ],
    ),
    "trl-lib/tldr-preference": Shape(
        "dpo",
        [
            {"prompt": f"SUBREDDIT: r/a\n\nPOST: {q}\n\nTL;DR:", "chosen": f" {a}", "rejected": f" {b}"}
            for q, a, b in TURNS
        ],
    ),
    "CarperAI/openai_summarize_comparisons": Shape(
        "dpo", [{"prompt": f"POST: {q}", "chosen": f"TL;DR: {a}", "rejected": f"TL;DR: {b}"} for q, a, b in TURNS]
    ),
    "Intel/orca_dpo_pairs": Shape(
        "dpo",
        [{"system": "Be brief.", "question": q, "chosen": a, "rejected": b} for q, a, b in TURNS],
        'rename_column("question", "prompt")',
    ),
    "argilla/distilabel-intel-orca-dpo-pairs": Shape(
        "dpo",
        [
            {"system": "", "input": q, "chosen": a, "rejected": b, "generations": [a, b], "status": "tie"}
            for q, a, b in TURNS
        ],
        'rename_column("input", "prompt")',
    ),
    "openbmb/UltraInteract_pair": Shape(
        "dpo",
        [
            {"task": "Math", "trajectory": [told("user", q)], "chosen": a, "rejected": b, "parent_id": "3"}
            for q, a, b in TURNS
        ],
        'rename_column("trajectory", "prompt")',
    ),
    "jondurbin/truthy-dpo-v0.1": Shape(
        "dpo",
        [{"id": "1", "source": "a", "system": "", "prompt": q, "chosen": a, "rejected": b} for q, a, b in TURNS],
    ),
    "berkeley-nest/Nectar": Shape(
        "dpo",
        [{"prompt": DIALOGUE.format(q, ""), "answers": [{"answer": a, "rank": 1.0}], "turns": 1} for q, a, _ in TURNS],
        "DPO reads `prompt`, `chosen` and `rejected`",
    ),
    "stanfordnlp/SHP": Shape(
        "dpo",
        [{"history": q, "human_ref_A": a, "human_ref_B": b, "labels": 1} for q, a, b in TURNS],
        "DPO reads `prompt`, `chosen` and `rejected`",
    ),
    "short implicit prompts beside a category": Shape(
        "dpo",
        [{"query": "math", "chosen": f"Compute {x} now: a", "rejected": f"Compute {x} now: b"} for x in range(6)],
    ),
    "short implicit prompts beside a document": Shape(
        "dpo",
        [
            {"context": f"{q} {a}", "chosen": f"Part {x} of it: {a}", "rejected": f"Part {x} of it: {b}"}
            for x, (q, a, b) in enumerate(TURNS)
        ],
    ),
    "trl-lib/kto-mix-14k": Shape(
        "kto",
        [
            {"prompt": [said("user", q)], "completion": [said("assistant", a)], "label": place % 2 == 0}
            for place, (q, a, _) in enumerate(TURNS)
        ],
    ),
    # Language modeling, instructions
    "timdettmers/openassistant-guanaco": Shape(
        "sft", [{"text": f"### Human: {q}### Assistant: {a}"} for q, a, _ in TURNS]
    ),
    "stanfordnlp/imdb": Shape("sft", [{"text": a, "label": 1} for _, a, _ in TURNS]),
    "Salesforce/wikitext": Shape("sft", [{"text": x} for x in ("", " = Mali = \n", "", " Mali is a country . \n")]),
    "tatsu-lab/alpaca": Shape(
        "sft",
        [
            {"instruction": q, "input": "", "output": a, "text": f"Below is an instruction.\n{q}\n### Response:\n{a}"}
            for q, a, _ in TURNS
        ],
    ),
    "yahma/alpaca-cleaned": Shape(
        "sft",
        [{"output": a, "input": "", "instruction": q} for q, a, _ in TURNS],
        "SFT reads `text`",
    ),
    "databricks/databricks-dolly-15k": Shape(
        "sft",
        [{"instruction": q, "context": "Mali.", "response": a, "category": "open_qa"} for q, a, _ in TURNS],
        "SFT reads `text`",
    ),
    "Open-Orca/OpenOrca": Shape(
        "sft",
        [{"id": "1", "system_prompt": "", "question": q, "response": a} for q, a, _ in TURNS],
        '"question": "prompt", "response": "completion"',
    ),
    "teknium/OpenHermes-2.5": Shape(
        "sft",
        [{"conversations": [told("human", q), told("gpt", a)], "source": "a", "model": None} for q, a, _ in TURNS],
        '{"gpt": "assistant", "human": "user"}',
    ),
    "NousResearch/hermes-function-calling-v1": Shape(
        "sft",
        [
            {
                "conversations": [told("system", "Use tools."), told("human", q), told("gpt", a), told("tool", "{}")],
                "tools": "[]",
            }
            for q, a, _ in TURNS
        ],
        '{"gpt": "assistant", "human": "user"}',
    ),
    "HuggingFaceTB/smoltalk": Shape("sft", [{"messages": x["chosen"], "source": "a"} for x in CHATS]),
    "allenai/tulu-3-sft-mixture": Shape(
        "sft",
        [
            {
                "id": "1",
                "messages": [said("system", "Be kind."), *x["chosen"], said("user", "Why?"), said("assistant", "So.")],
            }
            for x in CHATS
        ],
    ),
    "trl-lib/Capybara": Shape("sft", [{"source": "a", "messages": x["chosen"], "num_turns": 1} for x in CHATS]),
    "HuggingFaceH4/no_robots": Shape(
        "sft",
        [{"prompt": q, "prompt_id": "1", "messages": x["chosen"]} for x, (q, _, _) in zip(CHATS, TURNS, strict=True)],
        'remove the prompt: `dataset.remove_columns("prompt")`',
    ),
    "AI-MO/NuminaMath-CoT": Shape(
        "sft",
        [
            {"source": "a", "problem": q, "solution": a, "messages": x["chosen"]}
            for x, (q, a, _) in zip(CHATS, TURNS, strict=True)
        ],
    ),
    "trl-lib/tldr": Shape("sft", [{"prompt": f"POST: {q}\n\nTL;DR:", "completion": f" {a}"} for q, a, _ in TURNS]),
    "nvidia/HelpSteer2": Shape(
        "sft",
        [{"prompt": q, "response": a, "helpfulness": 4} for q, a, _ in TURNS],
        'rename_columns({"response": "completion"})',
    ),
    "Salesforce/xlam-function-calling-60k": Shape(
        "sft",
        [{"id": 0, "query": q, "answers": "[]", "tools": "[]"} for q, _, _ in TURNS],
        "SFT reads `text`",
    ),
    "messages with tools as JSON": Shape(
        "sft",
        [
            {
                "messages": [
                    {**said("user", q), "tool_calls": None},
                    {"role": "assistant", "content": None, "tool_calls": TOOL_CALL},
                    {**said("tool", "3"), "tool_calls": None},
                    {**said("assistant", a), "tool_calls": None},
                ],
                "tools": TOOL,
            }
            for q, a, _ in TURNS
        ],
    ),
    # Prompts
    "trl-lib/DeepMath-103K": Shape("grpo", [{"prompt": [said("user", q)], "solution": a} for q, a, _ in TURNS]),
    "trl-lib/tldr, GRPO": Shape("grpo", [{"prompt": f"POST: {q}\n\nTL;DR:", "completion": a} for q, a, _ in TURNS]),
    "openai/gsm8k": Shape(
        "grpo", [{"question": q, "answer": a} for q, a, _ in TURNS], 'rename_column("question", "prompt")'
    ),
    "AI-MO/NuminaMath-TIR": Shape(
        "grpo",
        [{"problem": q, "solution": a, "messages": x["chosen"]} for x, (q, a, _) in zip(CHATS, TURNS, strict=True)],
        'rename_column("problem", "prompt")',
    ),
}
