"""Checks that untested releases of the libraries still have the internals that trl_ext uses.

`names.json` lists them: module or `module:class` -> name -> the parameters that each supported release of a function
takes. A name in quotes is a word, and a name after a dot an attribute, in the source of its owner. A check takes as
long as importing TRL's trainers, so the user's cache folder records each passed check under a fingerprint of the files.
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
from dataclasses import is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from ..version import __version__

NAMES: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("names.json").read_text())

_ABSENT = object()


def check_untested(found_versions: Mapping[str, str], tested: Mapping[str, SpecifierSet]) -> None:
    """Warn on the first rank that the version of a package in `found_versions` is not among the `tested` ones.

    Raises:
        `ImportError`: names are gone or take other parameters; the message lists them.
    """
    untested = [name for name in found_versions if found_versions[name] not in tested[name]]
    if not untested:
        return
    lines = _moved_since_last_check(found_versions)
    versions = " and ".join(f"{name} {found_versions[name]}" for name in untested)
    # TRL and transformers are named always, because it is their releases that fit each other
    package_names = [name for name in tested if name in ("trl", "transformers", *untested)]
    tested_versions = " and ".join(f"{name}{tested[name]}" for name in package_names)
    if lines:
        raise ImportError(
            f"trl_ext {__version__} does not work with {versions}, because internals that it uses have changed. "
            f"Install {tested_versions}, or a later trl_ext. Changed:\n" + "\n".join(f"- {line}" for line in lines)
        )
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"trl_ext {__version__} is not tested with {versions}; it is tested with {tested_versions}. All internals "
            "that it uses still exist, but their behavior may have changed. Check for a later trl_ext.",
            stacklevel=2,
        )


def moved(packages: Iterable[str]) -> list[str]:
    """Return a line for each name of the packages that is gone or takes other parameters."""
    return [
        line
        for owner, of_owner in NAMES.items()
        if owner.partition(".")[0].partition(":")[0] in packages
        for line in _moved(owner, of_owner)
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


def _moved(place: str, names: Mapping[str, list[str]]) -> list[str]:
    owner = owner_at(place)
    place = place.replace(":", ".")
    if owner is None:
        return [f"`{place}` is gone, and with it {', '.join(f'`{name}`' for name in names)}"]
    lines = []
    for name, accepted in names.items():
        parameters = parameters_of(owner, name)
        if parameters is None or (accepted and not parameters):  # gone, or no longer a function
            lines.append(f"`{place}` has no `{name}`")
        elif accepted and parameters not in accepted:
            lines.append(f"`{place}.{name}` takes `{parameters}` instead of `{accepted[-1]}`")
    return lines


def _moved_since_last_check(found_versions: Mapping[str, str]) -> list[str]:
    """Return `moved(found)`, or nothing if a file in the user's cache folder records that nothing had moved."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "trl_ext"
    path = folder / f"unmoved-{_fingerprint(found_versions)}"
    with suppress(OSError):
        if path.exists():
            return []
    lines = moved(found_versions)
    if not lines:
        with suppress(OSError):  # on an error, the next import checks again
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
    return lines


def _fingerprint(found_versions: Mapping[str, str]) -> str:
    """Return a hash of the versions, of TRL's and transformers' file sizes and times, and of the list of names."""
    facts: list[Any] = [dict(found_versions), NAMES]
    for package, pattern in (("trl", "**/*.py"), ("transformers", "*.py")):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            stats = {str(path): path.stat() for path in Path(folder).glob(pattern)}
            facts.append(sorted((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()))
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
