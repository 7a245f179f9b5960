"""What trl_ext/compat/ names of TRL and transformers, read from its source, and what of it is not where it is named.

A name is one of: what a file imports from a module of TRL; what is put in the place of a name of a trainer's module
(`module.x`); a method that `super()` is asked for, or that stands in for a trainer's own; an attribute of `self` that
none of our own rooms sets; a keyword, and an entry of a batch.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import transformers
import trl

from trl_ext.compat.data import REPLACEABLE

COMPAT = Path(__file__).parents[1] / "trl_ext" / "compat"
BOTH = (trl.DPOTrainer, trl.GRPOTrainer)

# Whose names each class of ours stands for, and each function that replaces names of "its" trainer's module
OWNERS: dict[str, tuple[type, ...]] = {
    "DataInternals": BOTH,
    "DPOLossInternals": (trl.DPOTrainer,),
    "GRPOInternals": (trl.GRPOTrainer,),
    "PolicyInFolder": BOTH,
    "ReferenceGiven": (trl.DPOTrainer,),
    "TensorParallelInternals": (trl.DPOTrainer,),
    "WholeBatches": BOTH,
    "adapters_made_by": BOTH,
    "gathered_by": (trl.GRPOTrainer,),
    "head_attached_by": BOTH,
    "loaded_models_recorded": (trl.DPOTrainer,),
    "no_adapter_copied_by": (trl.DPOTrainer,),
    "no_adapter_turned": (trl.GRPOTrainer,),
    "rotation_put_off": (transformers.Trainer,),
    "_shuffling_followed_by": (trl.GRPOTrainer,),
}

# Attributes of `self` that are ours, in the rooms above
OURS = {
    *("_about_to_visit", "_agreed", "_before_preparing", "_extra_columns", "_generated", "_loss_of", "_ranks_of_group"),
    *("_rewards_per_function", "_shuffled", "_train_sampler", "_window_began", "fill_reference", "policy_folder"),
    *("policy_loaded", "reference_pass", "_rewarded_nan"),
}

# Parameters that are given by name, or by place up to the one that is named
PARAMETERS: dict[tuple[type, str], tuple[str, ...]] = {
    (trl.GRPOTrainer, "_get_per_token_logps_and_entropies"): (
        *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        "compute_aux_loss",
    ),
    (trl.DPOTrainer, "_compute_loss"): ("model", "inputs", "return_outputs"),
    (trl.DPOTrainer, "compute_ref_log_probs"): ("model", "inputs"),
    (trl.DPOTrainer, "_prepare_dataset"): ("dataset", "processing_class", "args", "dataset_name"),
    (trl.DPOTrainer, "_precompute_ref_logps"): ("dataset", "name", "batch_size"),
}
FIELDS_OF_OUTPUT = {
    *("loss", "aux_loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"),
}
BATCH_ENTRIES: dict[type, set[str]] = {
    trl.GRPOTrainer: {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "pixel_values"},
    trl.DPOTrainer: {"input_ids", "completion_mask", "ref_chosen_logps", "ref_rejected_logps"},
}


class Named(NamedTuple):
    """A name that a file of compat/ needs.

    Args:
        file (`str`): which.
        owner (`str`): what has to have it.
        name (`str`)
        there (`bool`): whether it does.
    """

    file: str
    owner: str
    name: str
    there: bool


@cache
def source_of(trainer: type) -> str:
    """The source of a trainer and of all classes that it is made of."""
    return "\n".join(inspect.getsource(cls) for cls in trainer.__mro__ if cls is not object)


def names(source_of: Callable[[type], str] = source_of) -> Iterator[Named]:
    """Every name that compat/ needs."""
    sources = {owner: source_of(owner) for owner in {x for owners in OWNERS.values() for x in owners}}
    for path in sorted(COMPAT.glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl."):
                module = _module(str(node.module))
                yield from (
                    Named(path.name, str(node.module), alias.name, hasattr(module, alias.name)) for alias in node.names
                )
        for top in tree.body:
            if isinstance(top, ast.ClassDef | ast.FunctionDef):
                yield from _of_definition(path.name, top, sources)
    for (trainer, method), parameters in PARAMETERS.items():
        there = inspect.signature(getattr(trainer, method)).parameters if hasattr(trainer, method) else ()
        yield from (Named("by call", f"{trainer.__name__}.{method}()", name, name in there) for name in parameters)
    replaceable = sorted({name for methods in REPLACEABLE.values() for name in methods})
    yield from (Named("data.py", "GRPOTrainer", name, hasattr(trl.GRPOTrainer, name)) for name in replaceable)
    output = getattr(_module("trl.trainer.utils"), "FusedCausalLMOutput", None)
    fields = getattr(output, "__dataclass_fields__", ())
    yield from (Named("head.py", "FusedCausalLMOutput", name, name in fields) for name in sorted(FIELDS_OF_OUTPUT))
    for trainer, entries in BATCH_ENTRIES.items():
        yield from (
            Named("by entry", f"a batch of {trainer.__name__}", name, f'"{name}"' in sources[trainer])
            for name in sorted(entries)
        )


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _of_definition(file: str, top: ast.ClassDef | ast.FunctionDef, sources: dict[type, str]) -> Iterator[Named]:
    of_super, of_self, of_module = set(), set(), set()
    for node in ast.walk(top):
        if isinstance(node, ast.Attribute):
            value = node.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
                of_super.add(node.attr)
            elif isinstance(value, ast.Name) and value.id == "self":
                of_self.add(node.attr)
            elif isinstance(value, ast.Name) and value.id == "module":
                of_module.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_in_place_of":
            of_self.update(str(keyword.arg) for keyword in node.keywords if keyword.arg)
    own = {node.name for node in ast.walk(top) if isinstance(node, ast.FunctionDef)} - of_super
    of_self -= OURS | own | {x for x in of_self if x.isupper() or x.startswith("__") or x == "_VISION_INPUTS"}
    if top.name not in OWNERS:
        if of_super or of_module:
            yield Named(file, "OWNERS of tests/compat_names.py", top.name, False)
        return
    for owner in OWNERS[top.name]:
        named = f"{owner.__module__}.{owner.__name__}"
        for name in sorted(of_super):
            yield Named(file, named, name, hasattr(owner, name) and _defines(sources[owner], name))
        for name in sorted(of_self):
            yield Named(file, named, name, hasattr(owner, name) or _defines(sources[owner], name))
        module = sys.modules[owner.__module__]
        yield from (Named(file, module.__name__, name, hasattr(module, name)) for name in sorted(of_module))


def _defines(source: str, name: str) -> bool:
    """Whether a class defines a method of this name, or uses an attribute of it."""
    return re.search(rf"\bself\.{name}\b|\bdef {name}\b", source) is not None
