"""Log-probs are those of the model's own logits, whatever its forward does, or training stops with one error."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as t
from peft import get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from head_definition import floats_apart
from logit_models import CONFIGS, CONTROLS, OWN_CODE, UNREADABLE, LlamaWithLogits, batch, build, build_class
from tiny import lora_config, preferences, word_tokenizer
from token_counts import as_of_a_library
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.scoring.forward import ScoringForward, ScoringOptions, attach_scoring_forward

MODELS = {**{name: name for name in (*CONFIGS, *CONTROLS)}, **{cls.__name__: cls for cls in OWN_CODE}}
FAST = ["recurrent_gemma", "mpt", "modernbert-decoder", "rembert", "opt", "gemma2", *(cls.__name__ for cls in OWN_CODE)]


def made(name: str, **options: Any) -> Any:
    model = MODELS[name]
    return build(model, **options) if isinstance(model, str) else build_class(model, **options)


def by_logits(model: Any, temperature: float) -> Tensor:
    """Return log-probs `(B, S - 1)` from the model's own logits."""
    inputs, labels = batch()
    logits = model(**inputs, use_cache=False).logits[:, :-1] / temperature
    targets = labels[:, 1:].clamp(min=0)
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return log_probs * (labels[:, 1:] != -100)


def gradients(model: Any, log_probs: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(0.5, 1.5, log_probs.numel(), dtype=log_probs.dtype).view_as(log_probs)
    (log_probs * weights).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None and x.grad.any()}


def scored(model: Any, **options: Any) -> tuple[Tensor, ScoringForward]:
    inputs, labels = batch()
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    scoring = attach_scoring_forward(inner, ScoringOptions(**options))
    return model(**inputs, labels=labels, fused_lm_head=True).log_probs, scoring


@pytest.mark.parametrize("name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in MODELS])
def test_log_probs_and_gradients_are_those_of_the_models_logits(name: str) -> None:
    model, expected_model = made(name), made(name)
    log_probs, scoring = scored(model, temperature=0.7)
    expected = by_logits(expected_model, 0.7)
    assert floats_apart(log_probs, expected) < 2e-5
    found, wanted = gradients(model, log_probs), gradients(expected_model, expected)
    assert found.keys() >= wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    for key, x in wanted.items():  # that of a key's bias is 0 but for rounding
        assert floats_apart(found[key], x) <= 1e-4 * max(float(x.abs().max()), 1e-2 * largest), key
    assert (scoring.difference_from_trl is not None) == (name not in CONTROLS)


@pytest.mark.parametrize("name", ["mpt", "modernbert-decoder", "Capped", "Shifted", "llama"])
@pytest.mark.parametrize("head", ["tiled", "dense"])
def test_both_heads_in_float64(name: str, head: str) -> None:
    log_probs, _ = scored(made(name, dtype=torch.float64), head=head)
    assert floats_apart(log_probs, by_logits(made(name, dtype=torch.float64), 1.0)) < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "Scaled", "Capped", "modernbert-decoder"])
