"""What an earlier run has passed is not checked again; whatever changed makes the checks run."""

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers as t
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, masking_utils
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

import trl_ext
from ranks import Rank, run_on_ranks
from short_training import Bench
from tiny import Workshop, lora_config, word_tokenizer
from trained_weights import trained
from trl_ext.packing.first_batch import is_of_libraries
from trl_ext.packing.hooks import is_replaced_in_libraries
from trl_ext.trainers import first_batch

TEXTS = [" ".join(f"w{(place * number) % 90}" for place in range(80)) for number in (1, 2, 3)]
LONG = Dataset.from_list([{"text": text} for text in TEXTS])
CHECKED = "tokens_processed/checks"


def files() -> list[Path]:
    return sorted(Path(datasets.config.HF_DATASETS_CACHE).glob("trl_ext_first_batch/*.json"))


class Runs:
    """Short trainings with SFT, whose models are loaded again for each of them."""

    def __init__(self, workshop: Workshop, folder: Path) -> None:
        self.bench = Bench(workshop, folder)

    def model(self, seed: int = 0, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.bench.workshop.model("untied", seed), **options)

    def adapted(self, seed: int = 0, **options: Any) -> Any:
        torch.manual_seed(seed)
        return get_peft_model(self.model(), lora_config(**{"init_lora_weights": True, **options}))

    def checked_tokens(self, model: Any = None, **arguments: Any) -> float:
        """Train, and return the tokens of the checks."""
        data = {"train_dataset": LONG, "max_length": 256, "logging_steps": 1}
        self.bench.sft(model=self.model() if model is None else model, **{**data, **arguments})
        log = next(x for x in self.bench.trainer.state.log_history if "loss" in x)
        return float(log.get(CHECKED, 0.0))


@pytest.fixture
def runs(workshop: Workshop, tmp_path: Path) -> Runs:
    return Runs(workshop, tmp_path)


def test_the_second_run_does_not_check_again_and_trains_the_same(runs: Runs) -> None:
    weights = []
    processed = []
    for _ in range(2):
        processed.append(runs.checked_tokens())
        weights.append(trained(runs.bench.trainer.model))
    # 8 tokens twice; padded, with shared tokens and without
    assert processed[0] > 16 + 4 * (64 + 3)
    assert processed[1] == 0.0
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    (path,) = files()
    row = runs.bench.trainer.explain()["first batch"]
    assert (row.action, row.folder) == ("reuse", str(path))
    path.unlink()
    assert runs.checked_tokens() == processed[0]
    row = runs.bench.trainer.explain()["first batch"]
    assert row.action == "run"
    assert "Up to 4 rows of at most 64 tokens" in row.reason
    assert row.routine


@pytest.mark.parametrize("kind", ["dpo", "grpo", "kto", "rloo", "reward"])
def test_each_method_remembers(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    bench = Bench(workshop, tmp_path)
    words = " ".join(f"w{place}" for place in range(80))
    rows = {
        "dpo": {"prompt": "w1 w2", "chosen": f" {words}", "rejected": f" w3 {words}"},
        "kto": {"prompt": "w1 w2", "completion": f" {words}"},
    }
    rows = (rows | {"reward": rows["dpo"]}).get(kind, {"prompt": words})
    data = Dataset.from_list([{**rows, **({"label": place % 2 == 0} if kind == "kto" else {})} for place in range(4)])
    # Of the passes without a gradient, only the reference's differ from run to run, if they come from the store
    stored = {"reference_store": "off"} if kind in ("dpo", "kto") else {}
    tokens = []
    for _ in range(2):
        getattr(bench, kind)(train_dataset=data, logging_steps=1, **stored)
        log = next(x for x in bench.trainer.state.log_history if "loss" in x)
        tokens.append(log.get(CHECKED, 0.0))
    of_checks = 16 + 4 * (64 + 3)
    assert tokens[1] < tokens[0] - of_checks * len(bench.trainer.scoring_forwards)
    assert bench.trainer.explain()["first batch"].action == "reuse"


def with_hook(model: Any) -> Any:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
    return model


def with_replaced_forward(model: Any) -> Any:
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 1.5, mlp)
    return model


class OfUser(modeling_llama.LlamaMLP):
    pass


def with_layer_of_user(model: Any, package: str | None = None) -> Any:
    """Put a layer of the user into a model; of a `package` that is installed, if there is one."""
    layer = type("OfPackage", (modeling_llama.LlamaMLP,), {"__module__": package}) if package else OfUser
    model.model.layers[0].mlp.__class__ = layer
    return model


def with_moving_hook(model: Any) -> Any:
    add_hook_to_module(model.model.layers[0], AlignDevicesHook(execution_device="cpu"))
    return model


def with_setting(model: Any) -> Any:
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-3
    return model


