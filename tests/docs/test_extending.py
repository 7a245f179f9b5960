"""docs/extending.md: each trainer is in the tables that the recipe for a trainer names, which are all."""

import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

import drop_in_cases
import fuzz_fields
import matrix_rows
import memory_estimates
import other_drop_in_cases
import plan_cases
import same_bits
import trl_ext
from trl_ext import config
from trl_ext.checks import arguments as checks
from trl_ext.checks import names
from trl_ext.cli import arguments, demo, line
from trl_ext.compat import choices, moved, removed, replaced
from trl_ext.losses.loss_types import unknown_loss_types
from trl_ext.losses.preference import PREFERENCE_LOSSES

ROOT = Path(__file__).parents[2]
CLASSES = {name for name in trl_ext.__all__ if name.endswith("Trainer")}
PREFIXES = {name.removesuffix("Trainer") for name in CLASSES}
METHODS = {prefix.lower() for prefix in PREFIXES}
CONFIGS = {name.replace("Trainer", "Config") for name in CLASSES}


def page(name: str) -> str:
    return (ROOT / name).read_text()


def named_in(name: str, pattern: str) -> set[str]:
    """Return the methods that a file names by `pattern`, in which METHOD stands for their name in classes."""
    text = page(name)
    return {x.lower() for x in PREFIXES if re.search(pattern.replace("METHOD", x), text, re.MULTILINE)}


def of_classes(classes: Iterable[type]) -> set[str]:
    return {x.__name__ for x in classes} & {*CLASSES, *CONFIGS}


# File -> the trainers in its table, and the names of all trainers there
TABLES: dict[str, tuple[set[str], set[str]]] = {
    "trl_ext/__init__.py": (CONFIGS & {*trl_ext.__all__}, CONFIGS),
    "trl_ext/config.py": (of_classes(config.ADDED_FIELDS), CONFIGS),
    "trl_ext/compat/replaced.py": ({*replaced.REPLACED} & CLASSES, CLASSES),
    "trl_ext/compat/choices.py": ({*choices.METRICS}, CLASSES),
    "trl_ext/compat/removed.py": ({*removed.REMOVED_METHODS}, CLASSES),
    "trl_ext/compat/names.json": ({name.partition(":")[2] for name in moved.NAMES} & CLASSES, CLASSES),
    "trl_ext/checks/arguments.py": ({*checks._RULES}, METHODS),
    "trl_ext/checks/names.py": ({*names.OTHER_NAMES_OF}, METHODS),
    "trl_ext/checks/data.py": (
        named_in("trl_ext/checks/data.py", r"METHOD (\(`METHODTrainer`|reads)|or METHOD\b|`METHODTrainer` reads"),
        METHODS - {"distillation"},  # it reads what GRPO does
    ),
    "trl_ext/cli/line.py": ({*line.METHODS}, METHODS),
    "trl_ext/cli/demo.py": ({*demo._OF_METHOD}, METHODS),
    "trl_ext/cli/arguments.py": ({*arguments.CONFIGS}, METHODS),
    "tests/support/other_drop_in_cases.py": (
        {case.trainer for case in (*drop_in_cases.CASES.values(), *other_drop_in_cases.CASES.values())},
        METHODS,
    ),
    "tests/support/fuzz_fields.py": ({*fuzz_fields.ALL}, METHODS),
    "tests/support/same_bits.py": ({*same_bits.TRAINERS}, METHODS),
    "tests/support/matrix_rows.py": ({x[0] for x in (*matrix_rows.ROWS, *matrix_rows.OTHER_ROWS)}, METHODS),
    "tests/support/memory_estimates.py": ({method for method, *_ in memory_estimates.CASES.values()}, METHODS),
    "tests/support/plan_cases.py": ({case.method for case in plan_cases.CASES.values()}, METHODS),
    "tests/trainers/mistakes.txt": (named_in("tests/trainers/mistakes.txt", r"(?i:^>>> b\.METHOD\()"), METHODS),
    "tests/cli/mistakes.txt": (named_in("tests/cli/mistakes.txt", r"(?i:\$METHOD\b)"), METHODS),
    "README.md": (named_in("README.md", r"`METHODTrainer`|`METHODConfig`|import METHODConfig"), METHODS),
    "docs/architecture.md": (named_in("docs/architecture.md", r"(?i:^## A micro-batch of .*\bMETHOD\b)"), METHODS),
    "docs/supported.md": (named_in("docs/supported.md", r"^\| .*\| `METHODTrainer` \|"), METHODS),
    "docs/arguments.md": (named_in("docs/arguments.md", r"^What .*`METHODConfig`"), METHODS),
    "docs/command-line.md": (named_in("docs/command-line.md", r"(?i:^\| \[.*`METHOD`)"), METHODS),
    "docs/api.md": (named_in("docs/api.md", r"^::: trl_ext\.METHODTrainer$"), METHODS),
    "examples/README.md": (named_in("examples/README.md", r"(?i:\(METHOD(_lora)?\.py\))"), METHODS),
    "pyproject.toml": (named_in("pyproject.toml", r"^description = .*\bMETHOD\b"), METHODS),
}


@pytest.mark.parametrize("file", TABLES)
def test_each_trainer_has_a_row_in_each_table(file: str) -> None:
    in_table, trainers = TABLES[file]
    assert in_table == trainers
    assert file.removeprefix("trl_ext/") in recipe() or file == "trl_ext/compat/names.json"


def recipe() -> set[str]:
    """Return the files that the recipe for a trainer names."""
    text = page("docs/extending.md").split("\n## A trainer\n")[1].split("\n## ")[0]
    return set(re.findall(r"`([\w/-]+\.\w+)`", text))


# A trainer's own files, and those of DPO's loss type `sft`
OWN = re.compile(r"(trainers|planning|compat)/(sft|dpo|kto|grpo|rloo|reward|distillation|sampled)(_\w+)?\.py")


def names_a_trainer(path: Path) -> bool:
    """Return whether the code of a file names a trainer, its config or its method, or DPO's `sft`."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.NAME, tokenize.STRING) and re.fullmatch(
            r'"(sft|kto|rloo)"|"?(SFT|DPO|KTO|GRPO|RLOO|Reward|Distillation)(Trainer|Config)"?', token.string
        ):
            return True
    return False


def test_the_recipe_for_a_trainer_names_each_file_that_names_one() -> None:
    package = ROOT / "trl_ext"
    naming = {str(path.relative_to(package)) for path in package.rglob("*.py") if names_a_trainer(path)}
    assert {file for file in naming if not OWN.fullmatch(file)} - recipe() == set()


@pytest.mark.parametrize("file", sorted(recipe()))
def test_each_file_of_the_recipe_exists(file: str) -> None:
    assert (ROOT / file).exists() or (ROOT / "trl_ext" / file).exists()


def test_each_method_with_loss_types_has_its_table() -> None:
    fields_of = {x.lower(): getattr(trl_ext, f"{x}Config").__dataclass_fields__ for x in PREFIXES}
    with_loss_types = {x for x, fields in fields_of.items() if "loss_type" in fields}
    assert {x for x in METHODS if unknown_loss_types(x, ["no loss type"])} == with_loss_types


def test_each_loss_of_ours_is_in_the_docstring_and_on_the_page() -> None:
    for name in PREFERENCE_LOSSES:
        assert f'`"{name}"`' in (trl_ext.DPOConfig.__doc__ or "")
        assert f"| `{name}` |" in page("docs/supported.md")
