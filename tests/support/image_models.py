"""Tiny models that read images, a processor for them, data with images, and padded batches as TRL makes them.

Families share a vocabulary: words, then the tokens around images. Images have few patches of random pixels.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as t
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from packing_models import FAMILIES, V, fresh
from tiny import EOS, PAD, UNK

IMAGE_TOKEN, _VIDEO, _START, _END = V - 1, V - 2, V - 3, V - 4
_WORDS = range(3, _END)
_SPECIALS = ["<|vision_end|>", "<|vision_start|>", "<|video_pad|>", "<|image_pad|>"]
_PLACEHOLDERS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": _VIDEO,
    "vision_start_token_id": _START,
    "vision_end_token_id": _END,
}
_PATCH, _MERGE = 4, 2
_TEMPLATE = (
    "{% for message in messages %}w0 {% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endif %} w1 {% endfor %}"
    "{% if add_generation_prompt %}w0 {% endif %}"
)


def _text(name: str) -> dict[str, Any]:
    """Return the text part of a config of packing_models.py, with positions of three axes."""
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text: dict[str, Any] = FAMILIES[name].config().to_dict()
    return text | {"rope_parameters": rotation | {"partial_rotary_factor": 1.0}}


def _old_qwen(config: Any) -> t.PreTrainedConfig:
    """Return a config of Qwen2-VL or Qwen2.5-VL."""
    vision = {"depth": 1, "num_heads": 4, "patch_size": _PATCH, "spatial_merge_size": _MERGE}
    if config is t.Qwen2VLConfig:
        vision |= {"embed_dim": 32, "hidden_size": 32}
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "fullatt_block_indexes": [0]}
        vision |= {"window_size": 16}
    return config(text_config=_text("qwen2"), vision_config=vision, **_PLACEHOLDERS)  # type: ignore[no-any-return]


def _qwen3_5() -> t.PreTrainedConfig:
    vision = FAMILIES["qwen3_vl"].config().vision_config.to_dict()
    text = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return t.Qwen3_5Config(text_config=_text("qwen3_5") | text, vision_config=vision, **_PLACEHOLDERS)


def _llava() -> t.PreTrainedConfig:
    """Return a config whose images have 4 tokens."""
    vision = FAMILIES["gemma3-with-vision"].config().vision_config.to_dict()
    return t.LlavaConfig(
        text_config=FAMILIES["llama"].config().to_dict(),
        vision_config={**vision, "model_type": "clip_vision_model"},
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )


CONFIGS: dict[str, Callable[[], t.PreTrainedConfig]] = {
    "qwen2_vl": lambda: _old_qwen(t.Qwen2VLConfig),
    "qwen2_5_vl": lambda: _old_qwen(t.Qwen2_5_VLConfig),
    "qwen3_vl": FAMILIES["qwen3_vl"].config,
    "qwen3_5": _qwen3_5,
    "llava": _llava,
}


@dataclass(frozen=True)
class Picture:
    """An image: random pixels that depend on `seed`, in a grid of patches."""

    seed: int
    grid: tuple[int, int] = (4, 4)

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] // _MERGE**2

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    def pixels(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))

    def pil(self) -> Image.Image:
        height, width = (_PATCH * n for n in self.grid)
        pixels = np.random.default_rng(self.seed).integers(0, 256, (height, width, 3), np.uint8)
        return Image.fromarray(pixels)


Part = Picture | int
"""An image of a prompt, or a number of words."""


def prompt_of(parts: Sequence[Part], seed: int) -> tuple[list[int], list[Picture]]:
    """Return ids and images of a prompt. Equal seeds and numbers of words give equal words."""
    rng = random.Random(seed)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, Picture):
            ids += [_START, *[IMAGE_TOKEN] * part.tokens, _END]
        else:
            ids += [rng.choice(_WORDS) for _ in range(part)]
    return ids, [part for part in parts if isinstance(part, Picture)]


def image_batch(
    config: Any, prompts: Sequence[tuple[list[int], list[Picture]]], *, group: int = 2, seed: int = 0
) -> dict[str, Tensor]:
    """Return the inputs of a scoring forward as GRPO makes them: `group` completions of each prompt."""
    rng = random.Random(seed)
    rows = [
        (ids, [rng.choice(_WORDS) for _ in range(rng.randint(2, 9))], pictures)
        for ids, pictures in prompts
        for _ in range(group)
    ]
    wide = max(len(prompt) for prompt, _, _ in rows)
    long = max(len(completion) for _, completion, _ in rows)
    ids_BS = torch.zeros(len(rows), wide + long, dtype=torch.long)
    mask_BS = torch.zeros_like(ids_BS)
    labels_BS = torch.full_like(ids_BS, -100)
    for row, (prompt, completion, _) in enumerate(rows):
        columns = slice(wide - len(prompt), wide + len(completion))
        ids_BS[row, columns] = torch.tensor(prompt + completion)
        mask_BS[row, columns] = 1
        labels_BS[row, wide : wide + len(completion)] = torch.tensor(completion)
    pictures = [picture for _, _, row_pictures in rows for picture in row_pictures]
    batch = {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}
    if not pictures:
        return batch
    vision = config.vision_config
    if config.model_type == "llava":
        shape = (3, vision.image_size, vision.image_size)
        return {**batch, "pixel_values": torch.stack([picture.pixels(shape) for picture in pictures])}
    values = 3 * vision.temporal_patch_size * _PATCH**2
    return {
        **batch,
        "mm_token_type_ids": (ids_BS == IMAGE_TOKEN).long(),
        "pixel_values": torch.cat([picture.pixels((picture.patches, values)) for picture in pictures]),
        "image_grid_thw": torch.tensor([[1, *picture.grid] for picture in pictures]),
    }


def image_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return fresh(CONFIGS[name](), dtype=dtype).train()


class _WithoutVideo(t.Qwen3VLProcessor):
    """The processor without its part for video, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        t.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.image_token_id = "<|image_pad|>", IMAGE_TOKEN
        self.video_token, self.video_token_id = "<|video_pad|>", _VIDEO
        self.vision_start_token, self.vision_start_token_id = "<|vision_start|>", _START
        self.vision_end_token, self.vision_end_token_id = "<|vision_end|>", _END


