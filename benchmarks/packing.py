"""Measure how much time packing (no padding, shared prompts processed once) saves in training steps against stock TRL.

    python benchmarks/packing.py           # small models on the CPU, about 10 minutes; on a GPU only the last part
    python benchmarks/packing.py --smoke   # tiny models: a check that it runs; its times mean nothing

- `packing_grpo_...`, `packing_dpo`: training steps of stock TRL and of ours in turns; turns.py describes the values. On
  the CPU, stock's head scores all positions and ours only those with a label, which favors ours if the head is large.
- `packing_backbone_...`: forward and backward of the model without its head, on a micro-batch, padded and packed.
- `packing_nothing_to_share_...`: ours with `padding_free=False` and True, on full rows that have nothing in common: the
  cost of packing when it saves nothing. Forward and backward with the head, for 8 successive lengths.

Goals for the ratio of the medians: GRPO with groups kept together 3, DPO 1.5, nothing to share 0.97. training.py
measures steps at GPU sizes.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import results
import torch
from steps import GROUP, Case, Shape, policy
from torch import Tensor
from turns import Line, begin, line_of, measure, now, sizes_of, take

from trl_ext.packing.attention import run_packed
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

GRPO = Shape(hidden=256, layers=4, vocabulary=1024, prompt=512, completion=64, steps=4, rounds=2, ragged=True)
DPO = dataclasses.replace(GRPO, prompt=384, completion=128, steps=5)
SMOKE = Shape(hidden=32, layers=1, vocabulary=64, prompt=8, completion=4, steps=3, rounds=1, ragged=True)
# Four layers of Qwen3-0.6B
GPU = dataclasses.replace(GRPO, hidden=1024, heads=16, kv_heads=8, head_size=128)
# Tokens for each subject in a comparison of calls, and the limits on the number of calls
TOKENS, FEWEST, MOST = 50_000, 3, 40
# (rows, tokens of a row)
FULL_ROWS = ((1, 576), (4, 576), (8, 576), (1, 64), (8, 64))
SMOKE_ROWS = ((1, 8), (2, 8))


ONE_GROUP = {"per_device_train_batch_size": GROUP}
FOUR_GROUPS = {**ONE_GROUP, "gradient_accumulation_steps": 4}
CASES = (
    Case("packing_grpo_rows_shuffled_as_by_trl", "grpo", GRPO, FOUR_GROUPS, {"keep_groups_together": False}),
    Case("packing_grpo_four_groups", "grpo", GRPO, FOUR_GROUPS),
    Case("packing_grpo_one_group", "grpo", GRPO, ONE_GROUP),
    Case("packing_dpo", "dpo", DPO, {"per_device_train_batch_size": 4}),
)


def grpo_batch(shape: Shape, prompts: list[int], seed: int) -> dict[str, Tensor]:
    """Return rows with these prompts and completions of random lengths, padded as in TRL's GRPO trainer."""
    generator = torch.Generator().manual_seed(seed)
    rows, P, C = len(prompts), shape.prompt, shape.completion
    prompt_ids = torch.randint(3, shape.vocabulary, (max(prompts) + 1, P), generator=generator)[prompts]
    lengths = torch.randint(1, C + 1, (rows, 1), generator=generator)
    real = torch.arange(C) < lengths
    completion_ids = torch.randint(3, shape.vocabulary, (rows, C), generator=generator) * real
    mask = torch.cat([torch.ones(rows, P, dtype=torch.bool), real], dim=1)
    scored = torch.cat([torch.zeros(rows, P, dtype=torch.bool), real], dim=1)
    ids = torch.cat([prompt_ids, completion_ids], dim=1)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~scored, -100)}


