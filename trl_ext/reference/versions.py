"""Whose version says what code does: packages in each identity, other installed packages, or no one (users' code)."""

import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import FunctionType
from typing import Any

from ..packing.hooks import is_from_hub

# Packages whose versions are part of the identity, and packages whose functions on modules do not change results
VERSIONED = {"torch", "transformers", "peft", "trl_ext", *sys.stdlib_module_names} - {"__main__"}
ENGINES = {"accelerate", "deepspeed", "trl"}

# Of models with `trust_remote_code`. The identity has a hash of their source files
_REMOTE = "transformers_modules"


class UnknownCodeError(ValueError):
    """The reference runs or holds something that a later run cannot compare. The message says what."""


def is_foreign(module: str) -> bool:
    """Whether no version in each identity says what a module of this name does."""
    return module.split(".")[0] not in VERSIONED | ENGINES


def is_remote(module: str) -> bool:
    return module.split(".")[0] == _REMOTE


def module_of(value: Any) -> str:
    """Return the name of the module that defines a function or a class, or the class of another object."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))  # not `__module__`, which `functools.wraps` copies
    return str((value if isinstance(value, type) else type(value)).__module__)


def name_and_version(value: Any) -> str:
    """Return what identifies a foreign function, class or object: its name, with its package's version.

    Raises `UnknownCodeError` for users' code. It may read closures, globals, objects and files, which change between
    runs without a change of the code.
    """
    module = module_of(value)
    named = value if isinstance(value, FunctionType | type) else type(value)
    package_version = version_of(module)
    if isinstance(value, FunctionType) and is_from_hub(value):
        package_version = value.__code__.co_filename  # has the revision
    elif is_foreign(module) and not package_version and not is_remote(module):
        raise UnknownCodeError(f"trl_ext cannot tell what `{module}.{named.__qualname__}` reads")
    return f"{package_version} {module}.{named.__qualname__}"


# Reads the metadata of all installed packages
_distributions = cache(packages_distributions)


@cache
def version_of(module: str) -> str:
    """Return name and version of the installed package of a foreign module; "" if there is none, as for a script."""
    package = module.split(".")[0]
    if not package or not is_foreign(package):
        return ""
    imported = sys.modules.get(package)
    file = getattr(imported, "__file__", None) or next(iter(getattr(imported, "__path__", ())), "")
    if {"site-packages", "dist-packages"}.isdisjoint(Path(file or "").parts):
        return ""
    with suppress(PackageNotFoundError, IndexError):
        distribution = _distributions().get(package, [package])[0]
        return f"{package} {version(distribution)}"
    return f"{package} {getattr(imported, '__version__', '')}"