def with_buffer(model: Any) -> Any:
    model.model.rotary_emb.inv_freq.mul_(1.5)
    return model


# What differs in the second run: the model, or arguments
CHANGES: dict[str, Callable[[Runs], dict[str, Any]]] = {
    "weights": lambda runs: {"model": runs.model(seed=1)},
    "dtype": lambda runs: {"model": runs.model(dtype=torch.bfloat16)},
    "attention": lambda runs: {"model": runs.model(attn_implementation="eager")},
    "a field of the config": lambda runs: {"model": runs.model(rms_norm_eps=1e-3)},
    "an adapter": lambda runs: {"model": runs.adapted()},
    "a hook": lambda runs: {"model": with_hook(runs.model())},
    "a replaced forward": lambda runs: {"model": with_replaced_forward(runs.model())},
    "a layer of the user": lambda runs: {"model": with_layer_of_user(runs.model())},
    "a layer of another package": lambda runs: {"model": with_layer_of_user(runs.model(), "safetensors.layers")},
    "a hook that moves a layer": lambda runs: {"model": with_moving_hook(runs.model())},
    "a setting of a layer": lambda runs: {"model": with_setting(runs.model())},
    "a buffer": lambda runs: {"model": with_buffer(runs.model())},
    "share_prompts": lambda runs: {"share_prompts": False},
    "head": lambda runs: {"head": "dense"},
    "autocast": lambda runs: {"bf16": True},
    "gradient checkpointing": lambda runs: {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_model_or_option_is_checked(name: str, runs: Runs) -> None:
    common = {"gradient_checkpointing": False}
    assert runs.checked_tokens(**common)
    assert not runs.checked_tokens(**common)
    checked_tokens = runs.checked_tokens(**{**common, **CHANGES[name](runs)})
    # No check can run with a `forward` of the user
    assert checked_tokens or name == "a replaced forward"
    assert runs.bench.trainer._first_batch.pass_file is None


# Functions of libraries that a forward runs, also outside the files of the model's classes
PATCHED = {
    "rotary positions": (modeling_llama, "apply_rotary_pos_emb"),
    "mask": (masking_utils, "causal_mask_function"),
    "attention": (sdpa_attention, "repeat_kv"),
    "torch": (torch.nn.functional, "silu"),
}


@pytest.mark.parametrize("name", PATCHED)
def test_a_patched_library_is_checked(name: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.checked_tokens()
    owner, function = PATCHED[name]
    plain = getattr(owner, function)
    monkeypatch.setattr(owner, function, lambda *x, **y: plain(*x, **y))
    assert runs.checked_tokens()
    assert runs.bench.trainer._first_batch.pass_file is None


def test_an_object_of_the_user_in_a_library_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mask:
        def __call__(self, *positional: Any, **keywords: Any) -> Any:
            raise NotImplementedError

    assert not is_replaced_in_libraries()
    monkeypatch.setattr(modeling_llama, "create_causal_mask", Mask())
    assert is_replaced_in_libraries()


def test_a_module_that_imports_what_is_asked_of_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_names = []
    lazy: Any = types.ModuleType("lazy")
    lazy.__getattr__ = asked_names.append
    monkeypatch.setattr(modeling_llama, "lazy", lazy, raising=False)
    assert not is_replaced_in_libraries()
    assert not asked_names


def test_a_compiled_layer_is_not_known(runs: Runs) -> None:
    model = runs.model()
    assert is_of_libraries(model)
    model.model.layers[0].mlp.compile(backend=lambda module, _: module.forward)
    assert not is_of_libraries(model)


def test_a_mask_of_the_user_in_a_library_is_checked_with_long_rows(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_llama.create_causal_mask

    def windowed(*positional: Any, **keywords: Any) -> Any:
        return plain(*positional, and_mask_function=lambda b, h, query, key: query - key < 100, **keywords)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    texts = [
        " ".join(f"w{(place * number) % 90}" for place in range(length)) for number, length in ((1, 220), (2, 180))
    ]
    data = Dataset.from_list([{"text": text} for text in texts])
    runs.bench.sft(model=runs.model(), train_dataset=data, max_length=256)
    assert runs.bench.trainer.scoring_forwards[0].packing.padded_reason is not None


@pytest.mark.parametrize("name", ["its code", "our code", "a version", "another device"])
def test_other_code_is_checked(name: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.checked_tokens()
    if name == "its code":
        plain = first_batch._source_of
        monkeypatch.setattr(first_batch, "_source_of", lambda x: f"{plain(x)}{x.__name__ == 'LlamaMLP'}")
    elif name == "our code":
        monkeypatch.setattr(first_batch, "_own_source", lambda: "changed")
    elif name == "a version":
        monkeypatch.setattr(first_batch, "_version", lambda package: "1" if package == "flash_attn" else None)
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert runs.checked_tokens()


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "a folder"])
def test_a_damaged_file_is_as_good_as_none(damage: str, runs: Runs) -> None:
    assert runs.checked_tokens()
    (path,) = files()
    content = path.read_bytes()
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": content[:-9], "empty": b"", "changed": content.replace(b"sdpa", b"SDPA")}[damage])
    assert runs.checked_tokens()
    if damage != "a folder":
        assert path.read_bytes() == content
        assert not runs.checked_tokens()


def test_a_folder_that_cannot_be_written_is_no_error(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "datasets").write_text("")
    for _ in range(2):
        assert runs.checked_tokens()


def test_an_adapter_that_begins_with_other_numbers_is_the_same(runs: Runs) -> None:
    assert runs.checked_tokens(runs.adapted(seed=1))
    assert not runs.checked_tokens(runs.adapted(seed=2))
    # Trained: its numbers are no longer 0
    assert runs.checked_tokens(runs.adapted(seed=2, init_lora_weights=False))


def failing_logits(runs: Runs) -> dict[str, Any]:
    """Return a trainer after whose construction something halves the model's logits."""

    def subclass(base: Any) -> Any:
        class Halved(base):
            def train(self, *args: Any, **kwargs: Any) -> Any:
                self.scoring_forwards[0].model_forward = halved
                return super().train(*args, **kwargs)

        return Halved

    def halved(model: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = type(model).forward(model, *args, **kwargs)
        outputs.logits = outputs.logits * 0.5
        return outputs

    return {"subclass": subclass}


def opt(runs: Runs) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = t.OPTForCausalLM(t.OPTConfig(vocab_size=97, word_embed_proj_dim=32, dropout=0.0, **sizes))
    return {"model": model, "processing_class": word_tokenizer()}


NOT_RECORDED: dict[str, Callable[[Runs], dict[str, Any]]] = {
    "short rows": lambda runs: {"max_length": 30},
    "hidden states that differ": opt,
    "logits that differ": failing_logits,
    "a hook": CHANGES["a hook"],
    "a layer of the user": CHANGES["a layer of the user"],
    "a layer of another package": lambda runs: {
        **CHANGES["a layer of another package"](runs),
        # As long as the check runs for such code
        "train_dataset": Dataset.from_list([{"text": " ".join(TEXTS * 3)}] * 2),
        "max_length": 512,
    },
}


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_only_complete_checks_that_pass_are_recorded(name: str, runs: Runs) -> None:
    for _ in range(2):
        assert runs.checked_tokens(**NOT_RECORDED[name](runs))
        assert not files()


def test_rows_that_are_long_for_code_of_the_user_are_named(runs: Runs) -> None:
    of_library = runs.checked_tokens()
    assert runs.checked_tokens(**CHANGES["a layer of the user"](runs)) > of_library
    row = runs.bench.trainer.explain()["first batch"]
    assert not row.routine
    assert "Up to 4 rows of at most 509 tokens" in row.reason
    assert "code that is not part of a library" in row.reason


def on_ranks(rank: Rank, change: Callable[[Any], None]) -> list[Any]:
    """Train twice; before the second time, this rank may `change` its trainer. Return what each training checked."""
    datasets.config.HF_DATASETS_CACHE = rank.folder / "datasets"
    results = []
    for is_second in (False, True):
        model = AutoModelForCausalLM.from_pretrained(os.environ["TINY_MODEL"])
        config = trl_ext.SFTConfig(
            output_dir=str(rank.folder), max_steps=1, per_device_train_batch_size=2, max_length=256, logging_steps=1,
            report_to="none", save_strategy="no", bf16=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = trl_ext.SFTTrainer(model=model, args=config, train_dataset=LONG)
        if is_second:
            change(trainer)
        trainer.train()
        results.append(next(x for x in trainer.state.log_history if "loss" in x).get(CHECKED, 0.0))
        rank.check(trainer)
    return results


CASES = {
    "same": lambda rank: on_ranks(rank, lambda trainer: None),
    "a hook on one rank": lambda rank: on_ranks(rank, lambda x: with_hook(x.model) if rank.index == 1 else None),
    "a setting on one rank": lambda rank: on_ranks(rank, lambda x: with_setting(x.model) if rank.index == 1 else None),
}


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        ("same", "ddp"),
        pytest.param("a hook on one rank", "ddp", marks=pytest.mark.slow),
        pytest.param("a setting on one rank", "ddp", marks=pytest.mark.slow),
        pytest.param("same", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_ranks_skip_the_checks_together(
    case: str, engine: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that checked alone would wait for the others. Weights that are split over ranks are always checked."""
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    first, second = run_on_ranks(__file__, [case], engine, tmp_path)[case]
    assert first == second
    assert first[0]
    assert (first[1] == 0) == (case == "same" and engine == "ddp")