def processor() -> t.ProcessorMixin:
    """Return a processor of words and images of any size that is a multiple of 8 pixels."""
    words = [f"w{number}" for number in range(len(_WORDS))]
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, UNK, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(_SPECIALS)
    fast = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK, padding_side="left"
    )
    side = _PATCH * _MERGE
    images = t.Qwen2VLImageProcessorPil(
        patch_size=_PATCH, merge_size=_MERGE, size={"shortest_edge": side**2, "longest_edge": (8 * side) ** 2}
    )
    return _WithoutVideo(images, fast, chat_template=_TEMPLATE)


def image_data(kind: str, rows: int) -> Dataset:
    """Return conversations with no, one or two images, for a trainer; some share an image, some a prompt.

    Args:
        kind: "dpo", "sft", "kto", "grpo" or "rloo".
    """
    rng = random.Random(3)
    examples = []
    prompt: list[dict[str, Any]] = []
    for row in range(rows):
        pictures = [Picture(row // 2, (4, 8 if row % 4 == 1 else 4)), Picture(7)][: (1, 2, 0, 1)[row % 4]]
        content = [{"type": "image", "text": None} for _ in pictures] + [{"type": "text", "text": _sentence(rng)}]
        prompt = [{"role": "user", "content": content}]
        example: dict[str, Any] = {"prompt": prompt, "images": [picture.pil() for picture in pictures]}
        if kind == "dpo":
            example |= {"chosen": _answer(rng), "rejected": _answer(rng)}
        if kind in ("sft", "kto"):
            example |= {"completion": _answer(rng)}
        if kind == "kto":
            example |= {"label": bool(row % 3)}
        examples.append(example)
    return Dataset.from_list(examples)


def _answer(rng: random.Random) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": _sentence(rng)}]}]


def _sentence(rng: random.Random) -> str:
    return " ".join(f"w{rng.randint(2, 80)}" for _ in range(rng.randint(2, 7)))
