"""Checks that untested releases of TRL and transformers still have the names that trl_ext uses.

`names.py` lists them, with the parameters of each function. A check takes as long as importing TRL's trainers, so
the user's cache folder records each passed check under a fingerprint of the files.
"""

import hashlib
import importlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from ..version import __version__
from .names import NAMES

_MISSING = object()


def check_untested(found: Mapping[str, str], tested: Mapping[str, SpecifierSet]) -> None:
    """Warn on the first rank that the `found` version of a package is not among the `tested` ones.

    Raises:
        `ImportError`: names are gone or take other parameters; the message lists them.
    """
    lines = _moved_since_last_check(found)
    untested = " and ".join(f"{name} {found[name]}" for name in found if found[name] not in tested[name])
    known = " and ".join(f"{name}{versions}" for name, versions in tested.items())
    if lines:
        raise ImportError(
            f"trl_ext {__version__} does not work with {untested}, because internals that it uses have changed. "
            f"Install {known}, or a later trl_ext. Changed:\n" + "\n".join(f"- {line}" for line in lines)
        )
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"trl_ext {__version__} is not tested with {untested}; it is tested with {known}. All internals that it "
            "uses still exist, but their behavior may have changed. Check for a later trl_ext.",
            stacklevel=2,
        )


def moved(names: Mapping[str, Mapping[str, tuple[str, ...]]] = NAMES) -> list[str]:
    """Return a line for each name that is gone or takes other parameters."""
    return [line for owner, of_owner in names.items() for line in _moved(owner, of_owner)]


def parameters_of(owner: Any, name: str) -> str | None:
    """Return the parameters of a function or dataclass; `""` for other names, and `None` for missing ones.

    Args:
        owner (`Any`): a module or a class. A class also has each `self.name` and quoted word in its source.
    """
    held = inspect.getattr_static(owner, name, _MISSING) if inspect.isclass(owner) else getattr(owner, name, _MISSING)
    if inspect.isfunction(held) or (inspect.isclass(held) and is_dataclass(held)):
        plain = [
            x.replace(annotation=x.empty, default=x.default if x.default is x.empty else ...)
            for x in inspect.signature(held).parameters.values()
        ]
        return str(inspect.Signature(plain)).replace("Ellipsis", "...")
    return "" if held is not _MISSING or name in _named_in(owner) else None


def _moved(owner: str, names: Mapping[str, tuple[str, ...]]) -> list[str]:
    module_name, _, class_name = owner.partition(":")
    place = owner.replace(":", ".")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a dependency of TRL is missing
        found = None
    found = getattr(found, class_name, None) if class_name else found
    if found is None:
        return [f"`{place}` is gone, and with it {', '.join(f'`{name}`' for name in names)}"]
    lines = []
    for name, accepted in names.items():
        parameters = parameters_of(found, name)
        if parameters is None or (accepted and not parameters):  # gone, or no longer a function
            lines.append(f"`{place}` has no `{name}`")
        elif accepted and parameters not in accepted:
            lines.append(f"`{place}.{name}` takes `{parameters}` instead of `{accepted[-1]}`")
    return lines


@cache
def _named_in(owner: Any) -> frozenset[str]:
    """Return each `self.name` and each quoted word in the source of a class and its bases."""
    if not inspect.isclass(owner):
        return frozenset()
    modules = {cls.__module__ for cls in owner.__mro__} - {"builtins"}
    source = "\n".join(inspect.getsource(sys.modules[name]) for name in modules)
    return frozenset(re.findall(r"\bself\.(\w+)", source)) | frozenset(re.findall(r'"\w+"', source))


def _moved_since_last_check(found: Mapping[str, str]) -> list[str]:
    """Return `moved()`, or nothing if a file in the user's cache folder records that an earlier check found nothing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "trl_ext"
    path = folder / f"unmoved-{_fingerprint(found)}"
    with suppress(OSError):
        if path.exists():
            return []
    lines = moved()
    if not lines:
        with suppress(OSError):  # on an error, the next import checks again
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
    return lines


def _fingerprint(found: Mapping[str, str]) -> str:
    """Return a hash of the versions, of TRL's and transformers' file sizes and times, and of the list of names."""
    facts: list[Any] = [dict(found), NAMES]
    for package, pattern in (("trl", "**/*.py"), ("transformers", "*.py")):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            stats = {str(path): path.stat() for path in Path(folder).glob(pattern)}
            facts.append(sorted((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()))
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
