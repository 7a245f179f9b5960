"""Finds internals that trl_ext uses and an untested release of a library no longer has. `features.py` says what to do.

`names.json` lists them: module or `module:class` -> name -> the parameters that each supported release of a function
takes. A name in quotes is a word, and a name after a dot an attribute, in the source of its owner. A check takes as
long as importing TRL's trainers, so the user's cache folder keeps its result under a fingerprint of the files.
"""

import hashlib
import importlib
import inspect
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from ..version import __version__

NAMES: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("names.json").read_text())

_ABSENT = object()


@dataclass(frozen=True)
class Moved:
    """A name that an installed library no longer has, or a function that takes other parameters.

    Args:
        place (`str`): `module` or `module:class`.
        change (`str`): what has changed, as a clause.
    """

    place: str
    name: str
    change: str

    @property
    def package(self) -> str:
        return self.place.partition(":")[0].partition(".")[0]


def check_untested(found_versions: Mapping[str, str], tested: Mapping[str, SpecifierSet]) -> list[Moved]:
    """Return what has moved. Warn on the first rank that a version in `found_versions` is not among the `tested`."""
    untested = [name for name in found_versions if found_versions[name] not in tested[name]]
    if not untested:
        return []
    names = _moved_in(found_versions)
    if os.environ.get("RANK", "0") == "0":
        versions = " and ".join(f"{name} {found_versions[name]} (tested: {tested[name]})" for name in untested)
        count = f"{len(names) or 'none'} {'have' if len(names) > 1 else 'has'}"
        warnings.warn(
            f"trl_ext {__version__} is not tested with {versions}. Of the internals that trl_ext uses, {count} moved.",
            stacklevel=2,
        )
    return names


def moved(packages: Iterable[str]) -> list[Moved]:
    """Return each name of the packages that is gone or takes other parameters."""
    return [
        name
        for owner, of_owner in NAMES.items()
        if owner.partition(".")[0].partition(":")[0] in packages
        for name in _moved(owner, of_owner)
    ]


def parameters_of(owner: Any, name: str) -> str | None:
    """Return the parameters of a function or dataclass; `""` for other names, and `None` for missing ones.

    Args:
        owner (`Any`): a module or a class. A class also has each `self.name` in its source and in that of its bases.
    """
    value = inspect.getattr_static(owner, name, _ABSENT) if inspect.isclass(owner) else getattr(owner, name, _ABSENT)
    if inspect.isfunction(value) or (inspect.isclass(value) and is_dataclass(value)):
        parameters = [
            x.replace(annotation=x.empty, default=x.default if x.default is x.empty else ...)
            for x in inspect.signature(value).parameters.values()
        ]
        return str(inspect.Signature(parameters)).replace("Ellipsis", "...")
    if value is not _ABSENT:
        return ""
    if inspect.isclass(owner):
        modules = {cls.__module__ for cls in owner.__mro__} - {"builtins"}
        return "" if any(name in words_of(module) for module in modules) else None
    return "" if name[0] in '".' and name in words_of(owner.__name__) else None


@cache
def words_of(module: str) -> frozenset[str]:
    """Return each `self.name` in the source of a module, each `.name`, and each word in quotes."""
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (OSError, TypeError):  # compiled code
        return frozenset()
    return frozenset(re.findall(r"\bself\.(\w+)", source) + re.findall(r'"\w+"|\.\w+', source))


def owner_at(place: str) -> Any:
    """Return the module or class at `module` or `module:class`; `None` if it is gone."""
    module_name, _, class_name = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a dependency of the library is missing
        return None
    return getattr(module, class_name, None) if class_name else module


def _moved(place: str, names: Mapping[str, list[str]]) -> list[Moved]:
    owner = owner_at(place)
    described = place.replace(":", ".")
    if owner is None:
        return [Moved(place, name, f"`{described}`, which had `{name}`, is gone") for name in names]
    all_moved = []
    for name, accepted in names.items():
        parameters = parameters_of(owner, name)
        if parameters is None or (accepted and not parameters):  # gone, or no longer a function
            all_moved.append(Moved(place, name, f"`{described}` has no `{name}`"))
        elif accepted and parameters not in accepted:
            change = f"`{described}.{name}` takes `{parameters}` instead of `{accepted[-1]}`"
            all_moved.append(Moved(place, name, change))
    return all_moved


def _moved_in(found_versions: Mapping[str, str]) -> list[Moved]:
    """Return `moved(found_versions)`, from the user's cache folder if it has been found out before."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "trl_ext"
    path = folder / f"moved-{_fingerprint(found_versions)}.json"
    with suppress(OSError, ValueError, TypeError):
        return [Moved(*fields) for fields in json.loads(path.read_text())]
    names = moved(found_versions)
    with suppress(OSError):  # on an error, the next import checks again
        folder.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps([astuple(name) for name in names]))
        written.replace(path)
    return names


def _fingerprint(found_versions: Mapping[str, str]) -> str:
    """Return a hash of the versions, of the list of names, and of sizes and times of the files that have them."""
    facts: list[Any] = [__version__, dict(found_versions), NAMES]
    paths = {Path(__file__)}
    for place in NAMES:
        package, *modules = place.partition(":")[0].split(".")
        spec = find_spec(package) if package in found_versions else None
        for folder in (spec and spec.submodule_search_locations) or ():
            path = Path(folder, *modules)
            paths |= {path.with_suffix(".py"), path / "__init__.py"}
    stats = {str(path): path.stat() for path in paths if path.exists()}
    facts.append(sorted((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()))
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
