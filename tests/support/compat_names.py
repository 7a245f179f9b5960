"""Lists the internals of TRL and transformers that trl_ext uses, from its source.

    python tests/support/compat_names.py   # writes trl_ext/compat/names.py

Listed are the names that trl_ext imports from TRL and transformers, replaces in a trainer's module (`REPLACED`), calls
on `super()`, overrides, or reads from `self` where their classes have it; and the entries of a batch. The parameters of
a function count if it is imported, private, replaced, called on `super()`, or overridden with parameters of its own.
To add those of another release, such as the oldest supported one, run the command with an interpreter that has it.
"""

import ast
import contextlib
import importlib
import inspect
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers
import trl
from trl.generation.vllm_generation import VLLMGeneration

import trl_ext
from trl_ext.compat.choices import REPLACEABLE
from trl_ext.compat.moved import parameters_of
from trl_ext.compat.names import NAMES
from trl_ext.compat.replaced import REPLACED
from trl_ext.compat.sampled import PASS

PACKAGE = Path(trl_ext.__file__).parent
THEIRS = ("trl", "transformers")
BOTH = (trl.DPOTrainer, trl.GRPOTrainer)

BATCH_ENTRIES: dict[type, tuple[str, ...]] = {
    trl.GRPOTrainer: ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "pixel_values"),
    trl.DPOTrainer: ("input_ids", "completion_mask", "ref_chosen_logps", "ref_rejected_logps"),
}

# What `compat/sampled.py` reads and replaces of the objects that sample; it passes their parameters on
SAMPLERS: dict[type, tuple[str, ...]] = {
    transformers.GenerationMixin: ("_get_logits_processor",),
    VLLMGeneration: ("generate", "llm", "logprobs", "vllm_client"),
}

Names = dict[str, dict[str, str]]


def used(classes: Iterable[type] = ()) -> tuple[Names, list[str]]:
    """Return owner -> name -> parameters for all names used, and a line for each name that its owner does not have.

    Args:
        classes (`Iterable[type]`): further classes to search, in addition to those of the package.
    """
    found: Names = defaultdict(dict)
    nowhere: list[str] = []

    def add(owner: Any, name: str, parameters_count: bool, is_needed: bool = True) -> None:
        parameters = parameters_of(owner, name)
        if parameters is not None:
            found[place_of(owner)][name] = parameters if parameters_count else found[place_of(owner)].get(name, "")
        elif is_needed:
            nowhere.append(f"{place_of(owner)} has no `{name}`")

    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for owner, name in _imported(tree):
            add(owner, name, True)
        for owner, name in _trls(tree):
            add(owner, name, True)
        for name in _of_trainer(tree):
            for owner in BOTH:
                add(owner, name, name.startswith("_"), is_needed=False)  # it may be ours, or the other trainer's
    for owner, names in REPLACED.items():
        module = sys.modules[owner.__module__]
        for name in names:
            add(module, name, getattr(module, name, add).__module__.split(".")[0] in THEIRS)
    for cls in (*_classes(), *classes):
        for owner, name, is_super, is_needed in _of_class(cls):
            override = _override(cls, name)
            counts = name.startswith("_") or is_super if override is None else not _hands_on(override)
            add(owner, name, counts, is_needed)
    for name in sorted({name for methods in REPLACEABLE.values() for name in methods}):
        add(trl.GRPOTrainer, name, name == PASS)
    for sampler, names in SAMPLERS.items():
        for name in names:
            add(sampler, name, False)
    for trainer, entries in BATCH_ENTRIES.items():
        for entry in entries:
            add(trainer, f'"{entry}"', False)
    return {owner: dict(sorted(found[owner].items())) for owner in sorted(found)}, sorted(set(nowhere))


def place_of(owner: Any) -> str:
    return f"{owner.__module__}:{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__


