"""The order of rows over ranks: each row once, in its optimizer step, and no rank or slice has more than before."""

import random
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, Qwen3MoeConfig

import pretended_gpu
from trl_ext.distributed.exchange import Column, Rows
from trl_ext.planning.cost import CostModel
from trl_ext.planning.micro_batches import (
    DEAD,
    UNSHARED,
    RowTokens,
    StepRows,
    _after_exchange,
    _Rows,
    max_over_mean,
    row_order,
)
from worker_ranks import WorkerRanks


def tokens_of(fed: RowTokens, rows: list[int]) -> int:
    """Return the tokens of one forward over `rows`, by definition."""
    live = [row for row in rows if fed.prompt_B[row] != DEAD]
    prompts = {fed.prompt_B[row] if fed.prompt_B[row] >= 0 else -10 - row: fed.prompt_tokens_B[row] for row in live}
    return max(1, sum(prompts.values()) + sum(fed.own_tokens_B[row] for row in live))


@st.composite
def batches_of_ranks(draw: st.DrawFn) -> tuple[RowTokens, int, int, int]:
    """Return the rows of all ranks, the ranks, the rows of a slice, and the slices of an optimizer step."""
    ranks, capacity, together = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rows = ranks * (capacity * together * draw(st.integers(1, 2)) + draw(st.integers(0, 1)))
    prompts = st.one_of(st.just(DEAD), st.just(UNSHARED), st.integers(0, 3), st.integers(2**62, 2**62 + 1))
    prompt_B = draw(st.lists(prompts, min_size=rows, max_size=rows))
    length = draw(st.integers(1, 40))
    own_B = draw(st.lists(st.integers(0, 60), min_size=rows, max_size=rows))
    return RowTokens(prompt_B, [length] * rows, own_B, own_B), ranks, capacity, together


@settings(max_examples=200, deadline=None)
@given(batches_of_ranks())
def test_any_rows_on_any_ranks(batch: tuple[RowTokens, int, int, int]) -> None:
    fed, ranks, capacity, together = batch
    order = row_order(fed, StepRows(capacity, together), ranks=ranks)
    assert sorted(order) == list(range(len(fed.prompt_B)))  # every row exactly once
    rows = len(order) // ranks
    size = capacity * together
    of_ranks = [order[rank * rows : (rank + 1) * rows] for rank in range(ranks)]  # as many rows on every rank
    whole = rows - rows % size
    for rank, mine in enumerate(of_ranks):
        assert mine[whole:] == list(range(rank * rows + whole, (rank + 1) * rows))  # of no known optimizer step
        for start in range(0, whole, size):
            assert all(start <= row % rows < start + size for row in mine[start : start + size])  # the same step
    for start in range(0, whole, size):
        before, after = (
            [
                [tokens_of(fed, source[rank][i : i + capacity]) for i in range(start, start + size, capacity)]
                for rank in range(ranks)
            ]
            for source in ([list(range(rank * rows, (rank + 1) * rows)) for rank in range(ranks)], of_ranks)
        )
        assert max(map(sum, after)) <= max(map(sum, before))  # the largest rank
        assert max(map(max, after)) <= max(map(max, before))  # the largest forward, which determines the memory
        assert sum(map(max, zip(*after, strict=True))) <= sum(map(max, zip(*before, strict=True)))


@settings(max_examples=50, deadline=None)
@given(batches_of_ranks(), st.randoms(use_true_random=False))
def test_the_cost_after_an_exchange_of_rows_is_known_before(batch: Any, random: Any) -> None:
    fed, capacity = batch[0], batch[2]
    rows, places = _Rows.of(fed), list(range(len(fed.prompt_B)))
    random.shuffle(places)
    if len(places) < 2 * capacity:
        return
    pair_2S = np.array(places[: 2 * capacity]).reshape(2, capacity)
    before_2, tried = rows.of_slices(pair_2S), np.arange(capacity)
    after_2TT = _after_exchange(rows, pair_2S[:1], pair_2S[1:], tried)[:, 0]
    for give in range(capacity):
        for take in range(capacity):
            exchanged = pair_2S.copy()
            exchanged[0, give], exchanged[1, take] = pair_2S[1, take], pair_2S[0, give]
            if min(*before_2, *rows.of_slices(exchanged)) > 1:  # a slice costs at least 1
                assert (rows.of_slices(exchanged) - before_2 == after_2TT[:, give, take]).all()


