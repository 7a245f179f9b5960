"""Lists the internals of other libraries that trl_ext uses, from its source.

    python tests/support/compat_names.py   # writes trl_ext/compat/names.json

Of TRL and transformers, these are the names that trl_ext imports, replaces in a trainer's module (`REPLACED`), calls
on `super()`, overrides, or reads from `self` or from a trainer; and the entries of a batch. Of the other libraries,
what it imports from a private place, and `INTERNALS`. A name stands once, at the class that defines it. The parameters
of a function count if it is imported, private, replaced, called on `super()`, or overridden with parameters of its own.
To add those of another release, such as the oldest supported one, run the command with an interpreter that has it.
"""

import ast
import contextlib
import importlib
import inspect
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import transformers
import trl

import trl_ext
from trl_ext.compat.moved import NAMES, owner_at, parameters_of, words_of
from trl_ext.compat.overrides import REPLACEABLE
from trl_ext.compat.replaced import REPLACED
from trl_ext.compat.sampled import LIVE_ARGUMENTS, PASS

PACKAGE = Path(trl_ext.__file__).parent
WITH_CLASSES = ("trl", "transformers")  # our classes inherit from theirs
LIBRARIES = (*WITH_CLASSES, "accelerate", "datasets", "deepspeed", "peft", "torch")
# The word that a file's name begins with -> the trainers that its objects belong to. All others belong to all
TRAINERS: dict[str, tuple[Any, ...]] = {
    "sft": (trl.SFTTrainer,),
    "dpo": (trl.DPOTrainer,),
    "kto": (trl.KTOTrainer,),
    "grpo": (trl.GRPOTrainer,),
    "rloo": (trl.RLOOTrainer,),
    "sampled": (trl.GRPOTrainer, trl.RLOOTrainer),
    "reference": (trl.DPOTrainer, trl.KTOTrainer, trl.GRPOTrainer, trl.RLOOTrainer),
    "generation": (trl.GRPOTrainer, trl.RLOOTrainer),
    "reward": (trl.RewardTrainer,),
    "distillation": (trl.DistillationTrainer,),
    "teacher": (trl.DistillationTrainer,),
    "column": (trl.DistillationTrainer,),
    "": (
        trl.SFTTrainer,
        trl.DPOTrainer,
        trl.KTOTrainer,
        trl.GRPOTrainer,
        trl.RLOOTrainer,
        trl.RewardTrainer,
        trl.DistillationTrainer,
    ),
}

BATCH_ENTRIES: dict[type, tuple[str, ...]] = {
    trl.GRPOTrainer: ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "pixel_values"),
    trl.DistillationTrainer: ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"),
    trl.DPOTrainer: ("input_ids", "completion_mask", "ref_chosen_logps", "ref_rejected_logps"),
}

# Names of objects that are no trainers, which no search of the source can attribute to a class
INTERNALS = {
    "accelerate.accelerator": "._is_accelerate_prepared",
    "accelerate.accelerator:Accelerator": "_models _prepare_cp _prepare_deepspeed deepspeed_ulysses_dl_adapter",
    "accelerate.commands.launch": "launch_command_parser",
    "accelerate.hooks": "._hf_hook ._old_forward",
    "accelerate.state:GradientState": "_set_sync_gradients",
    "accelerate.utils.fsdp_utils": "fsdp2_prepare_model",
    "datasets.arrow_dataset:Dataset": "_indices",
    "datasets.iterable_dataset:IterableDataset": "_formatting",
    "deepspeed.runtime.engine:DeepSpeedEngine": "optimizer zero_optimization_stage",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": "_SEQUENCE_DATA_PARALLEL_GROUP _SEQUENCE_PARALLEL_GROUP",
    "deepspeed.runtime.zero.partition_parameters": ".ds_process_group .ds_shape .ds_status .ds_tensor",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": "model_parallel_group model_parallel_rank",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": "model_parallel_group model_parallel_rank",
    "peft.peft_model:PeftModel": "active_peft_config",
    "peft.tuners.lora.config:LoraConfig": "alora_invocation_tokens",
    "peft.tuners.lora.layer:LoraLayer": "lora_variant",
    "peft.tuners.lora.variants": "ALoraLinearVariant",
    "peft.utils.other": "AuxiliaryTrainingWrapper TrainableTokensWrapper",
    "peft.utils.other:AuxiliaryTrainingWrapper": "_adapters",
    "torch": "UntypedStorage",
    "torch._dynamo.eval_frame:OptimizedModule": "_orig_mod",
    "torch.nn.modules.dropout": "_DropoutNd",
    "torch.nn.modules.module": (
        "_global_forward_hooks _global_forward_pre_hooks _global_backward_hooks _global_backward_pre_hooks"
    ),
    "torch.nn.modules.module:Module": (
        "_backward_hooks _backward_pre_hooks _buffers _compiled_call_impl _forward_hooks _forward_pre_hooks _modules "
        "_parameters"
    ),
    "torch.nn.parallel.distributed": '"_ddp_params_and_buffers_to_ignore"',
    "torch:Tensor": "_version _post_accumulate_grad_hooks",
    "torch:UntypedStorage": "_cdata resize_",
    "transformers.configuration_utils:PreTrainedConfig": (
        "_attn_implementation _attn_implementation_internal _experts_implementation _name_or_path"
    ),
    "transformers.cache_utils:Cache": "reorder_cache",
    "transformers.generation.continuous_batching.input_outputs:ContinuousBatchingIOs": "prepare_batch_tensors",
    "transformers.generation.continuous_batching.requests:RequestState": (
        "fork generated_tokens initial_tokens position_offset request_id"
    ),
    "transformers.generation.utils:GenerationMixin": "_get_logits_processor _get_stopping_criteria _prefill",
    "transformers.integrations.tensor_parallel": "ReplicatedWithGradAllReduce",
    "transformers.modeling_layers:GradientCheckpointingLayer": "_gradient_checkpointing_func",
    "transformers.modeling_utils:PreTrainedModel": (
        '"_hf_peft_config_loaded" _is_stateful _supports_attention_backend _tp_size'
    ),
    "trl.trainer.dpo_trainer:DPOTrainer": "compute_ref_log_probs",
    "trl.generation.vllm_generation:VLLMGeneration": "generate llm logprobs vllm_client",
}