def backbone(shape: Shape, name: str, prompts: list[int], deadline: float) -> list[Line]:
    model = policy(shape).train()
    packing = attach_scoring_forward(model, ScoringOptions()).packing
    packing.checked = True
    batch = grpo_batch(shape, prompts, seed=1)
    labels = batch.pop("labels")
    predicts_BS = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))
    batch = {**batch, "use_cache": False}  # type: ignore[dict-item]

    def padded() -> Tensor:
        return model.base_model(**batch).last_hidden_state[predicts_BS]

    def packed() -> Tensor:
        layout = packing.layout(model, (), batch, labels, share=True)
        assert layout is not None
        return run_packed(model, layout, batch).last_hidden_state[0, layout.at_BS[predicts_BS]]

    def step(hidden_of: Callable[[], Tensor]) -> None:
        model.zero_grad(set_to_none=True)
        hidden_of().square().mean().backward()

    subjects = {"padded": partial(step, padded), "packed": partial(step, packed)}
    sizes = {**sizes_of(shape), "rows": len(prompts)}
    return compared(f"packing_backbone_{name}", sizes, model, subjects, 2 if shape is SMOKE else 12, deadline)


def nothing_to_share(shape: Shape, rows: int, length: int, deadline: float) -> list[Line]:
    model = policy(shape).train()
    if torch.cuda.is_available():
        model = model.bfloat16()
    device = model.device
    attached = {
        name: attach_scoring_forward(model, ScoringOptions(padding_free=padding_free))
        for name, padding_free in (("padded", False), ("packed", True))
    }
    batches = []
    # Attention on the CPU is 1.5 times slower for 63 tokens than for 64, so one length is not representative
    for S in range(max(2, length - 4), length + 4):
        ids = torch.randint(3, shape.vocabulary, (rows, S), generator=torch.Generator().manual_seed(S)).to(device)
        ids[:, 0] = torch.arange(rows, device=device)  # different first tokens, so that nothing is shared
        labels = ids.clone()
        labels[:, : S // 2] = -100
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})

    def step(scoring: Any) -> None:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            scoring(model, **batch).loss.backward()

    subjects = {name: partial(step, scoring) for name, scoring in attached.items()}
    attached["packed"].packing.checked = True
    calls = 2 if shape is SMOKE else min(MOST, max(FEWEST, TOKENS // (rows * length)))
    sizes = {**sizes_of(shape), "rows": rows, "length": length}
    return compared(f"packing_nothing_to_share_{rows}x{length}", sizes, model, subjects, calls, deadline)


def compared(
    benchmark: str,
    shape: dict[str, Any],
    model: Any,
    subjects: dict[str, Callable[[], None]],
    calls: int,
    deadline: float,
) -> list[Line]:
    """Time the subjects in turns, for `calls` calls of each or until the `deadline`, and return their lines."""
    counted: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, output: counted.append(args[0].numel()))
    tokens: dict[str, int] = {}
    for name, step in subjects.items():
        step()
        counted.clear()
        step()
        tokens[name] = sum(counted)
    hook.remove()
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    for call in range(calls):
        if call >= FEWEST and time.monotonic() > deadline:
            break
        for name in order:
            start = now()
            subjects[name]()
            times[name].append(1e3 * (now() - start))
        order.reverse()
    run = results.new_run()
    return [line_of(benchmark, shape, name, run, times[name]) | {"tokens": tokens[name]} for name in subjects]


def measurements(smoke: bool) -> dict[str, Callable[[float], list[Line]]]:
    found: dict[str, Callable[[float], list[Line]]] = {}
    shape = SMOKE if smoke else GPU if torch.cuda.is_available() else GRPO
    if not torch.cuda.is_available():
        for case in CASES:
            found[case.benchmark] = partial(measure, dataclasses.replace(case, shape=SMOKE) if smoke else case)
        for name, prompts in (("one_group", [0] * GROUP), ("eight_rows_of_four_groups", [3, 0, 2, 2, 1, 0, 1, 3])):
            found[f"packing_backbone_{name}"] = partial(backbone, shape, name, prompts)
    for rows, length in SMOKE_ROWS if smoke else FULL_ROWS:
        found[f"packing_nothing_to_share_{rows}x{length}"] = partial(nothing_to_share, shape, rows, length)
    return found


def main() -> None:
    chosen = begin(__doc__, budget=900)
    take(measurements(chosen.smoke), chosen)


if __name__ == "__main__":
    main()