def test_the_ratio_is_that_of_the_definition() -> None:
    fed = RowTokens([1, 1, 2, 2, 3, 3, 4, 4], [10] * 8, [5, 15, 1, 1, 9, 9, 20, 30])
    # Two steps of one slice on each rank: 30 and 28 tokens, then 12 and 60
    assert max_over_mean(fed, list(range(8)), StepRows(2, 1), ranks=2) == pytest.approx((30 / 29 + 60 / 36) / 2)
    assert max_over_mean(fed, list(range(8)), StepRows(2, 2), ranks=2) == pytest.approx(88 / 65)


@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_ranks_have_similar_numbers_of_tokens(ranks: int) -> None:
    """Groups of 8 with log-normal lengths: in the order drawn, the largest rank has 1.2 to 2 times the mean."""
    draw = random.Random(ranks)
    for together, capacity in ((1, 64), (8, 8), (4, 16)):
        rows = ranks * together * capacity
        own = [min(2048, int(draw.lognormvariate(6.0, 0.8))) for _ in range(rows)]
        prompts = [draw.randint(20, 300) for _ in range(rows)]
        fed = RowTokens([row // 8 for row in range(rows)], [prompts[row // 8] for row in range(rows)], own, own)
        step = StepRows(capacity, together)
        order = row_order(fed, step, ranks=ranks)
        assert max_over_mean(fed, order, step, ranks=ranks) <= 1.05
        of_rank = np.array(own).reshape(ranks, -1).sum(axis=1)
        assert ranks == 2 or of_rank.max() / of_rank.mean() > 1.1


def test_costs_grow_with_the_square_of_the_length_and_with_the_vocabulary() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=100
    )
    model = CostModel.of(config)
    # Per layer: four projections of 64 x 64, and three of 64 x 128
    assert model.of_token == 2 * 3 * (4 * 64 * 64 + 3 * 64 * 128)
    assert model.of_pair == 4 * 3 * 64
    assert model.of_scored_token == 2 * 64 * 100
    tokens = RowTokens([5, 5], [1000, 1000], [2000, 500], [2000, 0])
    costs = model.costs(tokens)
    pair, head = model.of_pair / model.of_token, model.of_scored_token / model.of_token
    assert costs.prompt_tokens_B == [round(1000 + pair * 1000**2 / 2)] * 2
    assert costs.own_tokens_B == [
        round(2000 + pair * 2000 * (1000 + 1000) + head * 2000),
        round(500 + pair * 500 * (1000 + 250)),
    ]
    # Of experts, those that a token reaches
    few, many = (CostModel.of(Qwen3MoeConfig(num_experts=x, num_experts_per_tok=2)) for x in (4, 64))
    assert few == many


@st.composite
def values_of_ranks(draw: st.DrawFn) -> tuple[list[dict[str, Tensor]], list[int]]:
    ranks, rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    routers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batches = []
    for _ in range(ranks):
        width, prompt = draw(st.integers(1, 6)), draw(st.integers(1, 4))

        def integers(*shape: int, high: int = 9, generator: torch.Generator = generator) -> Tensor:
            return torch.randint(0, high, shape, generator=generator)

        batches.append(
            {
                "advantages": torch.randn(rows, generator=generator),
                "completion_ids": integers(rows, width),
                "completion_mask": integers(rows, width, high=2),
                "kept_ids": integers(rows, draw(st.integers(1, 5))) - 1,
                "prompt_ids": integers(rows, prompt),
                "prompt_mask": integers(rows, prompt, high=2),
                "sampling_per_token_logps": integers(rows, width).float() * -0.37,
            }
        )
        batch = batches[-1]
        batch["sampling_per_token_logps"][0, 0] = torch.nan  # vLLM could not score it
        batch["completion_mask"][integers(rows, high=3) == 0] = 0  # truncated completions
        for name, dtype in ROUTES.items():
            unknown = integers(*batch[COLUMNS[name].like[0]].shape, high=2).bool()  # also at the ends of rows
            for row in range(rows):
                unknown[row] |= ~is_token(batch, name, row)
            routes = integers(*unknown.shape, routers, experts, high=torch.iinfo(dtype).max).to(dtype)
            batch[name] = routes.masked_fill(unknown[..., None, None], COLUMNS[name].fill)
    order = draw(st.permutations(range(ranks * rows)))
    return batches, order


COLUMNS = {
    **{name: Column(0, pads_left=True, width="prompt", multiple=2) for name in ("prompt_ids", "prompt_mask")},
    **{name: Column(3, width="completion") for name in ("completion_ids",)},
    **{name: Column(0, width="completion") for name in ("completion_mask", "sampling_per_token_logps")},
    "kept_ids": Column(-1),
    "completion_routes": Column(-1, width="completion", like=("completion_ids", "completion_mask")),
    "prompt_routes": Column(255, pads_left=True, width="prompt", multiple=2, like=("prompt_ids", "prompt_mask")),
}
ROUTES = {"completion_routes": torch.int16, "prompt_routes": torch.uint8}


class GroupRanks:
    """The exchanges of `Ranks`, over a group."""

    def __init__(self, group: Any) -> None:
        self.accelerator = self
        self.group = group
        self.process_index, self.num_processes = group.rank(), group.size()
        self.bytes = 0  # to other ranks

    def exchange(self, sent: list[Tensor], sizes: list[int]) -> list[Tensor]:
        self.bytes += sum(len(x) for rank, x in enumerate(sent) if rank != self.process_index)
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        torch.distributed.all_to_all_single(received, torch.cat(sent), sizes, [len(x) for x in sent], group=self.group)
        return list(received.split(sizes))


def exchanged(group: Any, batches: list[dict[str, Tensor]], order: list[int]) -> tuple[dict[str, Tensor], int]:
    rows = [Rows(dict(sorted(batch.items())), COLUMNS) for batch in batches]
    lengths = torch.cat([x.lengths_BE for x in rows])
    assert len({x.signature for x in rows}) == 1
    ranks = GroupRanks(group)
    return rows[group.rank()].exchanged(torch.tensor(order), lengths, ranks), ranks.bytes


def without_padding(batch: dict[str, Tensor], name: str, row: int) -> list[str]:
    """Return the values of a row; from its end, if it is padded on the left."""
    column = COLUMNS.get(name)
    if column is None:
        return [str(batch[name][row].item())]
    values = batch[name][row].tolist()
    values = values[::-1] if column.pads_left else values
    if column.like:
        values = values[: max(len(without_padding(batch, other, row)) for other in column.like)]
    while not column.like and values and values[-1] == column.fill:
        values.pop()
    return [str(x) for x in values]  # NaN equals itself


def is_token(batch: dict[str, Tensor], name: str, row: int) -> Tensor:
    """Return which places of a row `(W,)` the routes `name` are of."""
    column = COLUMNS[name]
    length = max(len(without_padding(batch, other, row)) for other in column.like)
    places = torch.arange(batch[column.like[0]].size(1))
    return (places.flip(0) if column.pads_left else places) < length


@settings(max_examples=25, deadline=None)
@given(values_of_ranks())
def test_any_rows_arrive_whole(ranks: WorkerRanks, drawn: tuple[list[dict[str, Tensor]], list[int]]) -> None:
    batches, order = drawn
    results = ranks.run(exchanged, len(batches), batches, order)
    rows = len(batches[0]["advantages"])
    leave = [row for place, row in enumerate(order) if place // rows != row // rows]
    sent = 0
    for row in leave:
        for name, x in batches[row // rows].items():
            value_bytes = 1 if name.endswith("_mask") else x[0, 0].nbytes if name in ROUTES else 4
            sent += len(without_padding(batches[row // rows], name, row % rows)) * value_bytes
    assert sum(count for _, count in results) == sent
    for rank, (got, _) in enumerate(results):
        assert got.keys() == batches[0].keys()
        assert got["prompt_ids"].shape[1] % 2 == 0
        assert got["completion_ids"].shape == got["completion_mask"].shape == got["sampling_per_token_logps"].shape
        for place, row in enumerate(order[rank * rows : (rank + 1) * rows]):
            theirs = batches[row // rows]
            for name, x in theirs.items():
                assert got[name].dtype == x.dtype
                assert without_padding(got, name, place) == without_padding(theirs, name, row % rows), name
    for name in ROUTES:
        given_known, known = (
            sum(int((x[name] != COLUMNS[name].fill).sum()) for x in each) for each in (batches, [x for x, _ in results])
        )
        assert known == given_known  # none beyond the tokens
        for got, _ in results:
            assert got[name].shape == (*got[COLUMNS[name].like[0]].shape, *batches[0][name].shape[2:])


def test_a_last_token_that_equals_the_padding_keeps_its_route(ranks: WorkerRanks) -> None:
    """Where the padding token ends texts, ids end before it; where a truncated completion is masked, its mask is 0."""
    ids, mask = torch.tensor([[5, 3, 3], [6, 7, 8]]), torch.tensor([[1, 1, 0], [0, 0, 0]])
    routes = torch.tensor([[1, 2, -1], [4, 5, 6]], dtype=torch.int16)[..., None, None]
    batch = {"completion_ids": ids, "completion_mask": mask, "completion_routes": routes}
    results = ranks.run(exchanged, 2, [batch, batch], [0, 2, 1, 3])
    for (got, _), row in zip(results, (0, 1), strict=True):
        width = (2, 3)[row]
        for name, x in batch.items():
            assert torch.equal(got[name], x[[row, row], :width]), name


def test_routes_of_other_routers_are_other_entries() -> None:
    signatures = {
        Rows({"completion_routes": torch.zeros(2, 3, *shape, dtype=dtype)}, COLUMNS).signature
        for shape in ((2, 4), (4, 2), (2, 8))
        for dtype in (torch.uint8, torch.int16)
    }
    assert len(signatures) == 6


@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended GPU needs g++")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the pretended GPU needs a build of torch for the CPU")
def test_entries_on_the_host_move_beside_those_on_a_device() -> None:
    script = """
import peft, pretended_gpu, torch  # peft first, because bitsandbytes would load what torch lacks
pretended_gpu.start()
from types import SimpleNamespace
from trl_ext.distributed.exchange import Column, Rows
names = ("completion_ids", "completion_mask")
columns = {name: Column(width="completion") for name in names}
columns["completion_routes"] = Column(-1, width="completion", like=names)
with pretended_gpu.DeviceMode():
    batch = {"advantages": torch.tensor([1.0, 2.0]).cuda()}
    batch["completion_ids"] = torch.tensor([[5, 6, 0], [7, 8, 0]]).cuda()
    batch["completion_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]]).cuda()
    batch["completion_routes"] = torch.tensor([[1, 2, 3], [4, -1, -1]], dtype=torch.int16)[..., None, None]
    rows = Rows(batch, columns)
    one_rank = SimpleNamespace(num_processes=1, process_index=0)
    ranks = SimpleNamespace(accelerator=one_rank, exchange=lambda sent_bytes, sizes: sent_bytes)
    for order in ([0, 1], [1, 0]):
        got = rows.exchanged(torch.tensor(order), rows.lengths_BE.cpu(), ranks)
        for name, x in batch.items():
            assert got[name].device == x.device, name
            assert torch.equal(got[name].cpu(), x.cpu()[order]), name
    print(rows.lengths_BE.tolist())
"""
    assert pretended_gpu.python("-c", script) == "[[1, 2, 3, 3], [1, 2, 2, 2]]"
