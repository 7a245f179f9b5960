"""Tries a release of TRL that is not pinned: what it changes for trl_ext, and what still equals stock TRL on it.

    make try-trl VERSION=1.17.0

The interpreter that runs this file has the release. The pinned one is only read, and may be in another environment.
"""

import argparse
import ast
import difflib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
NAMES: dict[str, dict[str, list[str]]] = json.loads((ROOT / "trl_ext/compat/names.json").read_text())
DROP_INS = "tests/trainers/test_drop_in.py::test_training_equals_stock_trl"
OTHER_DROP_INS = "tests/trainers/test_other_drop_ins.py::test_training_equals_stock_trl"
# A trainer each, with a reference, an adapter, the store and a KL term among them; then what moves beside these
TESTS = [
    "tests/compat/test_compat_names.py::test_every_internal_that_is_used_is_listed",
    "tests/losses/test_loss_types.py",
    *(f"{DROP_INS}[{case}]" for case in ("dpo-sigmoid-full", "dpo-precompute", "dpo-hinge-lora")),
    *(f"{DROP_INS}[{case}]" for case in ("grpo-grpo-token-full", "grpo-on_policy-beta", "grpo-generation")),
    *(
        f"{OTHER_DROP_INS}[{case}]"
        for case in ("sft-nll-full", "kto-kto-lora", "rloo-defaults-full", "reward-margins-full")
    ),
    "tests/compat/test_mutations.py",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pinned", type=Path, required=True, help="folder of the pinned TRL: .../site-packages/trl")
    parser.add_argument("--only-read", action="store_true", help="compare the sources, and train nothing")
    arguments = parser.parse_args()
    new = Path(str((find_spec("trl") or sys).origin)).parent  # type: ignore[union-attr]
    print(f"trl {version('trl')} with transformers {version('transformers')}, beside {arguments.pinned}")
    _print("What trl_ext says of it", guard_lines())
    _print("Code that trl_ext overrides, replaces or calls, and that has changed", changed_code(arguments.pinned, new))
    if arguments.only_read:
        return 0
    print("\nTrainings beside stock TRL, and with a name renamed:", flush=True)
    # `default`: the warning of an untested version is no error
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-W", "default", "-m", "not slow and not nightly"]
    return subprocess.run([*command, *TESTS], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode


def _print(title: str, lines: list[str]) -> None:
    print(f"\n{title}:", *(f"- {line}" for line in lines or ["nothing"]), sep="\n", flush=True)


def guard_lines() -> list[str]:
    """Return a line for each name that is gone or takes other parameters, with the features that need it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", _GUARD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:  # TRL itself is refused
        return done.stderr.strip().splitlines()[-1:]
    return done.stdout.splitlines()


_GUARD = """
from trl_ext.compat.features import features_of
from trl_ext.compat.moved import moved
for name in moved(["trl"]):
    print(f"{name.change}: {', '.join(features_of(name.place, name.name)) or 'the trainer does not work'}")
"""


def changed_code(old: Path, new: Path) -> list[str]:
    """Return a line for each function of TRL among `NAMES` whose code differs between two folders of TRL."""
    sources = Sources(old), Sources(new)
    our_methods = _our_methods()
    lines = []
    for owner, names in NAMES.items():
        module, _, class_name = owner.partition(":")
        if module.partition(".")[0] != "trl":
            continue
        for name in names:
            before, after = (source.function(module, class_name, name) for source in sources)
            if before is None or after is None or before == after:  # the guard names what is gone
                continue
            diff = list(difflib.ndiff(before.splitlines(), after.splitlines()))
            added, removed = (sum(line.startswith(sign) for line in diff) for sign in "+-")
            how = ", overridden" if class_name and name in our_methods else ""
            place = f"{class_name}." if class_name else ""  # a function of a module is imported by several
            lines.append(f"`{place}{name}`: {added} lines added, {removed} removed{how}")
    return list(dict.fromkeys(lines))


class Sources:
    """The functions of a folder of TRL: their code without comments and docstrings."""

    def __init__(self, folder: Path) -> None:
        # (module, class or "", function) -> code, and the same for a name wherever it is
        self.functions: dict[tuple[str, str, str], str] = {}
        self.anywhere: dict[tuple[str, str], str] = {}
        for path in sorted(folder.rglob("*.py")):
            module = ".".join(("trl", *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
            for node in ast.parse(path.read_text()).body:
                is_class = isinstance(node, ast.ClassDef)
                for function in node.body if is_class else [node]:
                    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                        class_name = node.name if is_class else ""
                        code = _code(function)
                        self.functions[module, class_name, function.name] = code
                        self.anywhere.setdefault((class_name, function.name), code)

    def function(self, module: str, class_name: str, name: str) -> str | None:
        """Return the code of a function, also if the module has only imported it or its class."""
        return self.functions.get((module, class_name, name)) or self.anywhere.get((class_name, name))


def _code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return ast.unparse(function)


def _our_methods() -> set[str]:
    """Return the names of all methods of the classes in `trl_ext/trainers`."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "trl_ext/trainers").glob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {x.name for cls in classes for x in cls.body if isinstance(x, ast.FunctionDef)}


if __name__ == "__main__":
    sys.exit(main())
