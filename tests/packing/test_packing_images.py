"""Batches with images on packed rows: exact, each distinct image once in the tower, only equal images shared."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from image_models import CONFIGS, IMAGE_TOKEN, Picture, image_batch, image_model, prompt_of
from packing_models import TrueFloat64
from trl_ext.scoring.forward import ScoringForward, ScoringOptions, attach_scoring_forward

SMALL, OTHER = Picture(1), Picture(2)  # of the same size
TALL = Picture(3, (8, 4))
# Name -> prompts, and the distinct images of the batch
BATCHES: dict[str, tuple[list[Any], list[Picture]]] = {
    "one image": ([prompt_of([4, SMALL, 3], 0)], [SMALL]),
    "equal ids, other images": ([prompt_of([4, picture, 3], 0) for picture in (SMALL, OTHER)], [SMALL, OTHER]),
    "an image of several prompts": ([prompt_of([3 + seed, SMALL, 2], seed) for seed in range(3)], [SMALL]),
    "several images of a row": (
        [prompt_of([2, SMALL, 1, OTHER, SMALL, 2], 0), prompt_of([2, SMALL, 1, SMALL, 3], 0)],
        [SMALL, OTHER],
    ),
    "rows without images": ([prompt_of([5], 1), prompt_of([4, SMALL, 3], 0), prompt_of([9], 2)], [SMALL]),
}
SIZES: dict[str, tuple[list[Any], list[Picture]]] = {
    "images of other sizes": (
        [prompt_of([4, TALL, 2, SMALL, 3], 0), prompt_of([4, TALL, 1], 0), prompt_of([2, SMALL, 5], 0)],
        [TALL, SMALL],
    )
}
ONE_SIZE = ("llava",)
ALL_CASES = [(model, batch) for model in CONFIGS for batch in (BATCHES if model in ONE_SIZE else {**BATCHES, **SIZES})]


@dataclass
class Pass:
    """The results of a scoring forward and backward."""

    log_probs: Tensor
    gradients: dict[str, Tensor]
    patches: list[int] = field(default_factory=list)  # rows of pixels that entered the tower, by call
    tokens: list[int] = field(default_factory=list)  # that entered the embedding, by call


def attach(model: Any, **options: Any) -> ScoringForward:
    scoring = attach_scoring_forward(model, ScoringOptions(**options))
    scoring.is_compared = True
    return scoring


def tower(model: Any) -> Any:
    return getattr(model.model, "visual", None) or model.model.vision_tower


def run(model: Any, batch: dict[str, Tensor], exact: bool = True) -> Pass:
    """Score `batch` and run the backward of a loss that weights every token differently.

    Args:
        exact: whether to compute in float64 what the model computes in fp32.
    """
    batch = {name: x.double() if x.is_floating_point() and exact else x for name, x in batch.items()}
    seen: tuple[list[int], list[int]] = [], []

    def count(values: list[int]) -> Any:
        return lambda module, args, kwargs: values.append(len((args or [*kwargs.values()])[0]))

    hooks = [
        tower(model).register_forward_pre_hook(count(seen[0]), with_kwargs=True),
        model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen[1].append(args[0].numel())),
    ]
    model.zero_grad(set_to_none=True)
    try:
        with TrueFloat64() if exact else torch.enable_grad():
            log_probs = model(**batch, fused_lm_head=True).log_probs
            weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            (log_probs * weights).sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = {name: x.grad.detach() for name, x in model.named_parameters() if x.grad is not None}
    return Pass(log_probs.detach(), gradients, *seen)


def assert_equal(ours: Pass, padded: Pass, tolerance: float = 1e-10) -> None:
    assert (ours.log_probs - padded.log_probs).abs().max() <= tolerance
    assert ours.gradients.keys() == padded.gradients.keys()
    scale = max(float(x.abs().max()) for x in padded.gradients.values())
    for name, gradient in padded.gradients.items():
        assert (ours.gradients[name] - gradient).abs().max() <= tolerance * scale, name
    assert any("vis" in name and bool(x.any()) for name, x in padded.gradients.items())  # of the tower


def distinct_prefixes(batch: dict[str, Tensor], prompts: list[Any], group: int) -> int:
    """Count the tokens to process: one for each distinct start of a row, where images count as what they show."""
    starts = set()
    for row, (ids, mask) in enumerate(zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)):
        _, pictures = prompts[row // group]
        shown = [picture for picture in pictures for _ in range(picture.tokens)]
        start: tuple[Any, ...] = ()
        for token in (x for x, is_real in zip(ids, mask, strict=True) if is_real):
            start = (*start, shown.pop(0) if token == IMAGE_TOKEN else token)
            starts.add(start)
    return len(starts)


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_a_batch_with_images_is_exact_on_a_packed_row(name: str, case: str) -> None:
    prompts, pictures = {**BATCHES, **SIZES}[case]
    ours, stock = image_model(name, torch.float64), image_model(name, torch.float64)
    batch = image_batch(ours.config, prompts)
    scoring = attach(ours)
    attach(stock, padding_free=False)
    packed, padded = run(ours, batch), run(stock, batch)
    assert scoring.packing.padded_reason is scoring.packing.images_reason is None
    assert_equal(packed, padded)
    entries = len(pictures) if name in ONE_SIZE else sum(picture.patches for picture in pictures)
    assert packed.patches == [entries]
    assert padded.patches == [len(batch["pixel_values"])]
    assert packed.tokens == [distinct_prefixes(batch, prompts, 2)]
    assert padded.tokens == [batch["input_ids"].numel()]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "llava"])
def test_without_sharing_each_image_runs_at_each_of_its_places(name: str) -> None:
    prompts, _ = BATCHES["several images of a row"]
    ours, stock = image_model(name, torch.float64), image_model(name, torch.float64)
    batch = image_batch(ours.config, prompts)
    attach(ours, share_prompts=False)
    attach(stock, padding_free=False)
    packed, padded = run(ours, batch), run(stock, batch)
    assert_equal(packed, padded)
    assert packed.patches == padded.patches
    assert packed.tokens == [int(batch["attention_mask"].sum())]


def test_images_that_differ_in_one_bit_are_not_shared() -> None:
    prompts, _ = BATCHES["one image"]
    model = image_model("qwen3_vl", torch.float64)
    attach(model)
    batch = image_batch(model.config, prompts)
    batch["pixel_values"][-1, -1] *= 1 + 1e-6
    assert run(model, batch).patches == [2 * SMALL.patches]


def test_the_first_batch_with_images_decides_whether_they_are_packed(caplog: pytest.LogCaptureFixture) -> None:
    """The tower of this model adds to each image what all images of its call have in common."""
    ours, stock = image_model("qwen3_vl", torch.float64), image_model("qwen3_vl", torch.float64)

    class MixesImages(type(ours.model)):  # type: ignore[misc]
        def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
            features = super().get_image_features(*args, **kwargs)
            total = torch.cat(features.pooler_output).sum(0)
            features.pooler_output = [x + total for x in features.pooler_output]
            return features

    ours.model.__class__ = stock.model.__class__ = MixesImages
    scoring = attach(ours)
    attach(stock, padding_free=False)
    prompts, _ = BATCHES["rows without images"]
    with_images = image_batch(ours.config, prompts)
    text = image_batch(ours.config, [prompt_of([6], 1)], group=3)
    for batch in (text, with_images, text, with_images):
        packed, padded = run(ours, batch), run(stock, batch)
        assert (packed.log_probs - padded.log_probs).abs().max() <= 1e-10
        assert (packed.tokens == padded.tokens) is (batch is with_images)
    assert scoring.packing.padded_reason is None
    (warning,) = (record.message for record in caplog.records if record.name == "trl_ext")
    assert warning.startswith("A batch is not packed: on the first batch with images, packed hidden states differ")


class Normalized(nn.Module):
    """A projector with batch statistics, as some towers have."""

    def __init__(self, projector: Any, features: int) -> None:
        super().__init__()
        self.projector = projector
        self.norm = nn.BatchNorm1d(features, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        projected = self.projector(images)
        normalized: Tensor = self.norm(projected.flatten(0, -2)).view(projected.shape)
        return normalized


def test_images_of_a_tower_with_batch_statistics_stay_padded() -> None:
    """The statistics count an image as often as the batch has it."""
    prompts = [prompt_of([4, SMALL, 3], 0), prompt_of([3, SMALL, OTHER, 2], 1)]
    passes = []
    for options in ({}, {"padding_free": False}):
        model = image_model("llava", torch.float64).train()
        model.model.multi_modal_projector = Normalized(model.model.multi_modal_projector, 32)
        scoring = attach(model, **options)
        passes.append(run(model, image_batch(model.config, prompts)))
        assert scoring.packing.padded_reason == (None if not options else "`padding_free=False`")
    ours, padded = passes
    assert torch.equal(ours.log_probs, padded.log_probs)
    assert ours.patches == padded.patches


def test_an_odd_first_batch_does_not_decide() -> None:
    model = image_model("qwen3_vl", torch.float64)
    scoring = attach(model)
    batch = image_batch(model.config, BATCHES["one image"][0])
    odd = {**batch, "attention_mask": batch["attention_mask"].clone()}
    odd["attention_mask"][0, 1] = 0
    run(model, odd)
    assert scoring.packing.skipped_tokens == 0
    run(model, batch)
    assert scoring.packing.images_checked
    assert scoring.packing.skipped_tokens > 0


def test_out_of_memory_in_the_check_is_not_taken_for_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_packed(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    model = image_model("qwen3_vl", torch.float64)
    scoring = attach(model)
    scoring.packing.checked = True
    monkeypatch.setattr("trl_ext.packing.first_batch.run_packed", run_packed)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        run(model, image_batch(model.config, BATCHES["one image"][0]))


PADDED = {
    "video": ("mm_token_type_ids", lambda types: types * 2, "it has video"),
    "one image more": ("image_grid_thw", lambda grids: grids[[0, *range(len(grids))]], "do not match"),
    "no types": ("mm_token_type_ids", lambda types: None, "without `mm_token_type_ids`"),
    "no grids": ("image_grid_thw", lambda grids: None, "without `image_grid_thw`"),
}


@pytest.mark.parametrize("case", PADDED)
def test_batches_whose_images_cannot_be_found_stay_padded(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """The model then reads them as without packing, which may be an error."""
    name, change, reason = PADDED[case]
    ours, stock = image_model("qwen3_vl"), image_model("qwen3_vl")
    scoring = attach(ours)
    scoring.packing.checked = scoring.packing.images_checked = True
    attach(stock, padding_free=False)
    batch = image_batch(ours.config, BATCHES["one image"][0])
    batch = {key: x for key, x in (batch | {name: change(batch[name])}).items() if x is not None}
    results = []
    for model in (ours, stock):
        try:
            results.append(run(model, batch, exact=False).log_probs)
        except Exception as error:
            results.append(torch.tensor([len(str(error))]))
    assert torch.equal(*results)
    (warning,) = (record.message for record in caplog.records if record.name == "trl_ext")
    assert reason in warning
