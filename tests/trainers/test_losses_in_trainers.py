"""DPO trainers with the losses that TRL lacks: their values, their data, and their errors."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import trl_ext
from preference_runs import Run, rewarded, run, two_tokens
from tiny import REFERENCE_SEED, Workshop
from trl_ext.config import warn_of_ignored_smoothing
from trl_ext.losses.loss_types import DPO_LOSS_TYPES
from trl_ext.losses.preference import PREFERENCE_LOSSES

SLOW = pytest.param(True, marks=pytest.mark.slow)


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def training_comparison(ours: Run, stock: Run, constant: float = 0.0) -> None:
    """Compare losses up to a `constant`, gradients, weights, and all metrics except the loss."""
    assert ours.losses == pytest.approx([x + constant for x in stock.losses], rel=1e-5, abs=1e-6)
    for got, want in zip(ours.gradients, stock.gradients, strict=True):
        assert far(got, want) < 1e-5
    assert far(ours.weights, stock.weights) < 1e-6
    for got, want in zip(ours.logs, stock.logs, strict=True):
        for name in want.keys() - {"loss", "eval_loss", "train_loss"}:
            if not name.endswith(("runtime", "per_second", "step_time")):
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), name


NO_MEANS_OVER_PAIRS = {"sft", "aot", "aot_unpaired"}
REST = [x for x in (*DPO_LOSS_TYPES, *PREFERENCE_LOSSES) if x not in ("sigmoid", "sft")]
TYPES = ["sigmoid", "sft", *(pytest.param(x, marks=pytest.mark.slow) for x in REST)]


@pytest.mark.parametrize("loss_type", TYPES)
def test_three_losses_depend_on_which_pairs_share_a_micro_batch(loss_type: str, workshop: Workshop, tmp_path: Path):
    config: dict[str, Any] = {"loss_type": loss_type, "beta": 1.0}
    if loss_type == "exo_pair":
        config["label_smoothing"] = 0.1
    if loss_type == "aot":
        config["train_dataset"] = two_tokens(8, 1.0)  # different lengths, so policy and reference sort alike
    whole = run(trl_ext, workshop, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1, **config)
    halves = run(trl_ext, workshop, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, **config)
    distance = far(halves.gradients[-1], whole.gradients[-1])
    assert (distance > 1e-3) == (loss_type in NO_MEANS_OVER_PAIRS), distance
    assert distance < 1e-5 or loss_type in NO_MEANS_OVER_PAIRS


@pytest.mark.parametrize("lora", [False, SLOW])
def test_cdpo_is_trls_robust_loss_of_a_negative_rate(lora: bool, workshop: Workshop, tmp_path: Path):
    """((1 - r) A - r B) / (1 - 2r) with r = -e / (1 - 2e) is (1 - e) A + e B; stock's own sigmoid ignores e."""
    e = 0.1
    ours = run(trl_ext, workshop, tmp_path, lora=lora, loss_type="cdpo", label_smoothing=e)
    stock = run(trl, workshop, tmp_path, lora=lora, loss_type="robust", label_smoothing=-e / (1 - 2 * e))
    training_comparison(ours, stock)
    ignored = run(trl, workshop, tmp_path, lora=lora, loss_type="sigmoid", label_smoothing=e)
    plain = run(trl, workshop, tmp_path, lora=lora, loss_type="sigmoid")
    assert ignored.losses == plain.losses
    assert far(ignored.gradients[0], ours.gradients[0]) > 1e-2


def test_ipo_on_sums_is_trls_ipo_where_a_completion_has_two_tokens(workshop: Workshop, tmp_path: Path):
    """(d / 2 - 1 / (2 * 2 beta))^2 is a quarter of (d - 1 / (2 beta))^2."""
    data = two_tokens(8, 0.0)
    ours = run(trl_ext, workshop, tmp_path, loss_type="ipo_sum", beta=0.4, train_dataset=data, max_steps=1)
    stock = run(trl, workshop, tmp_path, loss_type="ipo", beta=0.8, loss_weights=[4.0], train_dataset=data, max_steps=1)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert far(ours.gradients[0], stock.gradients[0]) < 1e-5


