"""Ranks agree on facts about code of the user, and on nothing else."""

import dataclasses
from typing import Any

import pytest

from trl_ext.planning import agreement
from trl_ext.planning.agreement import agreed, compared
from trl_ext.planning.dpo import DPOFacts
from trl_ext.planning.grpo import GRPOFacts
from trl_ext.planning.reference import ReferenceFacts
from trl_ext.planning.rloo import RLOOFacts

FACTS: dict[str, Any] = {"beta": 0.0, "batch_reader": None, "has_own_loss": False, "folder": "/a"}


def test_code_of_one_rank_decides_for_all() -> None:
    reads = {**FACTS, "batch_reader": "has the callback `Reads`, which reads generation batches", "has_own_loss": True}
    for ranks in ([FACTS, reads], [reads, FACTS], [FACTS, FACTS, reads]):
        assert agreed(ranks) == {"batch_reader": reads["batch_reader"], "has_own_loss": True}
    assert agreed([FACTS, dict(FACTS)]) == {}


def test_another_fact_that_differs_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`beta` is 0\.0 on rank 0 and 0\.1 on rank 2, but all ranks train one"):
        agreed([FACTS, FACTS, {**FACTS, "beta": 0.1}])


def test_every_name_is_a_fact_of_a_plan() -> None:
    facts = {x.name for kind in (GRPOFacts, RLOOFacts, DPOFacts, ReferenceFacts) for x in dataclasses.fields(kind)}
    assert facts >= agreement._OF_CODE | agreement._NOT_COMPARED


def test_a_folder_may_differ_between_nodes() -> None:
    names = [x.name for x in dataclasses.fields(ReferenceFacts)]
    facts = ReferenceFacts(**{**dict.fromkeys(names), "folder": "/a"})
    assert compared(facts) == compared(dataclasses.replace(facts, folder="/b"))