def test_rounding_is_no_difference(name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """The start finds the same transform as in fp32, and the check of the first batch finds nothing more."""
    log_probs, scoring = scored(made(name, dtype=dtype))
    _, in_fp32 = scored(made(name))
    assert scoring.transform.is_close(in_fp32.transform)
    assert scoring.runs_model_code == in_fp32.runs_model_code
    assert floats_apart(log_probs.float(), by_logits(made(name, dtype=dtype), 1.0).float()) < 0.2
    assert not caplog.records


def test_adapters_are_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    for name, adapted in (
        ("llama", "all-linear"),
        ("modernbert-decoder", ["Wi", "Wo", "dense"]),
        ("llama", ["lm_head"]),
    ):
        config = lora_config(target_modules=adapted)
        torch.manual_seed(0)
        model = get_peft_model(build(name), config)
        expected = by_logits(copy.deepcopy(model), 1.0)
        log_probs, _ = scored(model)
        assert floats_apart(log_probs, expected) < 2e-5
    assert not caplog.records


@pytest.mark.parametrize("cls", UNREADABLE)
def test_logits_that_cannot_be_repeated_are_an_error(cls: type[Any]) -> None:
    with pytest.raises(
        RuntimeError, match=f"log-probs of {cls.__name__} differ from `log_softmax` of its logits on the"
    ):
        scored(build_class(cls))


def test_prophetnet_is_an_error() -> None:
    """Its logits come from streams of its decoder that predict several tokens."""
    config = t.ProphetNetConfig(
        vocab_size=97, hidden_size=32, num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=48,
        num_encoder_layers=1, num_encoder_attention_heads=4, encoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    with pytest.raises(
        RuntimeError, match="log-probs of ProphetNetForCausalLM differ from `log_softmax` of its logits"
    ):
        scored(t.ProphetNetForCausalLM(config))


def test_a_difference_that_shows_later_is_found_on_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    """The model's code is changed after the trainer was built, for example by a library that patches models."""
    model = build("llama")
    inputs, labels = batch()
    scoring = attach_scoring_forward(model, ScoringOptions())
    head = model.lm_head
    plain = type(model).forward

    def changed(model: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = plain(model, *args, **kwargs)
        outputs.logits = outputs.logits * 0.5
        return outputs

    scoring.model_forward = changed
    log_probs = model(**inputs, labels=labels, fused_lm_head=True).log_probs
    expected = copy.deepcopy(model)
    expected.lm_head.weight.data = head.weight.data * 0.5
    assert floats_apart(log_probs, by_logits(expected, 1.0)) < 2e-5
    assert "TRL's log-probs are not those of the model's logits" in caplog.text


def test_noise_in_every_forward_is_no_error() -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + torch.randn(output.shape, generator=generator)

    model = build("llama")
    model.model.embed_tokens.register_forward_hook(noise)
    scored(model)


def test_a_forward_that_needs_other_inputs_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    class NeedsMore(LlamaWithLogits):
        def forward(self, input_ids: Tensor, speaker: Tensor | None = None, **kwargs: Any) -> Any:
            if speaker is None:
                raise ValueError("no speaker")
            return super().forward(input_ids, **kwargs)

    log_probs, _ = scored(build_class(NeedsMore))
    assert floats_apart(log_probs, by_logits(build_class(LlamaWithLogits), 1.0)) < 2e-5
    assert "were not compared with its own logits, because its forward raised ValueError: no speaker" in caplog.text


def test_the_check_leaves_model_and_random_state_as_they_were() -> None:
    for name in ("modernbert-decoder", "llama"):
        model = build(name)
        modules = dict(model.named_modules())
        state = torch.random.get_rng_state()
        inputs, labels = batch()
        scoring = attach_scoring_forward(model, ScoringOptions(padding_free=False))
        with torch.no_grad():
            model(**inputs, labels=labels, fused_lm_head=True)
        assert scoring.is_compared
        assert torch.equal(state, torch.random.get_rng_state())
        assert dict(model.named_modules()) == modules
        assert all(module.training for module in model.modules())
        assert all(x.grad is None for x in model.parameters())


def test_the_check_runs_8_tokens_once() -> None:
    model, shapes = build("llama"), []
    attach_scoring_forward(model, ScoringOptions(padding_free=False))
    look = as_of_a_library(lambda _, args, output: shapes.append(tuple(output.shape)))
    model.lm_head.register_forward_hook(look)
    inputs, labels = batch()
    for _ in range(3):
        model(**inputs, labels=labels, fused_lm_head=True)
    assert shapes == [(1, 8, 97)]


@pytest.mark.parametrize(("name", "words"), [
    ("recurrent_gemma", "multiplies its logits by 1 with a softcap of 3, and TRL by 1 with no softcap"),
    ("mpt", "multiplies its logits by 1 with no softcap, and TRL by 0.25 with no softcap"),
    ("bert", "computes more than a product between its last hidden states and its logits, and TRL computes only"),
    ("llama", None),
])  # fmt: skip
def test_the_plan_says_where_trl_is_wrong(name: str, words: str | None, tmp_path: Path) -> None:
    model = build(name)
    model.config._name_or_path = str(tmp_path)
    trainer = DPOTrainer(
        model,
        build(name),
        DPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
            max_steps=1, gradient_checkpointing=False, per_device_train_batch_size=2,
        ),
        train_dataset=preferences(4, 0),
        processing_class=word_tokenizer(),
    )  # fmt: skip
    plan = trainer.explain()
    if words is None:
        assert "TRL's log-probs are not" not in plan["head"].reason
        assert plan["head"].routine
    else:
        assert f"{type(model).__name__} {words}" in plan["head"].reason
        assert "TRL's log-probs are not" in " ".join(str(plan).split())
    trainer.train()
    assert trainer.explain()["head"].routine == (words is None)


def on_ranks(group: dist.ProcessGroup, name: str, engine: str) -> Any:
    model = made(name)
    attach_scoring_forward(model, ScoringOptions())
    wrapped: Any = model
    if engine == "DDP":
        wrapped = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        if engine == "FSDP2, the head apart":
            fully_shard(model.get_output_embeddings(), mesh=mesh)
        fully_shard(model, mesh=mesh)
    inputs, labels = batch()
    # One rank has more tokens than the other, which has none in the second pass
    labels = labels[:, : 12 - 4 * group.rank()]
    inputs = {key: x[:, : labels.shape[1]] for key, x in inputs.items()}
    first = wrapped(**inputs, labels=labels, fused_lm_head=True).log_probs
    second = wrapped(**inputs, labels=labels if group.rank() else labels.clone().fill_(-100), fused_lm_head=True)
    (first.sum() + second.log_probs.sum()).backward()
    found = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    return first.detach(), {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in found.items()}


RANKS = [
    ("modernbert-decoder", "DDP"),
    ("modernbert-decoder", "FSDP2"),
    ("Shifted", "FSDP2, the head apart"),
]


@pytest.mark.parametrize(("name", "engine"), RANKS)
def test_ranks_run_the_models_code_like_one_process(ranks: Any, name: str, engine: str) -> None:
    model = made(name)
    expected = by_logits(model, 1.0)
    per_rank = [expected[:, :11], expected[:, :7]]
    ((per_rank[0].sum() + 2 * per_rank[1].sum()) / 2).backward()
    for rank, (log_probs, found) in enumerate(ranks.run(on_ranks, 2, name, engine)):
        assert floats_apart(log_probs, per_rank[rank].detach()) < 2e-5
        for key, x in model.named_parameters():
            assert floats_apart(found[key], x.grad) <= 1e-4 * max(float(x.grad.abs().max()), 1.0), key
