"""The rows of a DTensor head that each of two ranks scores with: the choice, values, gradients and the check."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import trl_ext.heads.tiled as tiled
from head_definition import ALL, FROZEN, floats_apart
from head_placement import HeadGatheredError, head_stays_sharded
from model_families import batch, build
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

LOCAL_TP = "each rank scores with its rows of the weight (tensor parallel)"
LOCAL = "each rank scores the tokens of all ranks with its rows of the weight (FSDP2)"
IN_TURN = "the ranks broadcast their rows of the weight in slices (FSDP2)"
WHOLE = "each pass gathers the whole weight"


@dataclass(frozen=True)
class Case:
    """A head with 97 rows on a mesh axis "tp" or "fsdp" of two ranks, and the number of rows in each rank's batch.

    The ranks of "tp" have the same batch, so `rows` is equal. 0 is a batch without labels.
    """

    axis: str
    rows: tuple[int, int]
    way: str
    bias: bool = False
    trained: bool = False
    entropy: bool = False
    mean: bool = False
    head: str = "tiled"

    @property
    def model(self) -> str:
        return "head_bias" if self.bias else "untied"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ALL if self.mean else FROZEN

    def options(self) -> ScoringOptions:
        return ScoringOptions(0.7, outputs=self.outputs, entropy_requires_grad=self.entropy, head=self.head)

    def batch(self, rank: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, labels = batch(rows=max(2, self.rows[rank]))
        if self.axis == "fsdp":
            inputs["input_ids"] = (inputs["input_ids"] - 3 + rank) % 94 + 3
            labels = torch.where(labels == -100, labels, inputs["input_ids"])
        return inputs, labels if self.rows[rank] else torch.full_like(labels, -100)


# Moving a token takes 256 bytes with a frozen weight, and 384 with a trained weight or a gradient of the entropy or of
# the mean log-prob. Moving the 48 rows of the other rank takes 6144 bytes in each of 1, 3 and 2 passes
CASES = {
    "tp, frozen": Case("tp", (3, 3), LOCAL_TP),
    "tp, frozen, many tokens, bias, entropy": Case("tp", (12, 12), LOCAL_TP, bias=True, entropy=True),
    "tp, trained, bias": Case("tp", (12, 12), LOCAL_TP, bias=True, trained=True),
    "tp, frozen, mean": Case("tp", (12, 12), LOCAL_TP, bias=True, mean=True),
    "tp, no tokens": Case("tp", (0, 0), LOCAL_TP, trained=True),
    "fsdp, frozen, few tokens": Case("fsdp", (3, 2), LOCAL),
    "fsdp, frozen, no tokens on one rank, bias": Case("fsdp", (0, 3), LOCAL, bias=True, entropy=True),
    "fsdp, frozen, no tokens at all": Case("fsdp", (0, 0), LOCAL),
    "fsdp, frozen, many tokens": Case("fsdp", (12, 3), IN_TURN),
    "fsdp, frozen, many tokens on one rank, entropy": Case("fsdp", (0, 12), IN_TURN, entropy=True),
    "fsdp, frozen, many tokens, bias": Case("fsdp", (12, 3), WHOLE, bias=True),
    "fsdp, frozen, many tokens on one rank, mean": Case("fsdp", (0, 12), IN_TURN, mean=True),
    "fsdp, trained, few tokens, bias": Case("fsdp", (3, 2), LOCAL, bias=True, trained=True, mean=True),
    "fsdp, trained, no tokens on one rank, entropy": Case("fsdp", (3, 0), LOCAL, trained=True, entropy=True),
    "fsdp, trained, many tokens, bias": Case("fsdp", (12, 3), WHOLE, bias=True, trained=True, entropy=True),
    "fsdp, trained, dense": Case("fsdp", (3, 2), WHOLE, trained=True, head="dense"),
    "tp, trained, dense": Case("tp", (3, 3), WHOLE, bias=True, trained=True, head="dense"),
}


def scored(model: torch.nn.Module, case: Case, rank: int) -> tuple[Any, Any, dict[str, Tensor]]:
    """Score two micro-batches, add up their gradients, and return the results of the second."""
    scoring = attach_scoring_forward(model, case.options())
    inputs, labels = case.batch(rank)
    for factor in (1.0, -0.25):
        out = model(**inputs, labels=labels, fused_lm_head=True)
        upstream = factor * torch.arange(1, labels.shape[1])
        loss = (out.log_probs * upstream).sum()
        loss = loss + (out.entropy * upstream).sum() if case.entropy else loss
        (loss - (out.mean_log_probs * upstream).sum() if case.mean else loss).backward()
    return scoring, out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def of_one_process(case: Case) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """Return each rank's results and gradients. The head's gradients are the engine's mean over all batches."""
    results, gradients = [], []
    for rank in range(2):
        model = build(case.model)
        model.lm_head.requires_grad_(case.trained)
        _, out, of_rank = scored(model, case, rank)
        results.append(out)
        gradients.append(of_rank)
    if case.axis == "fsdp" and case.trained:
        for name in [name for name in gradients[0] if name.startswith("lm_head")]:
            mean = (gradients[0][name] + gradients[1][name]) / 2
            gradients[0][name] = gradients[1][name] = mean
    return results, gradients


