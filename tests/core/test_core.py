"""`trl_ext.core` scores as the model's own logits do. Its loops train as stock TRL does, where TRL is not installed."""

import gc
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from trl_ext import core

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "demo" / "model"
PAIRS = ROOT / "examples" / "demo" / "data" / "dpo" / "train.jsonl"
# Runs a script where an import of trl raises an error
WITHOUT_TRL = """
import runpy, sys

class NoTRL:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "trl":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTRL())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not any(name.partition(".")[0] == "trl" for name in sys.modules)
"""


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **changes)
    return AutoModelForCausalLM.from_config(config)


def batch() -> dict[str, Tensor]:
    """Return two prompts with three completions each, and padding on both sides."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (6, 14), generator=generator)
    ids[:3, :7], ids[3:, :7] = ids[0, :7], ids[3, :7]
    mask = torch.ones_like(ids)
    mask[:3, :2] = 0
    mask[1, 10:] = mask[5, 12:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def by_definition(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return log-probs of the labels, `(B, S - 1)`, from each row's own logits."""
    log_probs = torch.zeros(inputs["labels"].shape, dtype=torch.float64)
    for row, (ids, mask, labels) in enumerate(zip(*inputs.values(), strict=True)):
        places = mask.nonzero()[:, 0]
        log_p = model(ids[places][None]).logits[0].double().log_softmax(-1)
        for number, place in enumerate(places[1:].tolist()):
            if labels[place] != -100:
                log_probs[row, place] = log_p[number, labels[place]]
    return log_probs[:, 1:]


def count_tokens(model: nn.Module) -> list[int]:
    """Return a list to which each forward adds the tokens at the input embeddings."""
    counted: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, output: counted.append(args[0].numel()))  # type: ignore[operator]
    return counted


@pytest.mark.parametrize("kind", ["plain", "LoRA", "LoRA off", "prepared"])
def test_scores_are_those_of_the_models_logits(kind: str) -> None:
    model = tiny()
    inputs = batch()
    if kind.startswith("LoRA"):
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    within = model.disable_adapter() if kind == "LoRA off" else torch.enable_grad()
    with within:
        expected = by_definition(model, inputs)
        core.attach(model, outputs=("entropy",))
        core.attach(model, outputs=("entropy",))
        scored_model = Accelerator(cpu=True).prepare(model) if kind == "prepared" else model
        tokens = count_tokens(model)
        scores = core.score(scored_model, **inputs)
    assert scores.log_probs is not None
    assert scores.entropy is not None
    assert (scores.log_probs - expected).abs().max() <= 1e-5
    assert torch.equal(scores.label_mask, inputs["labels"][:, 1:] != -100)
    assert torch.equal(scores.entropy != 0, scores.label_mask)
    assert tokens[-1] < int(inputs["attention_mask"].sum())  # a prompt is computed once
    assert scores.log_probs.requires_grad == (kind != "LoRA off")
    assert core.score(scored_model, **inputs, outputs=("is_top1",)).entropy is None


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_are_those_of_the_padded_batch(lora: bool) -> None:
    gradients = []
    for padding_free in (True, False):
        model = tiny()
        if lora:
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
        core.attach(model, temperature=0.7, padding_free=padding_free)
        scores = core.score(model, **batch())
        assert scores.log_probs is not None
        (scores.log_probs * torch.linspace(-1, 1, scores.log_probs.numel()).view_as(scores.log_probs)).sum().backward()
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    packed, padded = gradients
    assert packed.keys() == padded.keys()
    assert all((packed[name] - padded[name]).abs().max() <= 1e-5 for name in padded)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's, while it compiles
def test_a_compiled_model_is_found_in_its_wrapper() -> None:
    model, inputs = tiny(), batch()
    expected = by_definition(model, inputs)
    core.attach(model)
    compiled = torch.compile(model, backend="eager")
    scores = core.score(compiled, **inputs)
    assert scores.log_probs is not None
    assert (scores.log_probs - expected).abs().max() <= 1e-5