# Private names of Python and of optional packages, and those that only other releases have
NOT_LISTED = {
    "argparse": "_actions _negative_number_matcher _option_string_actions",
    "collections.namedtuple": "_asdict _fields _replace",
    "sys": "_current_frames",
    "torch.ops.aten": "_local_scalar_dense",
    "tqdm": "_instances",
    "transformers < 5.23": "_hf_tp_plan",
    "vllm": "_registry",
}

Names = dict[str, dict[str, str]]


def used(classes: Iterable[type] = ()) -> tuple[Names, list[str]]:
    """Return owner -> name -> parameters for all names used, and a line for each name that its owner does not have.

    Args:
        classes (`Iterable[type]`): further classes to search, in addition to those of the package.
    """
    names: Names = defaultdict(dict)
    nowhere: list[str] = []

    def add(owner: Any, name: str, parameters_count: bool, is_needed: bool = True) -> None:
        parameters = parameters_of(owner, name)
        if parameters is not None:
            of_owner = names[place_of(owner)]
            of_owner[name] = parameters if parameters_count else of_owner.get(name, "")
        elif is_needed:
            nowhere.append(f"{place_of(owner)} has no `{name}`")

    def add_of_class(cls: Any, name: str, parameters_count: bool, is_needed: bool = True) -> None:
        add(_definer(cls, name), name, parameters_count, is_needed)

    for path in _files():
        tree = _parsed(path)
        for module, name in _imported(tree):
            add(module, name, True)
        for cls, name in _called_on_classes(tree):
            add_of_class(cls, name, True)
        for name in _read_from_trainer(tree):
            for trainer in TRAINERS.get(path.stem.partition("_")[0], TRAINERS[""]):
                # It may be ours, or another trainer's
                add_of_class(trainer, name, name.startswith("_"), is_needed=False)
    for trainer_name, replaceable in REPLACED.items():
        replaced_in: Any = getattr(trl, trainer_name, None) or getattr(transformers, trainer_name)
        module = sys.modules[replaced_in.__module__]
        for name in replaceable:
            add(module, name, getattr(module, name, add).__module__.split(".")[0] in WITH_CLASSES)
    for cls in (*_classes(), *classes):
        for name, is_super, is_needed in _of_class(cls):
            override = _override(cls, name)
            counts = name.startswith("_") or is_super if override is None else not _takes_anything(override)
            add_of_class(_their_class(cls), name, counts, is_needed)
    for name in sorted({PASS, *(name for methods in REPLACEABLE.values() for name in methods)}):
        add_of_class(trl.GRPOTrainer, name, name == PASS)
    for name in LIVE_ARGUMENTS:
        add_of_class(trl.GRPOTrainer, name, False)
    for trainer, entries in BATCH_ENTRIES.items():
        for entry in entries:
            add(trainer, f'"{entry}"', False)
    for place, internals in INTERNALS.items():
        for name in internals.split():
            add(owner_at(place), name, "vllm" not in place)
    return {owner: dict(sorted(names[owner].items())) for owner in sorted(names)}, sorted(set(nowhere))


def unlisted_private_names() -> list[str]:
    """Return a line for each private name that trl_ext reads from an object, defines nowhere, and does not list."""
    known = {name.strip('."') for of_owner in NAMES.values() for name in of_owner}
    known |= {name for names in NOT_LISTED.values() for name in names.split()}
    read: dict[str, str] = {}
    for path in _files():
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias):
                known.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
            elif isinstance(node, ast.Attribute) and _is(node.value, "self") and isinstance(node.ctx, ast.Store):
                known.add(node.attr)
            elif isinstance(node, ast.Attribute):
                read.setdefault(node.attr, path.name)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
                name = node.args[1]
                read.setdefault(str(name.value) if isinstance(name, ast.Constant) else "", path.name)
    private = {name for name in read if name.startswith("_") and not name.endswith("__")}
    return sorted(f"{read[name]}: `{name}`" for name in private - known)