def split(group: dist.ProcessGroup, case: Case) -> torch.nn.Module:
    model = build(case.model)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(case.axis,))
    for name, parameter in list(model.lm_head.named_parameters()):
        rows = distribute_tensor(parameter.data, mesh, [Shard(0)])
        setattr(model.lm_head, name, torch.nn.Parameter(rows, requires_grad=case.trained))
    return model


def scored_split(group: dist.ProcessGroup, case: Case, watched: bool) -> tuple[str, dict[str, Tensor], dict]:
    model = split(group, case)
    if watched:
        with head_stays_sharded((97, 32)) as seen:
            scoring, out, gradients = scored(model, case, group.rank())
        assert seen or case.axis == "tp"
    else:
        scoring, out, gradients = scored(model, case, group.rank())
    gradients = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients.items()}
    return scoring.head_rows, {name: getattr(out, name).detach() for name in case.outputs}, gradients


@pytest.mark.parametrize("name", CASES)
def test_each_layout_equals_one_process(ranks, name):
    case = CASES[name]
    results, gradients = of_one_process(case)
    stays = case.way != WHOLE
    for rank, (reason, values, grads) in enumerate(ranks.run(scored_split, 2, case, stays)):
        assert reason.startswith(case.way), reason
        for field in case.outputs:
            assert floats_apart(values[field], getattr(results[rank], field)) <= 1e-5, field
        assert grads.keys() == gradients[rank].keys()
        for part, grad in gradients[rank].items():
            assert floats_apart(grads[part], grad) <= 1e-5 * max(float(grad.abs().max()), 1e-3), part


def refused_split(group: dist.ProcessGroup, case: Case) -> bool:
    try:
        scored_split(group, case, True)
    except HeadGatheredError:
        return True
    return False


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.way == WHOLE])
def test_the_watch_detects_a_gathered_weight(ranks, name):
    assert ranks.run(refused_split, 2, CASES[name]) == [True, True]


def wrong_values(right: Any, self: Any, *args: Any) -> Any:
    results = right(self, *args)
    return results._replace(log_probs=results.log_probs + 0.01)


def times_1_5(right: Any, self: Any, *args: Any) -> Any:
    return right(self, *args) * 1.5


def not_combined(right: Any, self: Any, group: Any) -> None:
    pass


# Place of the fault, the fault, and its cases
BREAKS = {
    "values": (tiled.RunningStatistics, "results", wrong_values, "log_probs", ("frozen", "trained", "in turn")),
    "sums of all ranks": (tiled.RunningStatistics, "sum_over_", not_combined, "log_probs", ("frozen", "trained")),
    "rescaling": (tiled.RunningStatistics, "fold_", times_1_5, "hidden states", ("frozen", "in turn")),
    "recomputation": (tiled.Coefficients, "nontarget_grad_", times_1_5, "hidden states", ("trained",)),
    "weight gradient": (tiled.Coefficients, "add_target_grad_", times_1_5, "gradient of the weight", ("trained",)),
}
BROKEN = {
    "tp, frozen": Case("tp", (3, 3), LOCAL_TP),
    "tp, trained": Case("tp", (3, 3), LOCAL_TP, trained=True),
    "fsdp, frozen": Case("fsdp", (3, 2), LOCAL),
    "fsdp, trained": Case("fsdp", (3, 2), LOCAL, trained=True),
    "fsdp, in turn": Case("fsdp", (12, 12), IN_TURN),
}


def broken(group: dist.ProcessGroup, case: Case, name: str) -> str:
    where, what, wrong, *_ = BREAKS[name]
    right = getattr(where, what)
    with patch.object(where, what, lambda *args: wrong(right, *args)):
        try:
            scored_split(group, case, False)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in BREAKS for case in BROKEN if case.split(", ")[1] in BREAKS[name][-1]],
)
def test_the_check_of_the_first_batch_stops_a_broken_head_on_every_rank(ranks, name, case):
    for message in ranks.run(broken, 2, BROKEN[case], name):
        assert "differs from its definition on the first batch" in message
        assert BREAKS[name][3] in message


def under_fsdp1(group: dist.ProcessGroup) -> list[float]:
    losses = []
    for original in (True, False):
        model = build("untied")
        attach_scoring_forward(model, ScoringOptions(padding_free=False))
        wrapped = FullyShardedDataParallel(
            model, process_group=group, use_orig_params=original, device_id=torch.device("cpu")
        )
        ids = torch.arange(3, 19).view(2, 8)
        out = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        out.loss.backward()
        losses.append(out.loss.item())
    return losses


def test_fsdp1_with_flat_parameters_scores_too(ranks):
    ((with_originals, flat),) = ranks.run(under_fsdp1, 1)
    assert with_originals == flat
