"""The images of a batch on a packed row. Each distinct image goes through the tower once, and stands at its tokens.

Rows share leading tokens only where their images are equal too: in the comparison, image tokens have a mark for each
distinct image in place of their id. Positions are those that the model's own code gives to the padded batch.

Dimensions: B rows, S columns, N images in the order of their tokens in the batch, T packed tokens.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import LAYOUT_ARGUMENT, index_select_fp32_grad
from .layout import Layout
from .support import backbone_of, has_batch_norm

# Inputs that hold pixels, and the patches of each image in time, height and width
IMAGE_INPUTS = ("pixel_values", "image_grid_thw")
_TYPES = "mm_token_type_ids"
_IMAGE, _VIDEO = 1, 2
_FEATURES = "get_image_features"
_POSITIONS = "compute_3d_position_ids"
# Fields of what `get_image_features` returns that have an entry for each image
_FIELDS_BY_IMAGE = ("pooler_output", "deepstack_features")
# Integers as wide as a pixel: equal bits are equal integers
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_images(inputs: Mapping[str, Any]) -> bool:
    return inputs.get("pixel_values") is not None


def unpacked_images_reason(model: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return why a batch with images stays padded. No reason depends on what the images show."""
    types = inputs.get("token_type_ids")
    if types is not None and types.any():
        return "its image tokens see each other in both directions"  # as in Gemma 3
    # Its statistics count an image as often as the batch has it. The first batch's check runs in evaluation mode
    if has_batch_norm(model):
        return "the model normalises over the images of a batch"
    image_model = _image_model(model)
    if image_model is None:
        return "the model has no method that returns the features of images"
    if inputs.get("image_grid_thw") is None:
        if hasattr(image_model, _POSITIONS) or inputs["pixel_values"].dim() != 4:
            return "it has images without `image_grid_thw`"
    elif not hasattr(image_model, _POSITIONS):
        return "the model has no method that returns the positions of image tokens"
    elif inputs.get(_TYPES) is None:
        return f"it has images without `{_TYPES}`"
    return None


def has_own_positions(inputs: Mapping[str, Any]) -> bool:
    """Whether the model's own code gives positions to a batch with images. They do not depend on a row's column."""
    return inputs.get("image_grid_thw") is not None


def _image_model(model: Any) -> Any:
    """Return the module whose forward puts the features of images in the place of their tokens."""
    return next((module for module in backbone_of(model).modules() if hasattr(type(module), _FEATURES)), None)