def test_rpo_of_one_reward_difference_is_cdpo(workshop: Workshop, tmp_path: Path):
    """KL(Bernoulli(q) || Bernoulli(p)) is the cross-entropy of cDPO with e = 1 - q, less the entropy of q."""
    data = two_tokens(8, 1.0)
    ours = run(trl_ext, workshop, tmp_path, loss_type="rpo_backward_kl", reward_scale=2.0, train_dataset=data)
    q = 1 / (1 + math.exp(-2.0))
    e = 1 - q
    stock = run(trl, workshop, tmp_path, loss_type="robust", label_smoothing=-e / (1 - 2 * e), train_dataset=data)
    training_comparison(ours, stock, constant=q * math.log(q) + e * math.log(e))
    assert ours.log("rewards/target_margins") == pytest.approx([2.0, 2.0])


def dense_log_probs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 log-probs of all classes, and of the tokens, `(2B, S - 1)`, from the model's logits."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()[:, :-1]
    every = logits.log_softmax(-1)
    return every, every.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]


class Dense:
    """Compute a loss by definition on the first batch, from the logits of policy and reference."""

    def __init__(self, reference: torch.nn.Module | None, definition: Any) -> None:
        self.reference, self.definition = reference, definition
        self.value: float | None = None

    def __call__(self, trainer: Any, batch: dict[str, torch.Tensor]) -> None:
        if self.value is None and trainer.model.training:
            with torch.no_grad():
                self.value = self.definition(trainer, batch, self.reference).item()


def rpo_backward(trainer: Any, batch: dict[str, torch.Tensor], reference: Any, average: bool) -> torch.Tensor:
    mask = batch["completion_mask"][:, 1:]
    scores = [(dense_log_probs(model, batch)[1] * mask).sum(1) for model in (trainer.model, reference)]
    ratios = scores[0] - scores[1]
    if average:
        ratios = ratios / mask.sum(1)
    chosen, rejected = ratios.chunk(2)
    p = torch.sigmoid(0.3 * (chosen - rejected))
    q = torch.sigmoid(0.7 * (batch["chosen_reward"] - batch["rejected_reward"]).double())
    return (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()).mean()


STORE = {"reference_store": "memory"}
PASS = {"reference_store": "off", "padding_free": False}
PRECOMPUTED = {"precompute_ref_log_probs": True, "padding_free": True}
STREAMING = {"streaming": True, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("average", "options"),
    [
        (False, STREAMING),
        (True, PRECOMPUTED),
        *(
            pytest.param(average, options, marks=pytest.mark.slow)
            for average, options in [
                *((False, STORE), (True, STORE), (False, PASS), (True, PASS), (False, PRECOMPUTED), (True, STREAMING)),
            ]
        ),
    ],
)
def test_rpo_is_its_definition_on_the_models_logits(
    average: bool, options: dict[str, Any], workshop: Workshop, tmp_path: Path
):
    reference = AutoModelForCausalLM.from_pretrained(workshop.model("tied", seed=REFERENCE_SEED))
    options = dict(options)
    data = rewarded(8, seed=1)
    if options.pop("streaming", False):
        data = data.to_iterable_dataset()
    dense = Dense(reference, lambda *of: rpo_backward(*of, average=average))
    seen = run(
        *(trl_ext, workshop, tmp_path),
        watch=dense,
        loss_type="rpo_backward_kl",
        beta=0.3,
        reward_scale=0.7,
        rpo_average_log_probs=average,
        train_dataset=data,
        eval_dataset=rewarded(5, seed=2),
        eval_strategy="steps",
        eval_steps=1,
        **options,
    )
    accumulated = options.get("gradient_accumulation_steps", 1)
    assert accumulated * seen.losses[0] == pytest.approx(dense.value, rel=1e-5)
    for prefix in ("", "eval_"):
        assert len(seen.log(f"{prefix}rewards/margin_errors")) == 2
        assert min(seen.log(f"{prefix}rewards/margin_errors")) > 0
        assert len(seen.log(f"{prefix}rewards/margins")) == 2


@pytest.mark.parametrize("lora", [False, SLOW])
def test_mixed_losses_are_the_weighted_sum_of_each(lora: bool, workshop: Workshop, tmp_path: Path):
    mixed = ["sigmoid", "rpo_squared", "sft", "cdpo", "sigmoid"]
    weights = [0.5, 0.125, 2.0, 0.25, 0.75]
    common = {"lora": lora, "label_smoothing": 0.2, "max_steps": 1}
    together = run(trl_ext, workshop, tmp_path, loss_type=mixed, loss_weights=weights, **common)
    alone = {}
    for name in set(mixed):
        smoothing = {"label_smoothing": 0.0} if name.startswith("rpo") else {}
        alone[name] = run(trl_ext, workshop, tmp_path, loss_type=name, **{**common, **smoothing})
    want = sum(w * alone[name].losses[0] for name, w in zip(mixed, weights, strict=True))
    gradient = sum(w * alone[name].gradients[0] for name, w in zip(mixed, weights, strict=True))
    assert together.losses[0] == pytest.approx(want, rel=1e-5)
    assert far(together.gradients[0], gradient) < 1e-5


