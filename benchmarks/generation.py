"""Measure transformers' `generate` on TRL's batch, on all rows and on fewer, in turns.

    python benchmarks/generation.py           # small models on the CPU, about 3 minutes; on a GPU the same shapes
    python benchmarks/generation.py --smoke   # tiny models: a check that it runs; its times mean nothing

Prompts have different lengths. Each is repeated for its completions and padded on the left. One token in 64 ends a
completion, so that lengths differ. Subjects are `trl`, plain `generate`, and `trl_ext`. Both return the same samples on
the CPU, which this checks. Milliseconds are those of a call, `tokens` those that the model runs in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import results
import torch
from steps import Shape, policy
from torch import Tensor
from turns import Line, begin, line_of, now, sizes_of, take

from trl_ext.compat.generate import GenerateRows

PAD = 0
SMALL = Shape(hidden=256, layers=4, vocabulary=1024, prompt=200, completion=128, steps=1, rounds=5)
SMOKE = Shape(hidden=32, layers=1, vocabulary=64, prompt=8, completion=4, steps=1, rounds=2)


@dataclass(frozen=True)
class Groups:
    """The batch of a call."""

    prompt: int  # tokens of the longest prompt
    completion: int
    vocabulary: int
    group: int
    prompts: int = 4


CASES = {
    "generate_long_prompts": Groups(prompt=200, completion=128, vocabulary=1024, group=8),
    "generate_short_prompts": Groups(prompt=64, completion=128, vocabulary=1024, group=8),
    "generate_large_vocabulary": Groups(prompt=200, completion=128, vocabulary=32768, group=8),
    "generate_little_to_share": Groups(prompt=8, completion=32, vocabulary=1024, group=2),
}


def batch(groups: Groups) -> dict[str, Tensor]:
    """Return prompts as TRL gives them to `generate`: `(B, P)` ids and mask."""
    generator = torch.Generator().manual_seed(5)
    shorter = torch.randint(groups.prompt // 2, groups.prompt, (groups.prompts - 1,), generator=generator)
    lengths = torch.tensor([groups.prompt, *shorter.tolist()])[:, None]
    mask = torch.arange(groups.prompt) >= groups.prompt - lengths
    first = groups.vocabulary // 32  # no token that ends a completion
    ids = torch.randint(first, groups.vocabulary, mask.shape, generator=generator).masked_fill(~mask, PAD)
    return {
        "input_ids": ids.repeat_interleave(groups.group, 0),
        "attention_mask": mask.long().repeat_interleave(groups.group, 0),
    }


def compared(benchmark: str, shape: Shape, groups: Groups, _: float) -> list[Line]:
    model = policy(shape).eval()
    inputs = {name: x.to(model.device) for name, x in batch(groups).items()}
    ends = list(range(2, 2 + max(1, groups.vocabulary // 64)))
    options = {"max_new_tokens": groups.completion, "do_sample": True, "pad_token_id": PAD, "eos_token_id": ends}
    times: dict[str, list[float]] = {"trl": [], "trl_ext": []}
    samples: dict[str, Tensor] = {}
    rows = None

    def plain() -> Any:
        return model.generate(**inputs, **options)

    def fewer() -> Any:
        nonlocal rows
        rows = GenerateRows(model, looks_for_state=False)
        with rows.running():
            return plain()

    for call in range(shape.rounds + 1):  # the first one warms up
        for name, run in (("trl", plain), ("trl_ext", fewer)):
            torch.manual_seed(1)
            begun = now()
            with torch.no_grad():
                samples[name] = run()
            if call:
                times[name].append(1e3 * (now() - begun))
    assert rows is not None
    if model.device.type == "cpu" and not torch.equal(samples["trl"], samples["trl_ext"]):
        raise AssertionError(f"{benchmark}: the samples differ")
    run_name = results.new_run()
    sizes = {**sizes_of(shape), "group": groups.group, "prompts": groups.prompts}
    tokens = {"trl": rows.trl_tokens, "trl_ext": rows.tokens}
    return [line_of(benchmark, sizes, name, run_name, times[name]) | {"tokens": tokens[name]} for name in times]


def measurements(smoke: bool) -> dict[str, Callable[[float], list[Line]]]:
    found: dict[str, Callable[[float], list[Line]]] = {}
    for name, groups in CASES.items():
        if smoke:
            groups = Groups(SMOKE.prompt, SMOKE.completion, SMOKE.vocabulary, group=2)
        base = SMOKE if smoke else SMALL
        sizes = {"prompt": groups.prompt, "completion": groups.completion, "vocabulary": groups.vocabulary}
        found[name] = partial(compared, name, Shape(**{**vars(base), **sizes}), groups)
    return found


def main() -> None:
    chosen = begin(__doc__, budget=600)
    take(measurements(chosen.smoke), chosen)


if __name__ == "__main__":
    main()
