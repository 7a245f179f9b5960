"""Router replay: routers use the experts that sampled, in each pass, and train as without replay where these agree."""

import copy
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PrefixTuningConfig
from test_continuous_batching import BATCHING
from torch.distributed.utils import _to_kwargs
from transformers import AutoModelForCausalLM

import trl_ext
from mixture_models import WITH_TOPK, WITHOUT_TOPK
from scripted_routes import (
    EXPERTS,
    ScriptedSampler,
    forwards_of,
    make_trainer,
    missing_routes,
    reward,
    saved_model,
    weights_of,
)
from tiny import V_WORDS, Workshop, lora_config, word_tokenizer
from trl_ext.planning.batch_keys import PROMPT_ROUTES, ROUTE_KEYS
from trl_ext.routing.routes import HostRoutes
from watched_routes import RouterCall, own_routes, watch_routes

KINDS = ("GRPO", "RLOO")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("mixture"), experts=EXPERTS)


_FAST = ("qwen3_moe", "deepseek_v3")


@pytest.fixture(
    scope="module", params=[x if x in _FAST else pytest.param(x, marks=pytest.mark.slow) for x in WITH_TOPK]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp(request.param), request.param)


def logged(trainer: Any, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


# Each known route is used


CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {},
    "non-reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
SETUPS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"padding_free": False},
    "prompts apart": {"share_prompts": False},
    "old policy": {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 4, "max_steps": 4},
    "lora": {"peft_config": lora_config(target_modules=["q_proj", "v_proj"]), "beta": 0.1, "max_steps": 2},
    "copied experts": {
        "peft_config": lora_config(target_modules=["q_proj"], modules_to_save=["mlp"]),
        "beta": 0.1,
        "max_steps": 2,
    },
    "parts": {"max_tokens_per_micro_batch": 40, "router_aux_loss_coef": 0.0},
    "merged": {
        "max_tokens_per_micro_batch": 40,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "router_aux_loss_coef": 0.0,
    },
    "dynamic sampling": {"dynamic_sampling": True},
}


def replaying(calls: list[RouterCall], sampler: ScriptedSampler) -> list[list[RouterCall]]:
    """Return the forwards whose routers used each known route of some rows, and ran no other rows.

    Each forward that trains must be one of them. Others are checks of the first batch.
    """
    rows = [row for rows in sampler.rows for row in rows]
    used = []
    for forward in forwards_of(calls, sampler.routers):
        in_forward = [row for row in rows if not missing_routes(forward, [row])]
        known = {tuple(row[: place + 1]) for row in in_forward for place in range(len(row) - 1)}
        padded_tokens = len(in_forward) * max(map(len, in_forward), default=0)
        if len(known) <= forward[0].tokens <= padded_tokens:
            used.append(forward)
        else:
            assert not forward[0].has_gradients
    return used


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_the_policy_uses_each_known_route_and_so_does_the_recompute(
    padded: bool, checkpointing: str, mixture: str, tmp_path: Path
) -> None:
    sampler = ScriptedSampler()
    options = {"rollout_func": sampler, "padding_free": False if padded else None, **CHECKPOINTING[checkpointing]}
    trainer = make_trainer("GRPO", tmp_path, mixture, replay_routes="sampler", **options)
    with watch_routes(trainer.model) as watched:
        trainer.train()
    used = replaying(watched.calls, sampler)
    assert len(used) == (1 if checkpointing == "none" else 2)
    assert not any(missing_routes(forward, sampler.rows[0]) for forward in used)
    assert any(call.in_backward for forward in used for call in forward) == (checkpointing != "none")


