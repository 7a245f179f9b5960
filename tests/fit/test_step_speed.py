"""The predicted time of a step: it grows with the work, and each part has the sign that it must have."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ext.fit.speed import CPU, GPUS, Model, StepWork, seconds
from trl_ext.planning.cost import CostModel

MODELS = [Model(CostModel(2e9, 1e5, 3e8), 36, 4 * 10**9, trained) for trained in (4 * 10**9, 10**7)]
WORK = StepWork(4, 10_000, 1e7, 5_000, checkpointing=False, engine="one_process", devices=1)
works = st.builds(
    StepWork,
    st.integers(1, 64),
    st.floats(1, 1e7),
    st.floats(0, 1e9),
    st.floats(0, 1e7),
    st.booleans(),
    st.sampled_from(("ddp", "fsdp2", "zero1", "zero2", "zero3")),
    st.integers(1, 64),
    st.floats(0, 2),
)


@settings(deadline=None)
@given(works, st.sampled_from([f.name for f in fields(StepWork)]), st.sampled_from(MODELS))
def test_more_work_takes_no_less_time(work: StepWork, name: str, model: Model):
    value = getattr(work, name)
    more = {"checkpointing": True, "engine": value}.get(name, value * 2 if name != "engine" else value)
    for device in (CPU, *GPUS.values()):
        assert seconds(replace(work, **{name: more}), model, device) >= seconds(work, model, device) * (1 - 1e-9)


@pytest.mark.parametrize("device", [CPU, *GPUS.values()])
@pytest.mark.parametrize("model", MODELS)
def test_checkpointing_adds_less_than_a_forward_and_passes_add_their_overhead(device, model):
    plain, again = (seconds(replace(WORK, checkpointing=x), model, device) for x in (False, True))
    assert plain < again < 1.5 * plain
    assert seconds(replace(WORK, passes=8), model, device) > plain


def test_an_adapter_trains_faster_and_exchanges_less():
    full, adapter = (seconds(WORK, model, CPU) for model in MODELS)
    assert 0.6 * full < adapter < full
    alone = [seconds(WORK, model, GPUS["L4"]) for model in MODELS]
    ddp = [seconds(replace(WORK, engine="ddp", devices=4), model, GPUS["L4"]) for model in MODELS]
    assert ddp[0] - alone[0] > 100 * (ddp[1] - alone[1]) > 0


def test_engines_that_shard_weights_gather_them_in_each_pass():
    of_engine = {
        x: seconds(replace(WORK, engine=x, devices=8), MODELS[0], GPUS["A10"])
        for x in ("ddp", "fsdp2", "zero2", "zero3")
    }
    assert of_engine["fsdp2"] == of_engine["zero3"] > of_engine["zero2"] > of_engine["ddp"]