@dataclass(frozen=True)
class BatchImages:
    """The images of a padded batch.

    Attributes:
        image_BS (`ndarray` of shape `(B, S)`): the image of each image token; -1 elsewhere.
        sizes_N (`list[int]`): the entries of each image in `pixel_values`.
        distinct_N (`list[int]`): the number of each image among the distinct ones.
    """

    image_BS: NDArray[np.int64]
    sizes_N: list[int]
    distinct_N: list[int]

    @classmethod
    def of(
        cls, model: Any, inputs: Mapping[str, Any], ids_BS: NDArray[Any], real_BS: NDArray[np.bool_], *, share: bool
    ) -> "BatchImages | str":
        """Return the images of a batch, or why it cannot be packed.

        Args:
            share (`bool`): whether equal images count as one.
        """
        pixels, grids_N3 = (inputs.get(name) for name in IMAGE_INPUTS)
        assert pixels is not None
        if grids_N3 is None:  # as in LLaVA, all images have equally many tokens
            sizes_N = [1] * len(pixels)
            is_image_BS = (ids_BS == getattr(model.config, "image_token_id", -1)) & real_BS
            tokens = max(np.count_nonzero(is_image_BS) // len(pixels), 1)
            image_BS = (is_image_BS.cumsum() - 1).reshape(ids_BS.shape) // tokens
            is_whole = (np.count_nonzero(is_image_BS, axis=1) % tokens == 0).all()
        else:  # each run of image tokens is an image, as for the positions in the models' own code
            sizes_N = grids_N3.prod(-1).tolist()
            types_BS = inputs[_TYPES].cpu().numpy()
            if (types_BS == _VIDEO).any():
                return "it has video"
            is_image_BS = (types_BS == _IMAGE) & real_BS
            begins_BS = is_image_BS & ~np.pad(is_image_BS, ((0, 0), (1, 0)))[:, :-1]
            image_BS = begins_BS.cumsum().reshape(ids_BS.shape) - 1
            is_whole = sum(sizes_N) == len(pixels)
        image_BS = np.where(is_image_BS, image_BS, -1)
        if not is_whole or image_BS.max() + 1 != len(sizes_N):
            return "its images do not match its image tokens"
        tokens_N = np.bincount(image_BS[is_image_BS], minlength=len(sizes_N)).tolist()
        grids = [None] * len(sizes_N) if grids_N3 is None else grids_N3.tolist()
        shapes = list(zip(tokens_N, map(str, grids), strict=True))
        images = pixels.split(sizes_N)
        return cls(image_BS, sizes_N, _distinct(images, shapes) if share else list(range(len(images))))

    def mark(self, ids_BS: NDArray[Any]) -> NDArray[Any]:
        """Return the ids, with a number beyond all of them for the tokens of each distinct image."""
        marks_N = ids_BS.max() + 1 + np.array(self.distinct_N)
        return np.where(self.image_BS >= 0, marks_N[self.image_BS], ids_BS)

    def with_twin(self, inputs: Mapping[str, Any], real_BS: NDArray[np.bool_], token: int) -> dict[str, Any]:
        """Return the batch with a copy of its first row that has an image, whose last word is `token`.

        So two rows share an image.
        """
        row = int((self.image_BS >= 0).any(axis=1).argmax())
        images = int(self.image_BS[row].max()) + 1
        entries = {"pixel_values": sum(self.sizes_N[:images]), "image_grid_thw": images}
        batch = dict(inputs)
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                of_row = x[: entries[name]] if name in entries else x[row : row + 1]
                batch[name] = torch.cat([x, of_row])
        words = np.flatnonzero(real_BS[row] & (self.image_BS[row] < 0))
        batch["input_ids"][-1, words[-1:]] = token
        return batch

    def pack(self, model: Any, layout: Layout, inputs: Mapping[str, Any]) -> None:
        """Give the layout of marked ids its ids, its positions and its images."""
        ids_BS = inputs["input_ids"]
        device = ids_BS.device
        sources_T = layout.sources_T
        index_T = torch.from_numpy(sources_T).to(device)
        layout.input_ids = ids_BS.flatten()[index_T].unsqueeze(0)
        if has_own_positions(inputs):
            compute = getattr(_image_model(model), _POSITIONS)
            names = inspect.signature(compute).parameters
            positions_ABS = compute(**{name: inputs.get(name) for name in names})  # A axes
            layout.position_ids = positions_ABS.flatten(1)[:, index_T].unsqueeze(1)
        image_T = self.image_BS.ravel()[sources_T]
        image_T = image_T[image_T >= 0]
        packed_images = image_T[np.diff(image_T, prepend=-1) != 0]
        _, first = np.unique(self.distinct_N, return_index=True)
        ends_N = np.cumsum(self.sizes_N)
        entries = [np.arange(ends_N[i] - self.sizes_N[i], ends_N[i]) for i in first]
        indices = {"pixel_values": np.concatenate(entries), "image_grid_thw": first}
        layout.images = PackedImages(
            {name: torch.from_numpy(index).to(device) for name, index in indices.items()},
            [self.distinct_N[i] for i in packed_images],
            index_T,
        )


class PackedImages:
    """The images of a packed row.

    Attributes:
        indices (`dict[str, Tensor]`): the entries of each input that belong to the distinct images.
        order (`list[int]`): the number among the distinct images of each image in the packed row.
        index_T (`Tensor`): the place in the batch, flattened, of each packed token.
    """

    def __init__(self, indices: dict[str, Tensor], order: list[int], index_T: Tensor) -> None:
        self.indices = indices
        self.order = order
        self.index_T = index_T

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what the model gets in place of the batch's `inputs`."""
        packed = {name: inputs[name][index] for name, index in self.indices.items() if inputs.get(name) is not None}
        if inputs.get(_TYPES) is not None:
            packed[_TYPES] = inputs[_TYPES].flatten()[self.index_T].unsqueeze(0)
        return packed

    @contextmanager
    def repeated(self, model: Any) -> Iterator[None]:
        """In the `with` block, the forward of `model` gets each image's features as often as the row has the image."""
        attributes = vars(_image_model(model))
        before = attributes.get(_FEATURES)
        compute = getattr(_image_model(model), _FEATURES)

        def repeat_features(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop(LAYOUT_ARGUMENT, None)  # which some models pass on to the tower
            features = compute(*args, **kwargs)
            for name in _FIELDS_BY_IMAGE:
                if getattr(features, name, None) is not None:
                    setattr(features, name, self._repeat(getattr(features, name)))
            return features

        attributes[_FEATURES] = repeat_features
        try:
            yield
        finally:
            del attributes[_FEATURES]
            if before is not None:
                attributes[_FEATURES] = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _repeat(self, features: Any) -> Any:
        """Return features by image, or lists of them for each layer, as often as the row has each image."""
        if isinstance(features, Tensor):
            return index_select_fp32_grad(features, torch.tensor(self.order, device=features.device))
        if not isinstance(features[0], Tensor):
            return [self._repeat(of_layer) for of_layer in features]
        sizes = [len(x) for x in features]
        places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        index = torch.from_numpy(np.concatenate([places[number] for number in self.order]))
        flat = torch.cat(list(features))
        return index_select_fp32_grad(flat, index.to(flat.device)).split([sizes[number] for number in self.order])


def _distinct(images: Any, shapes: list[Any]) -> list[int]:
    """Return the number of each image among the distinct ones: those that differ in a bit, or in their shape."""
    bits_N = [x.contiguous().view(_BITS[x.element_size()]) for x in images]
    sums_N = torch.stack([x.sum() for x in bits_N]).tolist()  # equal images have equal sums
    firsts: list[int] = []
    distinct: list[int] = []
    for i, bits in enumerate(bits_N):
        equal = (
            number
            for number, j in enumerate(firsts)
            if sums_N[j] == sums_N[i] and shapes[j] == shapes[i] and torch.equal(bits_N[j], bits)
        )
        distinct.append(next(equal, len(firsts)))
        if distinct[-1] == len(firsts):
            firsts.append(i)
    return distinct
