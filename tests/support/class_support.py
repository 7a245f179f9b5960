"""Decides by running what trl_ext does with each class of `AutoModelForCausalLM`, and makes the docs' table of it.

    python tests/support/class_support.py [CLASS ...]   # writes class_support.json and the table of docs/supported.md

Without names, it runs every class, which takes minutes. Run it with the newest release of transformers.
"""

import json
import os
import re
import sys
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).parents[2]))

from packing_batches import EXAMPLES, Batch, tokens_needed
from packing_models import TrueFloat64, attach
from packing_runs import Seen, apart, see
from trl_ext.packing.randomness import randomness_of
from trl_ext.scoring.forward import ScoringForward

DATA = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "supported.md"
_BEGIN, _END = "<!-- made by tests/support/class_support.py -->\n", "<!-- end of what it made -->\n"
FLOAT32, FLOAT64 = 1e-5, 1e-9


@dataclass(frozen=True)
class ClassSupport:
    """What trl_ext does with a model class.

    Attributes:
        packed (`str`): "yes"; "on rows", if some layers get the rows of the packed row; or "no".
        shared (`str`): which leading tokens rows share: "all", those "in equal columns", or "none".
        head (`str`): "product", if the head multiplies hidden states by the output embedding; "own code", if it runs
            the model's code for that; "refused"; or "not run".
        reason (`str`, *optional*): why it is not packed, not shared, refused or not run.
    """

    packed: str = "no"
    shared: str = "none"
    head: str = "product"
    reason: str | None = None


# Model class -> the release of transformers that changed what follows, and what trl_ext does before it
EARLIER = dict.fromkeys(
    ("CodeGenForCausalLM", "GPTJForCausalLM"),
    ("5.24", ClassSupport(reason="the model's attention does not use transformers' attention interface")),
)


@cache
def recorded() -> dict[str, tuple[list[str], ClassSupport]]:
    """Return the model types of each class, and what was found when it was last run."""
    return {name: (entry.pop("types"), ClassSupport(**entry)) for name, entry in json.loads(DATA.read_text()).items()}


def expected(model_class: str) -> tuple[list[str], ClassSupport]:
    """Return what was recorded, as it is with the installed release of transformers, which may be an earlier one."""
    from model_classes import MODEL_TYPES

    installed = [model_type for types in MODEL_TYPES.values() for model_type in types]
    types, support = recorded()[model_class]
    release, earlier = EARLIER.get(model_class, ("0", support))
    is_earlier = Version(transformers.__version__) < Version(release)
    return [model_type for model_type in types if model_type in installed], earlier if is_earlier else support


def support_of(model_class: str) -> ClassSupport:
    """Run the class without trl_ext, padded and packed, and compare log-probs, entropies and all gradients.

    Raises:
        `AssertionError`: they differ.
    """
    from model_classes import NOT_RUN

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about the configs
        if model_class in NOT_RUN:
            try:
                run(model_class, torch.float32)
            except Exception:
                return ClassSupport(head="not run", reason=NOT_RUN[model_class])
            raise AssertionError(f"{model_class} runs now: delete it from `NOT_RUN`")
        support, differences = run(model_class, torch.float32)
        if all(difference <= FLOAT32 for difference in differences.values()):
            return support
        with TrueFloat64():
            support_in_float64, differences = run(model_class, torch.float64)
    for name, difference in differences.items():
        assert difference <= FLOAT64, f"{model_class} differs {name} by {difference:.2g}"
    assert support_in_float64 == support
    return support


def run(model_class: str, dtype: torch.dtype) -> tuple[ClassSupport, dict[str, float]]:
    """Return what trl_ext does, and how far results lie apart."""
    from model_classes import build_class

    without, padded, packed = (build_class(model_class, dtype) for _ in range(3))
    batches = [example() for example in EXAMPLES.values()]
    seen_without = [see_logits(without, batch) for batch in batches]
    try:
        attach_as_trainers(padded, padding_free=False)
        scoring = attach_as_trainers(packed)
        seen_padded = [see(padded, batch) for batch in batches]
    except (ValueError, RuntimeError) as error:
        message = str(error)
        if model_class not in message:
            raise
        return ClassSupport(head="refused", reason=_without_numbers(message.partition(". ")[0])), {}
    seen_packed = [see(packed, batch) for batch in batches]
    differences: dict[str, float] = {}
    for kind, ours, theirs in (
        ("from the model's logits", seen_padded, seen_without),
        ("between packed and padded", seen_packed, seen_padded),
    ):
        for a, b in zip(ours, theirs, strict=True):
            for name, difference in apart(a, b).items():
                differences[f"{kind} in {name}"] = max(difference, differences.get(f"{kind} in {name}", 0.0))
    packing = scoring.packing
    randomness = randomness_of(packed)
    reasons = (packing.padded_reason, randomness and randomness.reason, packing.unshared_reason)
    is_packed = sum(seen.fed for seen in seen_packed) < sum(seen.fed for seen in seen_padded)
    support = ClassSupport(
        packed=("on rows" if packing.has_mixers else "yes") if is_packed else "no",
        shared=shared_tokens(batches, [seen.fed for seen in seen_packed]) if is_packed else "none",
        head="own code" if scoring.runs_model_code else "product",
        reason=next((_without_numbers(reason) for reason in reasons if reason), None),
    )
    assert (support.shared == "none") == (support.reason is not None), f"{model_class}: {support}"
    return support, differences


