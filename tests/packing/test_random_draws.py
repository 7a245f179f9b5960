"""What a model draws at random is found wherever its rate or its code is, and nothing else is."""

import functools
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.models.llama.modeling_llama as llama
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import convert_outputs_to_fp32
from peft import BOFTConfig, LoHaConfig, LoKrConfig, LoraConfig, PveraConfig, VeraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers.integrations.neftune import neftune_post_forward_hook
from trl.trainer.utils import disable_dropout_in_model

from model_families import build
from tiny import lora_config
from trl_ext.packing.hooks import attached_functions, without_hooks_of_users
from trl_ext.packing.randomness import randomness_of
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS = {
    "lora": (LoraConfig(lora_dropout=0.5, **TARGETS), True),
    "lora without": (LoraConfig(**TARGETS), False),
    "loha, of ranks": (LoHaConfig(rank_dropout=0.5, **TARGETS), True),
    "loha, of modules": (LoHaConfig(module_dropout=0.5, **TARGETS), True),
    "loha without": (LoHaConfig(**TARGETS), False),
    "lokr": (LoKrConfig(rank_dropout=0.5, **TARGETS), True),
    "boft": (BOFTConfig(boft_block_size=4, boft_dropout=0.5, **TARGETS), True),
    "boft without": (BOFTConfig(boft_block_size=4, **TARGETS), False),
    "vera": (VeraConfig(vera_dropout=0.5, **TARGETS), True),
    "pvera, whose vectors are drawn": (PveraConfig(**TARGETS), True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT warns about missing kernels
@pytest.mark.parametrize("name", ADAPTERS)
def test_dropout_is_detected_exactly_if_two_passes_differ(name):
    config, draws = ADAPTERS[name]
    config.init_weights = config.init_lora_weights = False
    model = get_peft_model(build("untied"), config).train()
    for param in model.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.5)
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    differs = not all(torch.equal(model(ids).logits, model(ids).logits) for _ in range(8))
    assert differs == draws
    assert (randomness_of(model) is not None) == draws


class Layer(torch.nn.Module):
    """Wraps a layer of the model."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer


class WithNoise(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.noise(x)

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * torch.randn_like(x)


class WithFunction(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.layer(x), 0.1)


class WithRandomDepth(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if random.random() < 0.5 else self.layer(x)


class WithDropPath(Layer):
    drop_path_rate = 0.0

    def __init__(self, layer: torch.nn.Module, rate: float) -> None:
        super().__init__(layer)
        self.drop_path = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class WithDropout(Layer):
    def __init__(self, layer: torch.nn.Module, rate: float, kind: type = torch.nn.Dropout) -> None:
        super().__init__(layer)
        self.dropout = kind(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.layer(x))


class Plain(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.layer(x)


def wrapped(kind: Callable[..., Layer], *options: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        layer = model.model.layers[0]
        layer.mlp = kind(layer.mlp, *options)

    return change


def hooked(hook: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda model: model.model.layers[0].register_forward_hook(hook) and None


def noise_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).uniform_()


def with_helper(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + noise_of(output)


def with_size(size: float, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + size * torch.rand_like(output)


class Bank:
    """Noise that was drawn before."""

    def __init__(self) -> None:
        self.calls = 0
        self.values = torch.ones(3)

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output + self.values[self.calls % 3]


def with_dropout_beside() -> Callable[..., Any]:
    beside = torch.nn.Dropout(0.1)
    return lambda module, inputs, output: beside(output)


def with_counts() -> Callable[..., Any]:
    counts = {"calls": 0}

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        return output * counts["calls"]

    return hook


def steered(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    output = output.clone()
    output[:, 0] = 0.0
    return output


def with_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x + torch.randn(x.shape))


def with_another_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(2 * x)


def with_forward_of_the_class(model: Any) -> None:
    class Patched(llama.LlamaMLP):
        """Stands for transformers' own class, so that no other model is patched."""

    Patched.__module__ = llama.__name__
    Patched.forward = lambda self, x: 2 * x
    model.model.layers[0].mlp.__class__ = Patched


def with_wrapped_forward(model: Any) -> None:
    with_another_forward(model)
    add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook("cpu"))


def with_rate_of_config(model: Any) -> None:
    model.config.hidden_dropout = 0.1