def test_a_users_wrapper_of_a_module_stays() -> None:
    class Scaled(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, hidden: Tensor) -> Tensor:
            scaled: Tensor = 2 * self.module(hidden)
            return scaled

    model, inputs = tiny(), batch()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    expected = by_definition(model, inputs)
    core.attach(model)
    scores = core.score(model, **inputs)
    assert scores.log_probs is not None
    assert (scores.log_probs - expected).abs().max() <= 1e-5
    assert isinstance(model.model.layers[0].mlp, Scaled)


def test_virtual_tokens_of_prompt_tuning_have_no_columns() -> None:
    model = get_peft_model(tiny(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    core.attach(model)
    inputs = batch()
    scores = core.score(model, **inputs)
    assert scores.log_probs is not None
    assert torch.equal(scores.log_probs != 0, inputs["labels"][:, 1:] != -100)


def test_a_model_is_freed() -> None:
    model = tiny()
    core.attach(model)
    core.score(model, **batch())
    freed = ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_mistakes_are_errors_before_a_pass() -> None:
    model, inputs = tiny(), batch()
    for options, words in (
        ({"head": "Dense"}, "Unknown `head` 'Dense'. Choose from: 'tiled', 'dense'."),
        ({"kernels": "cuda"}, "Unknown `kernels` 'cuda'. Choose from: None, 'torch', 'triton'."),
        ({"temperature": 0.0}, "`temperature` must be a positive number, got 0.0."),
        ({"temperature": float("nan")}, "`temperature` must be a positive number, got nan."),
        ({"temperature": "1"}, "`temperature` must be a positive number, got '1'."),
        ({"padding_free": "no"}, "`padding_free` must be True or False, got 'no'."),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0."),
        ({"outputs": "entropy"}, "`outputs` must be a tuple of names, got 'entropy'."),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            core.attach(model, **options)
    with pytest.raises(ValueError, match=re.escape("LlamaForCausalLM has no scoring forward. Call `attach(model)`")):
        core.score(model, **inputs)
    with pytest.raises(ValueError, match=re.escape("Unknown option 'share_prompt'. Choose from: ")):
        core.attach(model, share_prompt=False)
    with pytest.raises(ValueError, match=re.escape("Unknown `outputs` 'entropies'. Choose from: log_probs, entropy")):
        core.attach(model, outputs=("entropies",))
    core.attach(model, temperature=0.5)
    for options in ({"temperature": 0.7}, {}):
        with pytest.raises(ValueError, match=re.escape("`attach` was called on this model with other options: ")):
            core.attach(model, **options)
    with pytest.raises(ValueError, match=re.escape("Unknown `outputs` 'logits'.")):
        core.score(model, **inputs, outputs=("logits",))
    shapes = "`labels` must have the shape of `input_ids`, (6, 14), got (6, 13)."
    with pytest.raises(ValueError, match=re.escape(shapes)):
        core.score(model, **{**inputs, "labels": inputs["labels"][:, 1:]})
    with pytest.raises(
        ValueError, match=re.escape("`attention_mask` must be a tensor of the shape of `input_ids`, got None.")
    ):
        core.score(model, **{**inputs, "attention_mask": None})
    with pytest.raises(
        ValueError, match=re.escape("`input_ids` must have rows of two tokens or more, got the shape (0, 14).")
    ):
        core.score(model, **{name: x[:0] for name, x in inputs.items()})
    for label in (-1, 97):
        model = tiny()
        core.attach(model)
        words = f"`labels` must be -100 or token ids from 0 to 96, got {label}."
        with pytest.raises(ValueError, match=re.escape(words)):
            core.score(model, **{**inputs, "labels": inputs["labels"].index_fill(1, torch.tensor([9]), label)})
    reads = "The reference reads `model.embed_tokens.weight`, which has `requires_grad=True`"
    with pytest.raises(ValueError, match=re.escape(reads)):
        core.Reference(model, Accelerator(cpu=True))
    with pytest.raises(
        ValueError, match=re.escape("`within` must return a context. Pass the method `model.disable_adapter`")
    ):
        core.Reference(model, Accelerator(cpu=True), within=lambda: None)  # type: ignore[arg-type,return-value]
    model.forward = lambda **_: None
    with pytest.raises(RuntimeError, match=re.escape("something replaced `model.forward` after `attach(model)`")):
        core.score(model, **inputs)


def test_mixed_precision_is_kept_or_refused() -> None:
    """After `prepare`, the scoring forward would run outside of autocast without a word."""
    AcceleratorState._reset_state()
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(tiny())
        with pytest.raises(RuntimeError, match=re.escape("Call `attach(model)` before `accelerator.prepare(model)`")):
            core.attach(prepared)
        model = tiny()
        core.attach(model)
        dtypes = []
        model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))
        core.score(accelerator.prepare(model), **batch())
        assert set(dtypes) == {torch.bfloat16}
    finally:
        AcceleratorState._reset_state()


def test_what_comes_after_the_first_score_is_seen() -> None:
    """Dropout differs between rows of equal tokens, so they are not shared."""
    model = tiny()
    core.attach(model)
    inputs = {name: x[:1, :10].repeat(2, 1) for name, x in batch().items()}
    core.score(model.eval(), **inputs)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False))
    tokens = count_tokens(model)
    core.score(adapted.eval(), **inputs)
    core.score(adapted.train(), **inputs)
    for module in adapted.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    core.score(adapted, **inputs)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    core.score(adapted, **inputs)
    assert [count // min(tokens) for count in tokens] == [1, 2, 1, 2]


def test_a_reference_runs_in_the_precision_of_the_policy() -> None:
    AcceleratorState._reset_state()
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model, policy = tiny(), tiny()
        core.attach(policy)
        reference = core.Reference(model.requires_grad_(False), accelerator)  # it is not prepared
        scores = core.score(accelerator.prepare(policy), **batch())
        assert scores.log_probs is not None
        assert torch.equal(reference.log_probs(**batch()), scores.log_probs)
    finally:
        AcceleratorState._reset_state()


def test_a_reference_scores_each_sequence_once(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = get_peft_model(tiny(), LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5))
    model.base_model.model.model.layers[0].eval()  # each module has its own mode
    modes = [module.training for module in model.modules()]
    inputs = batch()
    with model.disable_adapter():
        expected = by_definition(model.eval(), inputs)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    reference = core.Reference(model, accelerator, tmp_path, within=model.disable_adapter)
    tokens = count_tokens(model)
    first = reference.log_probs(**inputs)
    passes = len(tokens)
    second = reference.log_probs(**{name: x.flip(0) for name, x in inputs.items()})
    assert len(tokens) == passes
    assert (first - expected).abs().max() <= 1e-5
    assert torch.equal(second, first.flip(0))
    assert not first.requires_grad
    assert [module.training for module in model.modules()] == modes
    reference.flush()
    # A later run scores four stored sequences, then reads the others
    later = core.Reference(model, accelerator, tmp_path, within=model.disable_adapter)
    assert torch.equal(later.log_probs(**inputs), first)
    assert len(tokens) == passes + 1
    # Other weights are another reference
    with torch.no_grad():
        model.get_base_model().lm_head.weight.mul_(2)
    changed = core.Reference(model, accelerator, tmp_path, within=model.disable_adapter)
    assert (changed.log_probs(**inputs) - first).abs().max() > 0.1
    with pytest.raises(ValueError, match=re.escape("`labels` must be `input_ids` or -100, not shifted.")):
        reference.log_probs(**{**inputs, "labels": inputs["labels"].roll(-1, dims=1)})


@pytest.mark.parametrize("change", ["trained", "other adapter"])
def test_a_reference_that_changes_is_an_error(change: str) -> None:
    model, inputs = tiny(), batch()
    if change == "other adapter":
        config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
        model.add_adapter("other", config)
    reference = core.Reference(model.requires_grad_(False), Accelerator(cpu=True))
    reference.log_probs(**{name: x[:3] for name, x in inputs.items()})
    if change == "trained":
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
    else:
        model.set_adapter("other")
    with pytest.raises(RuntimeError, match="The reference has changed since its first pass"):
        reference.log_probs(**{name: x[3:] for name, x in inputs.items()})


def test_a_reference_whose_values_depend_on_the_batch_runs_in_each_call(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny(rope_parameters=rope, max_position_embeddings=8).eval().requires_grad_(False)
    inputs = batch()
    reference = core.Reference(model, Accelerator(cpu=True))
    tokens = count_tokens(model)
    reference.log_probs(**inputs)
    passes = len(tokens)
    reference.log_probs(**inputs)
    assert len(tokens) > passes
    with pytest.raises(ValueError, match="`folder` cannot store log-probs of this reference: its positions"):
        core.Reference(model, Accelerator(cpu=True), tmp_path)


def test_rows_without_a_gradient_are_found() -> None:
    advantages = torch.tensor([0.0, 1.0, -1.0, 0.5])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 1]])
    assert core.rows_with_gradient(advantages, mask).tolist() == [False, True, False, True]
    shapes = "`advantages` must have the shape (B,) and `completion_mask` (B, C), got (4, 1) and (4, 2)."
    with pytest.raises(ValueError, match=re.escape(shapes)):
        core.rows_with_gradient(advantages[:, None], mask)


