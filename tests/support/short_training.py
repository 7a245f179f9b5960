"""Trains a tiny model for one step. Callers pass arguments of the config and of the trainer together."""

import inspect
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import trl_ext
from tiny import REFERENCE_SEED, V_WORDS, Workshop, lora_config, preferences, prompts, word_tokenizer

PAIRS, PROMPTS = preferences(6, seed=1), prompts(6, seed=1)
PAIR = {"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w5"}
ROW = {"prompt": "w1 w2", "completion": " w3 w4", "label": True}
LABELLED = Dataset.from_list([{**ROW, "completion": f" w{place}", "label": place % 2 == 0} for place in range(6)])
TEXTS = Dataset.from_list([{"text": f"w1 w2 w{place}"} for place in range(6)])
_SHORT = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}


class Bench:
    """Builds and trains our trainers, or TRL's."""

    def __init__(self, workshop: Workshop, folder: Path, package: Any = trl_ext) -> None:
        self.workshop, self.folder, self.package = workshop, folder, package
        self.trainer: Any = None

    def loaded(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.workshop.model("tied"))

    def adapted(self) -> Any:
        return get_peft_model(self.loaded(), lora_config())

    def with_position_table(self) -> Any:
        config = GPT2Config(vocab_size=V_WORDS, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=1)
        return GPT2LMHeadModel(config)

    def dpo(self, **arguments: Any) -> None:
        self._train("DPO", {"train_dataset": PAIRS, **arguments}, {})

    def sft(self, **arguments: Any) -> None:
        self._train("SFT", {"train_dataset": TEXTS, **arguments}, {})

    def kto(self, **arguments: Any) -> None:
        self._train("KTO", {"train_dataset": LABELLED, **arguments}, {})

    def grpo(self, **arguments: Any) -> None:
        self._train("GRPO", {"reward_funcs": reward, "train_dataset": PROMPTS, **arguments}, _SHORT)

    def rloo(self, **arguments: Any) -> None:
        self._train("RLOO", {"reward_funcs": reward, "train_dataset": PROMPTS, **arguments}, _SHORT)

    def reward(self, **arguments: Any) -> None:
        self._train("Reward", {"train_dataset": PAIRS, **arguments}, {})

    def distillation(self, **arguments: Any) -> None:
        teacher = self.workshop.model("untied", seed=REFERENCE_SEED)
        short = {"max_completion_length": 4}
        self._train("Distillation", {"teacher_model": teacher, "train_dataset": PROMPTS, **arguments}, short)

    def config(self, kind: str, **fields: Any) -> Any:
        return getattr(self.package, f"{kind}Config")(**{**self.shortest(), **fields})

    def shortest(self) -> dict[str, Any]:
        return {
            **{"output_dir": str(self.folder), "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True},
            **{"report_to": "none", "save_strategy": "no", "bf16": False},
        }

    def _train(self, kind: str, arguments: dict[str, Any], short: dict[str, Any]) -> None:
        of_config = inspect.signature(getattr(trl_ext, f"{kind}Config")).parameters
        fields = {x: arguments.pop(x) for x in list(arguments) if x in of_config}
        arguments.setdefault("model", self.workshop.model("tied"))
        config: Any = arguments.pop("args", None) or self.config(kind, **{**short, **fields})
        resume = arguments.pop("resume", None)
        trainer_class = getattr(self.package, f"{kind}Trainer")
        changed: Any = arguments.pop("subclass", lambda base: base)
        self.trainer = changed(trainer_class)(args=config, **arguments)
        self.trainer.train(resume)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 7) for ids in completion_ids]


def of_answers(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(len(text) > len(right)) for text, right in zip(completions, answer, strict=True)]


def of_completions(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


def tokenizer(**changes: Any) -> Any:
    made = word_tokenizer()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def with_more_tokens() -> Any:
    made = word_tokenizer()
    made.add_tokens(["x1", "x2"])
    return made