def place_of(owner: Any) -> str:
    return f"{owner.__module__}:{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__


def _definer(cls: type, name: str) -> type:
    """Return the base that has a name, or else the lowest one whose source names it; `cls` if none does."""
    bases = [x for x in cls.__mro__ if x.__module__.split(".")[0] in WITH_CLASSES and "._" not in x.__module__]
    definers = [x for x in bases if name in vars(x)] or [x for x in reversed(bases) if name in words_of(x.__module__)]
    return next(iter(definers), cls)


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imported(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    """Return all that is imported from a module of TRL or transformers, and from private modules of the others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            library, *modules = (node.module or "").split(".")
            names = [alias.name for alias in node.names]
            if library in LIBRARIES and library not in WITH_CLASSES:
                is_private = any(x.startswith("_") for x in modules)
                names = [name for name in names if is_private or name.startswith("_")]
            if library in LIBRARIES and modules and names:
                module = importlib.import_module(str(node.module))
                yield from ((module, name) for name in names)


def _called_on_classes(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    """Return methods that are called on a class, such as `trl.DPOTrainer.compute_loss(trainer, ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            library = {"trl": trl, "transformers": transformers}.get(getattr(node.value.value, "id", ""))
            owner = getattr(library, node.value.attr, None)
            if inspect.isclass(owner) and not node.attr.startswith("__"):
                yield owner, node.attr
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "next_of(trainer)":
            yield from ((owner, node.attr) for owner in TRAINERS if hasattr(owner, node.attr))


def _read_from_trainer(tree: ast.Module) -> Iterator[str]:
    """Return the attributes of a `trainer` that are read or set, except those that `hasattr` checks."""
    names = {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and _is_trainer(x.value)}
    yield from sorted(names - _asked_for(tree))


def _asked_for(tree: ast.AST) -> set[str]:
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and _is(x.func, "hasattr")]
    return {str(call.args[1].value) for call in calls if isinstance(call.args[1], ast.Constant)}


def _classes() -> Iterator[type]:
    """Return our classes that inherit from theirs."""
    for path in _files():
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        with contextlib.suppress(ImportError):  # Triton may not be installed
            for cls in vars(importlib.import_module(name)).values() if path.stem != "__main__" else ():
                if inspect.isclass(cls) and cls.__module__ == name and _their_class(cls) is not None:
                    yield cls


def _their_class(cls: type) -> type | None:
    return next((x for x in cls.__mro__ if x.__module__.split(".")[0] in WITH_CLASSES), None)


def _ours(cls: type) -> list[type]:
    return [x for x in cls.__mro__ if x is cls or x.__module__.split(".")[0] == "trl_ext"]


def _of_class(cls: type) -> Iterator[tuple[str, bool, bool]]:
    """Return name, whether it is called on `super()`, and whether theirs must have it because ours do not."""
    our_names = {name for x in _ours(cls) for name in (*vars(x), *inspect.get_annotations(x))}
    of_self, of_super, optional = set(our_names), set(), set()
    for tree in (ast.parse(textwrap.dedent(inspect.getsource(x))) for x in _ours(cls)):
        optional |= _asked_for(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_super(node.value):
                of_super.add(node.attr)
            elif isinstance(node, ast.Attribute) and _is(node.value, "self"):
                of_self.add(node.attr)
                our_names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    names = {name for name in of_self - optional if not name.startswith("__")} | of_super
    yield from ((name, name in of_super, name not in our_names) for name in sorted(names))


def _is_trainer(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return _is(node.value, "self") and node.attr in ("trainer", "host", "trl")
    return _is(node, "trainer") or _is(node, "host")


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _is(node.func, "super")


def _override(cls: type, name: str) -> Any:
    """Return our function that replaces theirs."""
    override = next((vars(x)[name] for x in _ours(cls) if name in vars(x)), None)
    return override if inspect.isfunction(override) else None


def _takes_anything(method: Any) -> bool:
    """Return whether a method takes any arguments, so that the parameters of theirs do not matter."""
    kinds = {x.kind for x in inspect.signature(method, follow_wrapped=False).parameters.values()}
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def with_earlier(names: Names) -> dict[str, dict[str, list[str]]]:
    """Return the names with their parameters, those of earlier releases first."""
    return {
        owner: {
            name: [*dict.fromkeys((*NAMES.get(owner, {}).get(name, ()), parameters))] if parameters else []
            for name, parameters in of_owner.items()
        }
        for owner, of_owner in names.items()
    }


if __name__ == "__main__":
    names, nowhere = used()
    assert not nowhere, nowhere
    target = PACKAGE / "compat" / "names.json"
    target.write_text(json.dumps(with_earlier(names), indent=1) + "\n")