def _imported(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            package, _, rest = (node.module or "").partition(".")
            if package in THEIRS and rest:
                module = importlib.import_module(str(node.module))
                yield from ((module, alias.name) for alias in node.names)


def _trls(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    """Return methods that are called on one of their classes, such as `trl.DPOTrainer.compute_loss(trainer, ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            package = {"trl": trl, "transformers": transformers}.get(getattr(node.value.value, "id", ""))
            owner = getattr(package, node.value.attr, None)
            if inspect.isclass(owner) and not node.attr.startswith("__"):
                yield owner, node.attr
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "next_of(trainer)":
            yield from ((owner, node.attr) for owner in BOTH if hasattr(owner, node.attr))


def _of_trainer(tree: ast.Module) -> Iterator[str]:
    """Return the attributes of a `trainer` that are read or set, except those that `hasattr` checks."""
    names = {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and _is_trainer(x.value)}
    yield from sorted(names - _asked_for(tree))


def _asked_for(tree: ast.AST) -> set[str]:
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and _is(x.func, "hasattr")]
    return {str(call.args[1].value) for call in calls if isinstance(call.args[1], ast.Constant)}


def _classes() -> Iterator[type]:
    """Return our classes that inherit from theirs."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        with contextlib.suppress(ImportError):  # Triton may not be installed
            for cls in vars(importlib.import_module(name)).values() if path.stem != "__main__" else ():
                if inspect.isclass(cls) and cls.__module__ == name and _theirs(cls) is not None:
                    yield cls


def _theirs(cls: type) -> type | None:
    return next((x for x in cls.__mro__ if x.__module__.split(".")[0] in THEIRS), None)


def _ours(cls: type) -> list[type]:
    return [x for x in cls.__mro__ if x is cls or x.__module__.split(".")[0] == "trl_ext"]


def _of_class(cls: type) -> Iterator[tuple[type, str, bool, bool]]:
    """Return owner, name, whether it is called on `super()`, and whether theirs must have it because ours do not."""
    owner = _theirs(cls)
    assert owner is not None
    own = {name for x in _ours(cls) for name in (*vars(x), *inspect.get_annotations(x))}
    of_self, of_super, optional = set(own), set(), set()
    for tree in (ast.parse(textwrap.dedent(inspect.getsource(x))) for x in _ours(cls)):
        optional |= _asked_for(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_super(node.value):
                of_super.add(node.attr)
            elif isinstance(node, ast.Attribute) and _is(node.value, "self"):
                of_self.add(node.attr)
                own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    names = {name for name in of_self - optional if not name.startswith("__")} | of_super
    yield from ((owner, name, name in of_super, name not in own) for name in sorted(names))


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
    found = next((vars(x)[name] for x in _ours(cls) if name in vars(x)), None)
    return found if inspect.isfunction(found) else None


def _hands_on(method: Any) -> bool:
    """Return whether a method takes any arguments, so that the parameters of theirs do not matter."""
    kinds = {x.kind for x in inspect.signature(method, follow_wrapped=False).parameters.values()}
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def _written(found: Names) -> str:
    """Return the source of names.py. Earlier parameters of a name are kept."""
    plain, functions = ["_NAMES = {"], ["_FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {"]
    for owner, names in found.items():
        of_owner = " ".join(name for name, parameters in names.items() if not parameters)
        if of_owner:
            plain.append(f"{owner!r}: {_wrapped(of_owner, beside=owner)},")
        accepted = {
            name: dict.fromkeys((*NAMES.get(owner, {}).get(name, ()), parameters))
            for name, parameters in names.items()
            if parameters
        }
        if accepted:
            each = [
                f"{name!r}: ({' '.join(f'{_wrapped(x)},' for x in of_name)})," for name, of_name in accepted.items()
            ]
            functions.append(f"{owner!r}: {{{' '.join(each)}}},")
    return "\n".join(
        [
            '"""The internals of TRL and transformers that trl_ext uses, and the parameters that each function takes.',
            "",
            "Written by `python tests/support/compat_names.py`.",
            '"""',
            "",
            "# The names of a class include the attributes of `self`, and the quoted words in its source",
            *(*plain, "}", "# Functions, with the parameters of every supported release", *functions, "}"),
            "NAMES: dict[str, dict[str, tuple[str, ...]]] = {",
            "owner: dict.fromkeys(_NAMES.get(owner, '').split(), ()) | _FUNCTIONS.get(owner, {})",
            "for owner in sorted({*_NAMES, *_FUNCTIONS})",
            "}",
            "",
        ]
    )


def _wrapped(parameters: str, beside: str = "") -> str:
    fits = len(f"    {beside!r}: {parameters!r},") <= 120
    lines = textwrap.wrap(parameters, 95 if fits else min(95, len(parameters) - 1), drop_whitespace=False)
    return repr(parameters) if len(lines) == 1 else f"({' '.join(map(repr, lines))})"


if __name__ == "__main__":
    names, nowhere = used()
    assert not nowhere, nowhere
    target = PACKAGE / "compat" / "names.py"
    target.write_text(_written(names))
    subprocess.run([sys.executable, "-m", "ruff", "format", str(target)], check=True)