def attach_as_trainers(model: Any, **options: Any) -> ScoringForward:
    """Attach the scoring forward with the checks of the first batch."""
    scoring = attach(model, **options)
    scoring.is_compared = scoring.packing.checked = False
    return scoring


def shared_tokens(batches: list[Batch], processed: list[int]) -> str:
    """Return which tokens rows share, from how many the embedding got for each batch."""
    for name, options in (
        ("all", {}),
        ("in equal columns", {"in_columns": True}),
        ("none", {"share": False}),
    ):
        if processed == [tokens_needed(batch, **options) for batch in batches]:
            return name
    raise AssertionError(f"The embedding got {processed} tokens")


def see_logits(model: Any, batch: Batch) -> Seen:
    """Return what `see` returns, from the logits of the model's own forward."""
    inputs = {name: x for name, x in batch.inputs.items() if name != "labels"}
    all_log_probs_BSV = model(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    labels_BS = batch.labels[:, 1:]
    mask_BS = labels_BS != -100
    log_probs_BS = all_log_probs_BSV.gather(-1, labels_BS.clamp(min=0).unsqueeze(-1)).squeeze(-1) * mask_BS
    entropy_BS = -(all_log_probs_BSV.exp() * all_log_probs_BSV).sum(-1) * mask_BS
    rng = torch.Generator().manual_seed(11)
    weights_BS = torch.randn(log_probs_BS.shape, generator=rng, dtype=torch.float64)
    (log_probs_BS.double() * weights_BS).sum().backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad(set_to_none=True)
    loss = -log_probs_BS.sum() / mask_BS.sum()
    fields = {"log_probs": log_probs_BS.detach(), "entropy": entropy_BS.detach()}
    return Seen(fields, mask_BS, loss.detach(), None, gradients, batch.input_ids.numel())


def _without_numbers(reason: str) -> str:
    return re.sub(r"(,? by up to [\d.e+-]+| by [\d.e+-]+ of their norm)", "", reason)


# Of the model types in a row that is not printed in full, those that readers look for
_EXAMPLES = (
    "gemma3",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)


# The rows of the table, by kind of result
_RESULTS = (
    "yes",
    "yes; recurrent layers run on rows",
    "padding only",
    "no; the plan says why",
    "error: its log-probs are not those of its logits",
    "not run",
)


def table() -> str:
    """Return the docs' table of what was recorded; the JSON file has the reasons. The first row has only examples."""
    rows: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for model_class, (types, support) in recorded().items():
        mark = "¹" * (support.head == "own code") + "²" * (model_class in EARLIER)
        rows[_row(support)] |= {model_type: f"`{model_type}`{mark}" for model_type in types}
    lines = ["| padding and prompts skipped | model types |\n", "|---|---|\n"]
    for kind, names_of_types in sorted(rows.items()):
        names = [name for _, name in sorted(names_of_types.items())]
        if kind == 0:
            marked = [name for name in names if not name.endswith("`")]
            examples = [names_of_types[model_type] for model_type in _EXAMPLES]
            names = [f"the {len(names)} types that are not named below, such as {examples[0]}", *examples[1:], *marked]
        lines.append(f"| {_RESULTS[kind]} | {', '.join(names)} |\n")
    return "".join(lines)


def _row(support: ClassSupport) -> int:
    """Return the place of the result in `_RESULTS`."""
    if support.head == "not run":
        return 5
    if support.head == "refused":
        return 4
    if support.packed == "no":
        return 3
    if support.shared == "none":
        return 2
    return 1 if support.packed == "on rows" else 0


def page_with_table() -> str:
    """Return the text of the docs' page with the table of what was recorded."""
    text = PAGE.read_text()
    before, after = text[: text.index(_BEGIN)], text[text.index(_END) + len(_END) :]
    return before + _BEGIN + "\n" + table() + "\n" + _END + after


def main(names: list[str]) -> None:
    from model_classes import MODEL_TYPES

    entries = json.loads(DATA.read_text()) if names else {}
    for name in names or sorted(MODEL_TYPES):
        entries[name] = {"types": MODEL_TYPES[name], **asdict(support_of(name))}
        print(name, entries[name], flush=True)
    lines = [f" {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded.cache_clear()
    PAGE.write_text(page_with_table())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