@pytest.mark.parametrize("setup", SETUPS)
def test_each_pass_uses_each_known_route(setup: str, mixture: str, tmp_path: Path) -> None:
    """Two of the setups have old-policy passes, or passes of a reference with the adapter off."""
    sampler = ScriptedSampler()
    trainer = make_trainer("GRPO", tmp_path, mixture, replay_routes="sampler", rollout_func=sampler, **SETUPS[setup])
    with watch_routes(trainer.model) as watched:
        trainer.train()
    # An adapter may have copies of routers
    calls = [replace(call, layer=int(re.findall(r"layers\.(\d)", call.name)[0])) for call in watched.calls]
    used = replaying(calls, sampler)
    without_gradient = sum(not forward[0].has_gradients for forward in used)
    assert without_gradient == {"old policy": 1, "lora": 2, "copied experts": 2}.get(setup, 0)
    rows = [row for rows in sampler.rows for row in rows]
    if setup != "dynamic sampling":  # which leaves rows out
        assert all(any(not missing_routes(forward, [row]) for forward in used) for row in rows)


class Flips:
    """Negates the weights of the routers once completions are sampled, so that passes would choose other experts.

    TRL decodes completions between sampling and its first pass.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decode = tokenizer.batch_decode
        self.trainer: Any = None
        tokenizer.batch_decode = self

    def __call__(self, *positional: Any, **options: Any) -> Any:
        flip_routers(self.trainer.model)
        return self.decode(*positional, **options)


@torch.no_grad()
def flip_routers(model: Any) -> None:
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.weight.neg_()


def entries_of(trainer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, mask and routes of the generation batch that trained last, `(B, S)` and `(B, S, L, k)`."""
    (batch,) = trainer._buffered_inputs
    ids, mask = (torch.cat([batch[f"{side}_{x}"] for side in ("prompt", "completion")], 1) for x in ("ids", "mask"))
    return ids, mask, torch.cat([batch[key] for key in ROUTE_KEYS], 1)