def run_without_trl(script: str, *arguments: str, ranks: int = 1) -> list[float]:
    """Run an example; return the list that it prints last."""
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone", "--no-python"]
    command = [sys.executable, *launch, sys.executable] if ranks > 1 else [sys.executable]
    command += ["-W", "ignore", "-c", WITHOUT_TRL, str(ROOT / "examples" / script), *arguments]
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    printed: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return printed


def stock_losses(tmp_path: Path, batch_size: int, steps: int) -> list[float]:
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    config = trl.DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        learning_rate=1e-3,
        beta=0.1,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    trainer = trl.DPOTrainer(
        model,
        args=config,
        train_dataset=Dataset.from_list(pairs[: batch_size * steps]),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_dpo_loop_trains_as_stock_trl(ranks: int, tmp_path: Path) -> None:
    arguments = ("--batch_size", str(4 // ranks), "--steps", "4")
    losses = run_without_trl("loop_dpo.py", *arguments, ranks=ranks)
    assert losses == pytest.approx(stock_losses(tmp_path, 4, 4), abs=1e-5)
    assert len({round(loss, 4) for loss in losses}) > 2  # it trains


def test_the_grpo_loop_runs_without_trl() -> None:
    rewards = run_without_trl("loop_grpo.py", "--steps", "2")
    assert len(rewards) == 2


def test_the_trainers_say_that_they_need_trl(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for code, words in (
        ("from trl_ext import DPOTrainer", "ImportError: "),
        ("from trl_ext.cli.__main__ import main; sys.exit(main(['dpo', '--help']))", "trl-ext dpo: error: "),
    ):
        script.write_text(f"import sys\n{code}\n")
        command = [sys.executable, "-c", WITHOUT_TRL, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode != 0
        said = done.stderr.strip().splitlines()[-1]
        assert said.startswith(f"{words}trl_ext's trainers need TRL. Run `pip install 'trl_ext[trl]'`.")


def test_the_output_has_each_field_of_trls() -> None:
    from trl.trainer.utils import FusedCausalLMOutput  # not in the oldest TRL that these tests run on

    ours, trls = ({field.name for field in fields(x)} for x in (core.FusedCausalLMOutput, FusedCausalLMOutput))
    assert trls == ours - {"mean_log_probs"}