# Change of a model -> a word of the reason, None if the passes stay equal; and whether the draws are for tokens
CHANGES: dict[str, tuple[Callable[[Any], None], str | None, bool]] = {
    "nothing": (lambda model: None, None, False),
    "layer with noise": (wrapped(WithNoise), "model.layers.0.mlp", False),
    "layer with functional dropout": (wrapped(WithFunction), "model.layers.0.mlp", False),
    "layer of random depth": (wrapped(WithRandomDepth), "model.layers.0.mlp", False),
    "layer with drop path": (wrapped(WithDropPath, 0.1), "model.layers.0.mlp", False),
    "layer without drop path": (wrapped(WithDropPath, 0.0), None, False),
    "layer with dropout": (wrapped(WithDropout, 0.1), "dropout is active", True),
    "layer with dropout of channels": (wrapped(WithDropout, 0.1, torch.nn.Dropout1d), "mlp.dropout", False),
    "layer without dropout": (wrapped(WithDropout, 0.0), None, False),
    "layer without noise": (wrapped(Plain), None, False),
    "NEFTune": (hooked(neftune_post_forward_hook), "neftune_noise_alpha", False),
    "hook with a helper": (hooked(with_helper), "forward hook of", False),
    "hook that is partial": (hooked(functools.partial(with_size, 0.1)), "forward hook", False),
    "hook that holds dropout": (hooked(with_dropout_beside()), "forward hook", False),
    "hook of drawn noise": (hooked(Bank()), "forward hook", False),
    "hook that counts and changes": (hooked(with_counts()), "forward hook", False),
    "hook that steers": (
        hooked(steered),
        "a forward hook of `model.layers.0` (LlamaDecoderLayer), `steered` in test_random_draws.py, may change from "
        "call to call",
        False,
    ),
    "replaced forward": (with_forward, "replaced `forward`", False),
    "replaced forward without noise": (with_another_forward, "`<lambda>` in test_random_draws.py", False),
    "forward of the class": (with_forward_of_the_class, "the replaced `forward` of", False),
    "wrapped forward": (with_wrapped_forward, "`<lambda>` in test_random_draws.py", False),
    "rate that no code reads": (with_rate_of_config, None, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_user_adds_is_found_if_two_passes_can_differ(name: str) -> None:
    change, word, of_tokens = CHANGES[name]
    model = build("untied")
    change(model)
    for policy in (model, get_peft_model(model, lora_config())):
        found = randomness_of(policy)
        assert (found is not None) == (word is not None)
        reason = "" if found is None else found.reason.replace("base_model.model.", "")
        assert found is None or (word in reason and found.of_tokens == of_tokens)


def test_a_forward_that_a_class_gets_after_a_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("untied")
    assert randomness_of(model) is None
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: 2 * x)
    found = randomness_of(model)
    assert found is not None
    assert "replaced `forward`" in found.reason
    monkeypatch.undo()
    assert randomness_of(model) is None


# Hooks that return None and change nothing that they are given, and hooks that do either
SEEN: list[Any] = []
COUNTS = {"calls": 0}


def counts(module: Any, inputs: Any, output: torch.Tensor) -> None:
    COUNTS["calls"] += 1
    if torch.is_grad_enabled():
        SEEN.append((output.shape, output.detach()))


def norm_of(norm: float, tokens: int) -> int:
    return round(norm / tokens)


def by_name(seen: list[int]) -> Callable[..., None]:
    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        nonlocal seen
        norm = torch.linalg.vector_norm(output).item()
        tokens = 0
        tokens += output.numel()
        seen += [len(args), norm_of(norm, tokens)]
        logging.getLogger("x").info("%s", output)
        return None

    return look


class Counter:
    def __init__(self) -> None:
        self.calls = 0
        self.sizes: list[float] = []

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.calls += 1
        self.sizes.append(output.norm().item())

    def method(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        if isinstance(output, tuple):
            output = output[0]
        self.last = float(output.mean())

    def entries(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.note(len(inputs))
        hidden = output[0] if isinstance(output, tuple) else output
        self.hidden = hidden.detach().clone()

    def note(self, number: int) -> None:
        self.sizes.append(0.5 * float(number))


def row_of_numbers(module: Any, inputs: Any, output: torch.Tensor) -> None:
    row = {}
    for value in output if isinstance(output, tuple) else (output,):
        with torch.no_grad():
            row[f"{type(module).__name__}"] = value.float().norm().item()
    if any(number > 1e6 for number in row.values()):
        logging.warning("large: %s", row)
    SEEN.append(row)


def requires_grad(module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.requires_grad_(True)


OBSERVERS: dict[str, Callable[..., Any]] = {
    "def": counts,
    "closure": by_name([]),
    "object": Counter(),
    "method": Counter().method,
    "partial": functools.partial(lambda seen, module, inputs, output: print(seen), []),
    "lambda that prints": lambda module, inputs, output: print(output.shape),
    "lambda that appends": lambda *args: SEEN.append(args[-1].detach()),
    "lambda that appends a norm": lambda module, args, output: SEEN.append(output.detach().norm().item()),
    "lambda with a condition": lambda m, x, y, seen=SEEN: seen.append(y.numel()) if torch.is_grad_enabled() else None,
    "inputs with gradients": requires_grad,
    "entries of an object": Counter().entries,
    "rows of numbers": row_of_numbers,
}


def in_place(module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.mul_(1.1)


def by_an_entry(module: Any, inputs: Any, output: torch.Tensor) -> None:
    output[:, 0] = 0.0


def by_an_alias(module: Any, inputs: Any, output: torch.Tensor) -> None:
    hidden = output[0]
    hidden *= 2


def by_a_helper(module: Any, inputs: Any, output: torch.Tensor) -> None:
    in_place(module, inputs, output=output)


def by_out(module: Any, inputs: Any, output: torch.Tensor) -> None:
    torch.mul(output, 2.0, out=output)


def of_the_module(module: Any, inputs: Any, output: torch.Tensor) -> None:
    module.scale = len(SEEN)


def of_arguments(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    kwargs.update(position_ids=None)


def sometimes(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
    if torch.is_grad_enabled():
        return 1.1 * output
    return None


def by_the_clock(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * time.time()


def by_a_condition(module: Any, inputs: Any, output: Any) -> None:
    (output[0] if isinstance(output, tuple) else output)[:, -3:] = 0


def by_a_view(module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.view(-1)[0] = 0


def by_a_detached_copy(module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.detach()[:, -1] *= 2


def by_sorting(module: Any, inputs: Any, output: Any) -> None:
    sorted(output, key=len)[0][...] = 0


def by_a_loop(module: Any, inputs: Any, output: Any) -> None:
    for hidden in output if isinstance(output, tuple) else (output,):
        hidden *= 2


STATE: dict[str, Any] = {}


def by_an_entry_of_a_dict(module: Any, inputs: Any, output: torch.Tensor) -> None:
    STATE["hidden"] = output
    STATE["hidden"] += 1


def by_a_stored_entry(module: Any, inputs: Any, output: torch.Tensor) -> None:
    STATE["hidden"] *= 2


def by_the_last_of_a_list(module: Any, inputs: Any, output: torch.Tensor) -> None:
    SEEN.append(output.detach())
    SEEN[-1] *= 2


class Steer:
    scale = 1.5
    hidden: Any = None

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        self.hidden = output[0]
        self.hidden *= self.scale

    def by_a_method(self, module: Any, inputs: Any, output: Any) -> None:
        self.hidden = output
        self.steer()

    def steer(self) -> None:
        self.hidden.mul_(2)

    def debug(self, module: Any, inputs: Any, output: Any) -> Any:
        return self.info(output)

    def info(self, x: Any) -> Any:
        return 2 * x


def in_place_of(x: torch.Tensor) -> None:
    x.mul_(2)


def by_a_helper_of_a_view(module: Any, inputs: Any, output: torch.Tensor) -> None:
    in_place_of(output.view(-1))


def of_a_weight(module: Any, inputs: Any, output: Any) -> None:
    with torch.no_grad():
        module.get_parameter("mlp.up_proj.weight")[0] = 0


def by_position(module: Any, inputs: Any, output: torch.Tensor) -> None:
    torch.nn.functional.dropout(output, 0.1, True, True)


def for_the_loss(module: Any, inputs: Any, output: torch.Tensor) -> None:
    SEEN.append(output.square().mean())


CHANGERS: dict[str, Callable[..., Any]] = {
    **{x.__name__: x for x in (by_a_condition, by_a_view, by_a_detached_copy, by_sorting, by_a_loop, of_a_weight)},
    **{x.__name__: x for x in (by_an_entry_of_a_dict, by_a_stored_entry, by_the_last_of_a_list, by_position)},
    **{x.__name__: x for x in (by_a_helper_of_a_view, for_the_loss)},
    "object that writes to what it stores": Steer(),
    "method that writes to what it stores": Steer().by_a_method,
    "method that returns": Steer().debug,
    **{x.__name__: x for x in (in_place, by_an_entry, by_an_alias, by_a_helper, by_out, of_the_module, of_arguments)},
    **{x.__name__: x for x in (sometimes, by_the_clock)},
    "records of gradients": lambda module, inputs, output: 1.1 * output if torch.is_grad_enabled() else output,
    "state in a list": lambda module, inputs, output: SEEN.append(1) or output * len(SEEN),
    "without source": eval("lambda module, inputs, output: print(output)"),
}


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_hook_that_only_observes_changes_nothing(name: str) -> None:
    model = build("untied")
    hooked(OBSERVERS[name])(model)
    model.model.layers[1].register_forward_pre_hook(OBSERVERS[name])
    assert randomness_of(model) is None


@pytest.mark.parametrize("name", CHANGERS)
def test_any_other_hook_may_change_from_call_to_call(name: str) -> None:
    model = build("untied")
    hooked(CHANGERS[name])(model)
    found = randomness_of(model)
    assert found is not None
    assert not found.of_tokens
    assert not found.in_training_only
    assert "`model.layers.0` (LlamaDecoderLayer)" in found.reason


def test_a_hook_of_all_modules_is_seen() -> None:
    model = build("untied")
    for hook, reason in ((counts, None), (in_place, "`in_place` in test_random_draws.py")):
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        found = randomness_of(model)
        handle.remove()
        assert found is None if reason is None else reason in found.reason


class UsersMLP(llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


def test_functions_of_libraries_do_not_change() -> None:
    model = build("untied")
    model.model.layers[0].mlp.__class__ = UsersMLP
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    model.enable_input_require_grads()
    forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    model.forward = convert_outputs_to_fp32(forward)
    attach_scoring_forward(model, ScoringOptions())
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)
    model.model.layers[1].forward = torch.compile(model.model.layers[1].forward)
    assert randomness_of(model) is None


def test_a_rate_that_the_forward_reads_from_the_config_stays_with_disable_dropout() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
    for rate, draws in ((0.1, True), (0.0, False)):
        model = transformers.FalconForCausalLM(transformers.FalconConfig(**shape, hidden_dropout=rate)).train()
        disable_dropout_in_model(model)
        ids = torch.arange(12).view(1, 12)
        assert torch.equal(model(ids).logits, model(ids).logits) != draws
        assert (randomness_of(model) is not None) == draws


def test_a_layer_that_may_be_dropped_draws_only_at_a_rate() -> None:
    shape = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
    for rate, draws in ((0.1, True), (0.0, False)):
        config = transformers.OPTConfig(**shape, word_embed_proj_dim=32, dropout=0.0, layerdrop=rate)
        assert (randomness_of(transformers.OPTForCausalLM(config)) is not None) == draws


def test_engines_and_checkpointing_do_not_change(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        for engine in ("ddp", "fsdp2"):
            model = build("untied").train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            wrapped = torch.nn.parallel.DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
            wrapped(input_ids=torch.arange(12).view(1, 12)).logits.sum().backward()
            assert randomness_of(wrapped) is None
            clamp = next(model.parameters()).register_hook(lambda grad: grad.clamp(-1, 1))
            found = randomness_of(wrapped)
            clamp.remove()
            assert found is not None
            assert "may change gradients" in found.reason
    finally:
        torch.distributed.destroy_process_group()


def test_hooks_of_users_do_not_notice_a_check() -> None:
    model = build("untied")
    calls: list[int] = []
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *_: calls.append(0))
    add_hook_to_module(model.model.layers[1].mlp, AlignDevicesHook("cpu"))
    layer.register_forward_hook(neftune_post_forward_hook)
    of_all = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: calls.append(1))
    before = attached_functions(model.modules())
    with without_hooks_of_users(model):
        assert [x for x in before if x in attached_functions(model.modules())] == before[2:]
        model.get_input_embeddings()(torch.arange(3))
        assert not calls
    assert attached_functions(model.modules()) == before
    of_all.remove()