SAMPLERS: dict[str, dict[str, Any]] = {
    "fewer rows": {},
    "all rows": {"generate_fewer_rows": False},
    "continuous batching": {**BATCHING, "max_steps": 1},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_routes_are_those_of_the_sampler(kind: str, sampler: str, mixture: str, tmp_path: Path) -> None:
    options = {"learning_rate": 1e-12, "num_generations": 2, **SAMPLERS[sampler]}
    trainer = make_trainer(kind, tmp_path, mixture, replay_routes="sampler", **options)
    trainer.train()
    check_routes_of_sampler(trainer)


def test_the_routes_of_a_family_are_those_of_the_sampler(family: str, tmp_path: Path) -> None:
    trainer = make_trainer("GRPO", tmp_path, family, replay_routes="sampler", learning_rate=1e-12)
    trainer.train()
    check_routes_of_sampler(trainer)


def check_routes_of_sampler(trainer: Any) -> None:
    ids_BS, mask_BS, routes_BSLk = entries_of(trainer)
    own_BSLk = own_routes(trainer.model, ids_BS, mask_BS)
    is_known_BS = (routes_BSLk != 255).all(-1).all(-1)
    assert torch.equal(is_known_BS, (routes_BSLk != 255).any(-1).any(-1))
    agrees_BSL = (routes_BSLk.sort(-1).values == own_BSLk.sort(-1).values).all(-1)
    assert agrees_BSL[is_known_BS].all()
    assert not is_known_BS[mask_BS == 0].any()
    # `generate` stops before it would run the last token of its longest rows
    missing_B = (mask_BS.bool() & ~is_known_BS).sum(1)
    assert missing_B.amax() <= 1
    assert is_known_BS.sum() > 0.8 * mask_BS.sum()


@pytest.mark.parametrize("options", [{}, {"beta": 0.1}], ids=["plain", "kl"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_passes_use_the_routes_of_generate(
    kind: str, options: dict[str, Any], mixture: str, tmp_path: Path
) -> None:
    """The routers' weights are negated after sampling. RLOO's passes at generation have their own chunks of rows."""
    flips = Flips(word_tokenizer())
    schedule: dict[str, Any] = {"num_iterations": 2, "max_steps": 2} if kind == "RLOO" else {}
    trainer = make_trainer(
        kind,
        tmp_path,
        mixture,
        replay_routes="sampler",
        padding_free=False,
        processing_class=flips.tokenizer,
        per_device_train_batch_size=8,
        peft_config=lora_config(target_modules=["q_proj"]),
        **{"beta": 0.0, **schedule, **options},
    )
    flips.trainer = trainer
    with watch_routes(trainer.model) as watched:
        trainer.train()
    _, _, routes_BSLk = entries_of(trainer)
    known = [routes_BSLk[:, :, layer][(routes_BSLk[:, :, layer] != 255).all(-1)] for layer in (0, 1)]
    expected = [Counter(map(tuple, routes_Nk.tolist())) for routes_Nk in known]
    with_gradient = without_gradient = 0
    for forward in forwards_of(watched.calls, 2):
        used = [Counter(map(tuple, call.routes_Nk.tolist())) for call in forward]
        if all(not part - whole for part, whole in zip(expected, used, strict=True)):
            with_gradient += forward[0].has_gradients
            without_gradient += not forward[0].has_gradients
        else:
            assert not forward[0].has_gradients
    assert with_gradient == trainer.state.global_step
    # Old policy of RLOO's second iteration, and reference
    assert without_gradient == int(kind == "RLOO") + int("beta" in options)
    assert min(logged(trainer, "routes/differing")) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_without_replay_where_choices_agree(kind: str, family: str, tmp_path: Path) -> None:
    options = {"max_steps": 3, "beta": 0.05}
    plain = make_trainer(kind, tmp_path / "a", family, **options)
    start = weights_of(plain)
    plain.train()
    ours = make_trainer(kind, tmp_path / "b", family, replay_routes="sampler", **options)
    ours.train()
    assert (weights_of(ours) - weights_of(plain)).abs().max() <= 1e-6
    assert (weights_of(plain) - start).abs().max() > 1e-3
    assert max(logged(ours, "routes/differing")) == 0.0


def test_a_separate_reference_chooses_for_itself(mixture: str, tmp_path: Path) -> None:
    sampler = ScriptedSampler()
    trainer = make_trainer("GRPO", tmp_path, mixture, replay_routes="sampler", rollout_func=sampler, beta=0.1)
    with watch_routes(trainer.ref_model) as watched:
        trainer.train()
    assert watched.calls
    assert all(missing_routes(forward, sampler.rows[0]) for forward in forwards_of(watched.calls, 2))


# The routes of the old policy


OLD_POLICY_SETUPS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"padding_free": False},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "parts": {"max_tokens_per_micro_batch": 40, "router_aux_loss_coef": 0.0},
    # With a router loss, the policy's pass also runs the last tokens of rows, which the old policy's pass does not
    "old pass": {
        "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "router_aux_loss_coef": 0.0,
    },
}


@pytest.mark.parametrize("setup", OLD_POLICY_SETUPS)
def test_later_iterations_use_the_routes_of_the_first(setup: str, mixture: str, tmp_path: Path) -> None:
    """The learning rate changes most choices, so that later forwards without replay would use other experts."""
    options = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.3, **OLD_POLICY_SETUPS[setup]}
    uses = {}
    for source in ("old_policy", None):
        trainer = make_trainer("GRPO", tmp_path / str(source), mixture, replay_routes=source, **options)
        with watch_routes(trainer.model) as watched:
            trainer.train()
        forwards = [x for x in forwards_of(watched.calls, 2) if x[0].has_gradients and not x[0].in_backward]
        routes = [[Counter(map(tuple, call.routes_Nk.tolist())) for call in forward] for forward in forwards]
        half = len(routes) // 2  # the second iteration trains the same rows, in the same order
        uses[source] = routes[half:] == routes[:half]
        if source is not None:
            assert logged(trainer, "routes/differing")[-1] > 0.05
    assert uses == {"old_policy": True, None: False}


def test_without_later_iterations_there_is_nothing_to_replay(mixture: str, tmp_path: Path) -> None:
    trainer = make_trainer("GRPO", tmp_path, mixture, replay_routes="old_policy")
    decision = trainer.explain()["routes"]
    assert (decision.action, "No experts to replay" in decision.reason) == ("skip", True)
    trainer.train()
    assert not logged(trainer, "routes/differing")


# Checkpoints