@pytest.mark.parametrize("head", ["tiled", pytest.param("dense", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("convention", "lora"), [("pytorch", False), ("megatron", True)])
def test_the_sft_term_has_smoothed_labels(head: str, convention: str, lora: bool, workshop: Workshop, tmp_path: Path):
    a, weight = 0.3, 0.5

    def definition(trainer: Any, batch: dict[str, torch.Tensor], _: Any) -> torch.Tensor:
        every, _ = dense_log_probs(trainer.model, batch)
        counted = batch["completion_mask"][:, 1:].bool()
        counted[len(counted) // 2 :] = False
        targets, classes = batch["input_ids"][:, 1:][counted], every.shape[-1]
        if convention == "pytorch":
            return weight * cross_entropy(every[counted], targets, label_smoothing=a)
        labels = torch.full_like(every[counted], a / (classes - 1)).scatter_(-1, targets[:, None], 1 - a)
        return weight * cross_entropy(every[counted], labels)

    dense = Dense(None, definition)
    common = {"lora": lora, "loss_type": ["sft"], "loss_weights": [weight]}
    smooth = {"sft_label_smoothing": a, "sft_label_smoothing_convention": convention, "head": head}
    seen = run(trl_ext, workshop, tmp_path, watch=dense, **smooth, **common)
    assert seen.losses[0] == pytest.approx(dense.value, rel=1e-5)
    stock = run(trl, workshop, tmp_path, **common)
    assert seen.losses[0] != pytest.approx(stock.losses[0], rel=1e-2)
    assert far(seen.gradients[0], stock.gradients[0]) > 1e-2
    assert seen.log("mean_token_accuracy")[0] == pytest.approx(stock.log("mean_token_accuracy")[0])


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_smoothed_term_among_others_has_the_gradient_of_the_definition(
    accumulation: int, workshop: Workshop, tmp_path: Path
):
    """The loss is (1 - a) of the plain term plus a of the fully smoothed one."""
    a = 0.25
    common = {"loss_type": ["sigmoid", "sft"], "gradient_accumulation_steps": accumulation, "max_steps": 1}
    plain, part, most = (run(trl_ext, workshop, tmp_path, sft_label_smoothing=x, **common) for x in (0.0, a, 2 * a))
    for got, none, twice in zip(part.gradients, plain.gradients, most.gradients, strict=True):
        assert far(got, (none + twice) / 2) < 1e-5
        assert far(got, none) > 1e-3


# Bad data and arguments


def columns(**changes: list[Any]) -> Any:
    data = rewarded(8, seed=1)
    for name, values in changes.items():
        data = data.remove_columns(name)
        if values:
            data = data.add_column(name, values)
    return data


GOOD = [1.0] * 8
BAD_DATA = [
    (columns(chosen_reward=None), "The train data set has no column `chosen_reward`. The RPO loss types need"),
    (
        columns(rejected_reward=[*GOOD[:5], math.nan, 0.0, 0.0]),
        "`rejected_reward` must be a finite number, got nan in row 5 of the train data set",
    ),
    (columns(rejected_reward=[*GOOD[:7], math.inf]), "`rejected_reward` .* got inf in row 7 of the train data set"),
    (columns(chosen_reward=[1.0, None, *GOOD[2:]]), "`chosen_reward` must .* got None in row 1 of the train data set"),
    (columns(chosen_reward=["good"] * 8), "`chosen_reward` must .* got 'good' in row 0 of the train data set"),
]


@pytest.mark.parametrize("streaming", [False, SLOW])
@pytest.mark.parametrize(("data", "message"), BAD_DATA, ids=[message for _, message in BAD_DATA])
def test_a_bad_reward_is_named_with_its_row(
    streaming: bool, data: Any, message: str, workshop: Workshop, tmp_path: Path
):
    """The error comes before the first step; with a streaming dataset, when the row is read."""
    steps = []
    with pytest.raises(ValueError, match=message):
        run(
            *(trl_ext, workshop, tmp_path),
            loss_type="rpo_squared",
            train_dataset=data.to_iterable_dataset() if streaming else data,
            watch=lambda *_: steps.append(1),
        )
    assert streaming or not steps


def test_a_bad_reward_names_the_worker_that_reads_it(workshop: Workshop, tmp_path: Path):
    data = columns(chosen_reward=[*GOOD[:5], math.nan, 0.0, 0.0]).to_iterable_dataset(num_shards=2)
    with pytest.raises(ValueError, match=r"`chosen_reward` must .* in row 1 of worker 1's part of the train data set"):
        run(trl_ext, workshop, tmp_path, loss_type="rpo_squared", train_dataset=data, dataloader_num_workers=2)


def test_evaluation_data_is_checked_too(workshop: Workshop, tmp_path: Path):
    options = {"loss_type": "rpo_squared", "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(ValueError, match="got nan in row 2 of the eval data set"):
        run(
            *(trl_ext, workshop, tmp_path),
            eval_dataset=columns(chosen_reward=[0.0, 0.0, math.nan, *GOOD[3:]]),
            **options,
        )
    seen = run(trl_ext, workshop, tmp_path, loss_type="rpo_squared")
    with pytest.raises(ValueError, match="The eval data set has no column `rejected_reward`"):
        seen.trainer.evaluate(columns(rejected_reward=None))
    assert seen.trainer.evaluate(rewarded(3, seed=4))["eval_loss"] > 0


class OwnCollator(trl.trainer.dpo_trainer.DataCollatorForPreference):
    def torch_call(self, examples):
        return {**super().torch_call(examples), "chosen_reward": torch.full((len(examples),), 2.5)}


def test_a_users_collator_gets_the_columns_and_may_give_its_own(workshop: Workshop, tmp_path: Path):
    batches = []
    seen = run(
        *(trl_ext, workshop, tmp_path),
        loss_type="rpo_squared",
        data_collator=OwnCollator(pad_token_id=0),
        watch=lambda trainer, batch: batches.append(batch),
        dataloader_num_workers=1,
        max_steps=1,
    )
    target = (2.5 - batches[0]["rejected_reward"]).mean().item()
    assert seen.log("rewards/target_margins") == pytest.approx([target])


def test_rewards_are_not_checked_if_no_loss_reads_them(workshop: Workshop, tmp_path: Path):
    data = columns(chosen_reward=["good"] * 8)
    training_comparison(*(run(library, workshop, tmp_path, train_dataset=data) for library in (trl_ext, trl)))


REFUSED = [
    ({"loss_type": ["cdpo"], "label_smoothing": 0.5}, r"for 'cdpo' it must be in \[0, 0.5\), got 0.5"),
    ({"loss_type": ["cdpo", "hinge"], "label_smoothing": 0.1}, "does not apply to 'hinge'"),
    ({"loss_type": ["cdpo", "ipo"], "label_smoothing": 0.1}, "does not apply to 'ipo'"),
    ({"loss_type": ["ipo_sum"], "label_smoothing": 0.1}, "does not apply to 'ipo_sum'"),
    ({"loss_type": ["rpo_squared"], "label_smoothing": 0.1}, "'rpo_squared' does not read `label_smoothing"),
    ({"loss_type": ["rpo_squared"], "ld_alpha": 0.5}, "`ld_alpha=0.5` is not defined for 'rpo_squared'"),
    ({"loss_type": ["ipo_sum"], "use_weighting": True}, "`use_weighting=True` is not defined for 'ipo_sum'"),
    ({"loss_type": ["cdpo"], "f_divergence_type": "forward_kl"}, "`f_divergence_type='forward_kl'` is not defined"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_options_are_refused(config: dict[str, Any], message: str, workshop: Workshop, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        trl_ext.DPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", **config)
    # With TRL's own config it is refused when the trainer is built
    theirs = trl.DPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", **config)
    with pytest.raises(ValueError, match=message):
        trl_ext.DPOTrainer(workshop.model("tied"), args=theirs, train_dataset=rewarded(2, seed=1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sft_label_smoothing": 0.1}, "smooths the labels of the loss type 'sft', which is not in"),
        ({"sft_label_smoothing": 1.0, "loss_type": ["sft"]}, r"must be in \[0, 1\), got 1.0"),
        ({"sft_label_smoothing": "0.1", "loss_type": ["sft"]}, "`sft_label_smoothing` must be a finite number"),
        ({"sft_label_smoothing_convention": "keras"}, "must be one of .*got 'keras'"),
        ({"reward_scale": math.nan}, "`reward_scale` must be a finite number, got nan"),
        ({"reward_scale": -1.0}, "`reward_scale` must be above 0, got -1.0"),
        ({"reward_scale": 2.0}, "Only the RPO loss types use `reward_scale=2.0`, and `loss_type"),
        ({"rpo_average_log_probs": True, "loss_type": ["cdpo"]}, "Only the RPO loss types use `rpo_average_log_"),
        ({"loss_type": []}, "`loss_type` is empty"),
    ],
)
def test_fields_are_checked(config: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        trl_ext.DPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", **config)


@pytest.mark.parametrize(
    ("loss_type", "warned"),
    [
        (["sigmoid"], "'sigmoid'"),
        (["hinge", "ipo"], "'hinge' and 'ipo'"),
        (["sigmoid", "cdpo"], "'sigmoid'"),
        (["robust"], None),
        (["cdpo", "sft"], None),
    ],
)
def test_a_label_smoothing_that_trl_ignores_is_a_warning(
    loss_type: list[str],
    warned: str | None,
    workshop: Workshop,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    config = trl_ext.DPOConfig(
        *(str(tmp_path),), bf16=False, use_cpu=True, report_to="none", loss_type=loss_type, label_smoothing=0.1
    )
    with caplog.at_level("WARNING", logger="trl_ext"):
        trl_ext.DPOTrainer(workshop.model("tied"), args=config, train_dataset=rewarded(2, seed=1))
    warnings = [x.getMessage() for x in caplog.records if "label_smoothing" in x.getMessage()]
    assert [f"`label_smoothing=0.1` is ignored by the loss type {warned}, as in TRL" in x for x in warnings] == (
        [True] if warned else []
    )


def test_the_table_says_which_losses_of_trl_read_label_smoothing(workshop: Workshop, tmp_path: Path):
    trainer = trl.DPOTrainer(
        workshop.model("tied"),
        # Not the policy: while their log-ratios are 0, a loss that reads it may have the same value
        AutoModelForCausalLM.from_pretrained(workshop.model("tied", REFERENCE_SEED)),
        args=trl.DPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none"),
        train_dataset=rewarded(4, seed=1),
    )
    batch = next(iter(trainer.get_train_dataloader()))

    def loss(name: str, label_smoothing: float) -> float:
        trainer.loss_types, trainer.loss_weights, trainer.label_smoothing = [name], [1.0], label_smoothing
        return trainer.compute_loss(trainer.model, batch).item()

    reading = {name for name in DPO_LOSS_TYPES if loss(name, 0.1) != loss(name, 0.3)}
    assert reading == {name for name, row in DPO_LOSS_TYPES.items() if row.label_smoothing == "read"}


def test_what_is_said_of_label_smoothing_holds_for_a_loss_type_that_is_only_in_the_table_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It neither reads rewards nor is one of TRL's."""
    monkeypatch.setitem(PREFERENCE_LOSSES, "squared_hinge", lambda pairs, options: pairs.difference)

    def config(*loss_type: str) -> trl_ext.DPOConfig:
        return trl_ext.DPOConfig(
            str(tmp_path), bf16=False, use_cpu=True, report_to="none", loss_type=[*loss_type], label_smoothing=0.1
        )

    warn_of_ignored_smoothing(config("squared_hinge"))
    warning = caplog.messages[-1]
    assert warning.startswith("`label_smoothing=0.1` is ignored by the loss type 'squared_hinge'. The loss type 'cdpo'")
    with pytest.raises(ValueError, match=r"^'rpo_squared' does not read `label_smoothing=0.1`: its targets come from"):
        config("squared_hinge", "rpo_squared")


def test_rewards_do_not_turn_off_the_reference_store(workshop: Workshop, tmp_path: Path):
    """Of two epochs, only the first runs the reference."""
    seen = run(trl_ext, workshop, tmp_path, loss_type="rpo_squared", max_steps=4)
    assert seen.log("skipped/passes") == [0, 0, 1, 1]
    assert seen.trainer._source.stored.holds(next(iter(seen.trainer.get_train_dataloader())))
