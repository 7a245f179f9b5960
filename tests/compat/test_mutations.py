"""A later release that renames a private name: trainers equal stock TRL, or refuse with one line; all else still runs.

`tests/support/mutations.py` has the names, the trainings, and what counts as a failure.
"""

from collections.abc import Iterator

import pytest

from mutations import COMMANDS, LATER, MUTATIONS, RUNS, Bench, commands_for, failures, is_one_line, other_results
from tiers import fast_first

FAST = ("hash_module", "self.ref_model@kto", "_start_weight_update")
# Names whose loss would change the result without an error: the trap is set if nothing notices that they moved
TRAPS = ("self.ref_model@dpo", "self.ref_model@kto", "self.ref_model@grpo", "self.ref_model@rloo", "_compute_loss")
LONGEST_LINE = 200


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("mutations"))
    yield bench
    bench.stop()


@pytest.mark.parametrize("name", fast_first(MUTATIONS, *FAST))
def test_trainers_equal_stock_or_refuse_with_one_line(name: str, bench: Bench) -> None:
    mutation = MUTATIONS[name]
    copy, result = bench.train(mutation, commands=commands_for(mutation))
    assert failures(copy, result) == []


@pytest.mark.parametrize("name", fast_first(MUTATIONS, FAST[0]))
def test_import_never_fails(name: str, bench: Bench) -> None:
    _, result = bench.train(MUTATIONS[name], runs=[])
    assert not result.crash
    assert result.imports == {}


@pytest.mark.parametrize("name", fast_first((*TRAPS, "compute_loss"), "self.ref_model@kto"))
def test_a_move_that_no_check_notices_changes_no_number(name: str, bench: Bench) -> None:
    _, result = bench.train(MUTATIONS[name], keeps_version=True)
    assert other_results(result) == []  # an error is right: it is better than another result


def test_an_unknown_trl_with_all_names_is_one_line(bench: Bench) -> None:
    _, result = bench.train(None, runs=["dpo"])
    assert not result.crash
    assert result.imports == {}
    (line,) = [*result.lines, *result.runs["dpo"]["lines"]]
    assert LATER["trl"] in line
    assert "\n" not in line.strip()
    assert len(line) <= LONGEST_LINE


@pytest.mark.slow
def test_an_unknown_trl_with_all_names_trains_and_runs_commands(bench: Bench) -> None:
    copy, result = bench.train(None, runs=list(RUNS), commands=tuple(COMMANDS))
    assert failures(copy, result) == []


def test_the_names_are_of_every_part() -> None:
    features = {mutation.feature for mutation in MUTATIONS.values()}
    assert len(MUTATIONS) >= 40
    assert len(features) >= 14
    assert {mutation.libraries[0] for mutation in MUTATIONS.values()} == {"trl", "transformers", "peft", "accelerate"}


@pytest.mark.parametrize(
    ("text", "is_line"),
    [
        ("trl 1.17.0 has no `hash_module`: the store is off. Install trl<1.17.", True),
        ("trl 1.17.0 has no\n`hash_module`. Install trl<1.17.", False),
        ("trl has moved something. Install trl<1.17.", False),
        ("`hash_module` is gone.", False),
    ],
)
def test_a_line_names_what_moved_and_a_version(text: str, is_line: bool) -> None:
    assert is_one_line(text, "hash_module") is is_line