@pytest.mark.parametrize("source", ["sampler", "old_policy"])
def test_a_run_resumed_in_mid_cycle_ends_bit_for_bit(source: str, mixture: str, tmp_path: Path) -> None:
    options = {
        "replay_routes": source,
        "num_iterations": 2,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 0.1,
    }
    whole = make_trainer("GRPO", tmp_path, mixture, **options)
    whole.train()
    for step in (1, 3):
        resumed = make_trainer("GRPO", tmp_path, mixture, **options)
        resumed.train(str(tmp_path / f"checkpoint-{step}"))
        assert torch.equal(weights_of(resumed), weights_of(whole))
    other = make_trainer("GRPO", tmp_path, mixture, **{**options, "replay_routes": None})
    other.train(str(tmp_path / "checkpoint-1"))
    assert not torch.equal(weights_of(other), weights_of(whole))


def test_rloo_resumes_in_mid_cycle_bit_for_bit(mixture: str, tmp_path: Path) -> None:
    options = {
        **{"replay_routes": "sampler", "num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1},
        **{"learning_rate": 0.1},
    }
    whole = make_trainer("RLOO", tmp_path, mixture, **options)
    whole.train()
    resumed = make_trainer("RLOO", tmp_path, mixture, **options)
    resumed.train(str(tmp_path / "checkpoint-1"))
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert all(batch[PROMPT_ROUTES].dtype == torch.uint8 for batch in resumed._buffered_inputs)


# Metrics


class ConflictingSampler(ScriptedSampler):
    """Gives the last copy of each prompt other routes for `changed` tokens of the prompt, and drops a row's routes."""

    changed = 1

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        for row, prompt in enumerate(prompts):
            if row + 1 == len(prompts) or prompts[row + 1] != prompt:
                routes = output["routed_experts"][row]
                output["routed_experts"][row] = torch.cat(
                    [(routes[: self.changed] + 1) % EXPERTS, routes[self.changed :]]
                )
        output["routed_experts"][0] = output["routed_experts"][0][:0]
        return output


def test_conflicts_of_shared_prompts_are_counted(mixture: str, tmp_path: Path) -> None:
    one_prompt = Dataset.from_list([{"prompt": f"w{row} w7 w8 w9"} for row in range(8)])
    sampler = ConflictingSampler()
    trainer = make_trainer(
        "GRPO", tmp_path, mixture, replay_routes="sampler", rollout_func=sampler, train_dataset=one_prompt
    )
    trainer.train()
    (rows,) = sampler.rows
    known = [tuple(row[: place + 1]) for row in rows[1:] for place in range(len(row) - 1)]
    shared = len(known) - len(set(known))
    # TRL shuffles rows, and the first of a prompt gives the route: the others differ from a changed one
    (conflicts,) = logged(trainer, "routes/conflicts")
    assert conflicts * shared in [pytest.approx(a + b) for a in (1, 2) for b in (1, 3)]
    tokens = sum(map(len, rows))
    assert logged(trainer, "routes/unknown") == [pytest.approx((len(rows[0]) + len(rows) - 1) / tokens)]


def test_the_mismatch_with_the_sampler_is_compared_on_some_steps(mixture: str, tmp_path: Path) -> None:
    for kind in KINDS:
        flips = Flips(word_tokenizer())
        options = {**BATCHING, "replay_routes": "sampler", "processing_class": flips.tokenizer, "max_steps": 2}
        trainer = make_trainer(kind, tmp_path, mixture, beta=0.0, sampler_check="off", **options)
        flips.trainer = trainer
        trainer.train()
        (without,) = logged(trainer, "routes/mismatch_kl_without")  # of the first step
        replayed = logged(trainer, "sampling/mismatch_kl")
        assert len(replayed) == 2
        assert without > 1.2 * replayed[0] > 0


# What is refused


class OwnTurn(trl_ext.GRPOTrainer):
    def _generate_single_turn(self, *positional: Any, **keywords: Any) -> Any:
        return super()._generate_single_turn(*positional, **keywords)


class OwnLoss(trl_ext.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "own generation": ("GRPO", {"trainer_class": OwnTurn}, "overrides TRL's `_generate_single_turn`"),
    "own loss": ("GRPO", {"trainer_class": OwnLoss}, "overrides TRL's `_compute_loss`"),
    "rloo's old policy": ("RLOO", {"replay_routes": "old_policy"}, "Choose 'sampler'"),
    "trusted": (
        "GRPO",
        {"replay_routes": "old_policy", "trust_sampling_log_probs": True, "rollout_func": ScriptedSampler()},
        "`trust_sampling_log_probs`",
    ),
    "ahead": ("GRPO", {"generation_lag": 1, "vllm_importance_sampling_correction": False}, "Leave `generation_lag`"),
    "virtual tokens": ("GRPO", {"peft_config": PREFIX}, "virtual tokens"),
    "beams": ("GRPO", {"generation_kwargs": {"num_beams": 2}}, "`generate` does not sample plainly"),
    "no cache": ("GRPO", {"generation_kwargs": {"use_cache": False}}, "`use_cache=False`"),
    "batching as in TRL": ("GRPO", {**BATCHING, "generate_fewer_rows": False}, "continuous batching runs as in TRL"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_one_error(case: str, mixture: str, tmp_path: Path) -> None:
    kind, options, reason = REFUSED[case]
    with pytest.raises(ValueError, match="is not supported here") as caught:
        make_trainer(kind, tmp_path, mixture, **{"replay_routes": "sampler", **options})
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", [*WITHOUT_TOPK, "dense"])
def test_models_without_such_routers_are_one_error(name: str, workshop: Workshop, tmp_path: Path) -> None:
    if name == "dense":
        model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    else:
        model = WITHOUT_TOPK[name](V_WORDS)
    with pytest.raises(ValueError, match=f"not supported for `{type(model).__name__}`"):
        make_trainer("GRPO", tmp_path, model, replay_routes="sampler")


def with_routes(change: Any) -> Any:
    def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = ScriptedSampler()(prompts, trainer)
        change(output)
        return output

    return sample


ROLLOUTS: dict[str, tuple[Any, str]] = {
    "none": (lambda output: output.pop("routed_experts"), "returned no `routed_experts`"),
    "too few": (lambda output: output["routed_experts"].pop(), "for 7 rows of 8"),
    "other layers": (
        lambda output: output.update(routed_experts=[x[:, :1] for x in output["routed_experts"]]),
        "the model has 2 routers, each of which chooses 2 experts",
    ),
    "None": (lambda output: output.update(routed_experts=None), "returned no `routed_experts`"),
    "ragged": (lambda output: output.update(routed_experts=[[[[1, 2]], [[1]]]] * 8), "of shape ()"),
    "bf16": (
        lambda output: output.update(routed_experts=[x.bfloat16() for x in output["routed_experts"]]),
        "dtype float32",
    ),
    "expert twice": (
        lambda output: output.update(routed_experts=[x * 0 for x in output["routed_experts"]]),
        "with an expert twice",
    ),
    "floats": (
        lambda output: output.update(routed_experts=[x.float() for x in output["routed_experts"]]),
        "dtype float32",
    ),
    "unknown expert": (
        lambda output: output.update(routed_experts=[x + 9 for x in output["routed_experts"]]),
        "The model has 16 experts",
    ),
    "too long": (
        lambda output: output.update(routed_experts=[torch.cat([x, x]) for x in output["routed_experts"]]),
        "which has",
    ),
}


@pytest.mark.parametrize("case", ROLLOUTS)
def test_wrong_routes_of_a_rollout_are_one_error(case: str, mixture: str, tmp_path: Path) -> None:
    change, message = ROLLOUTS[case]
    trainer = make_trainer("GRPO", tmp_path, mixture, replay_routes="sampler", rollout_func=with_routes(change))
    with pytest.raises(ValueError, match="rollout_func") as caught:
        trainer.train()
    assert message in str(caught.value)


def test_routes_that_a_subclass_drops_are_one_error(mixture: str, tmp_path: Path) -> None:
    class DropsRoutes(trl_ext.GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            batch = super()._prepare_inputs(generation_batch)
            return {name: x for name, x in batch.items() if name not in ROUTE_KEYS}

    trainer = make_trainer("GRPO", tmp_path, mixture, replay_routes="sampler", trainer_class=DropsRoutes)
    with pytest.raises(RuntimeError, match="needs 'prompt_routes' and 'completion_routes' of a micro-batch"):
        trainer.train()


def test_reward_functions_do_not_get_the_routes(mixture: str, tmp_path: Path) -> None:
    columns: set[str] = set()

    def noted(completion_ids: list[list[int]], **others: Any) -> list[float]:
        columns.update(others)
        return reward(completion_ids)

    options = {"rollout_func": ScriptedSampler(), "reward_funcs": noted}
    make_trainer("GRPO", tmp_path, mixture, replay_routes="sampler", **options).train()
    assert "prompts" in columns
    assert not any("rout" in name for name in columns)


@pytest.mark.parametrize(
    "change", [{"use_cache": False}, {"num_beams": 2}, {"guidance_scale": 1.5}], ids=["no cache", "beams", "guidance"]
)
def test_a_generation_config_of_the_model_that_runs_tokens_again_is_one_error(
    change: dict[str, Any], mixture: str, tmp_path: Path
) -> None:
    trainer = make_trainer("GRPO", tmp_path, mixture, replay_routes="sampler")
    trainer.model.generation_config.update(**change)
    with pytest.raises(RuntimeError, match="runs tokens more than once"):
        trainer.train()


def test_routers_that_came_after_the_trainer_are_one_error(mixture: str, tmp_path: Path) -> None:
    trainer = make_trainer("GRPO", tmp_path, mixture, replay_routes="sampler", rollout_func=ScriptedSampler())
    layer = trainer.model.model.layers[1]
    layer.mlp.gate = copy.deepcopy(layer.mlp.gate)
    with pytest.raises(RuntimeError, match="only 1 of 2 routers ran"):
        trainer.train()


def test_a_reward_that_scores_other_rows_and_then_fails_leaves_no_routes(mixture: str, tmp_path: Path) -> None:
    class Scores(trl_ext.RLOOTrainer):
        def _calculate_rewards(self, *positional: Any, **keywords: Any) -> Any:
            ids = torch.full((2, 6), 5)
            log_probs = self._get_per_token_logps_and_entropies(self.model, ids, torch.ones_like(ids), 3)[0]
            assert log_probs.shape == (2, 3)
            if self.state.global_step:
                raise RuntimeError("no reward")
            return super()._calculate_rewards(*positional, **keywords)

    options = {"replay_routes": "sampler", "trainer_class": Scores, "max_steps": 2}
    trainer = make_trainer("RLOO", tmp_path, mixture, **options)
    with pytest.raises(RuntimeError, match="no reward"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert trainer._routes.sampled.rows is None


def test_engines_leave_the_routes_on_the_host() -> None:
    """DDP and FSDP2 move the tensors that a model gets to its device, as torch's `_to_kwargs` does."""
    tensors = {"input_ids": torch.zeros(1), "routes": HostRoutes(torch.zeros(1, 2, 3, 4))}
    (_,), (moved,) = _to_kwargs((), tensors, torch.device("meta"), False)
    assert moved["input_ids"].device.type == "meta"
    assert moved["routes"].routes_BSLk.device.type == "cpu"


# Found on the way


@pytest.mark.parametrize("sampler", ["fewer rows", "all rows", "continuous batching"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_runs_with_a_router_loss_in_the_model(kind: str, sampler: str, mixture: str, tmp_path: Path) -> None:
    """In transformers 5.23 and later, the first decoding step fails if the model returns a router loss."""
    weights = []
    for returns_loss in (False, True):
        model = AutoModelForCausalLM.from_pretrained(mixture)
        model.config.output_router_logits = returns_loss
        options = {"beta": 0.0, "router_aux_loss_coef": 0.1, **SAMPLERS[sampler]}
        trainer = make_trainer(kind, tmp_path, model, **options)
        trainer.train()
        assert trainer.model.config.output_router_logits is returns_loss
        weights.append(weights_of(trainer))
    assert torch.equal(*weights)
