"""Dynamic sampling: no dead group reaches training, and the step is the one that TRL takes on the prompts kept."""

import shutil

import pytest
import torch
import trl
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import pretended_gpu
import trl_ext
from rewards import half_dead_reward
from tiny import Workshop, prompts, scripted_rollout
from trl_ext.planning.dynamic_sampling import FurtherPrompts, with_live_groups

GROUP = 4


def build(library, workshop: Workshop, tmp_path, dataset, **options):
    class Recording(library.GRPOTrainer):
        kept = ()

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if self.model.training:
                texts = self.processing_class.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
                self.kept = (*self.kept, *texts[::GROUP])
                self.batch = batch
            return batch

    path = workshop.model("tied")
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(path),
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=half_dead_reward,
        rollout_func=scripted_rollout,
        train_dataset=dataset,
        args=library.GRPOConfig(
            str(tmp_path / "run"),
            **{
                "per_device_train_batch_size": 8,
                "num_generations": GROUP,
                "max_completion_length": 8,
                "max_steps": 3,
                "learning_rate": 1e-2,
                "optim": "sgd",
                "max_grad_norm": 0.0,
                "logging_steps": 1,
                "bf16": False,
                "use_cpu": True,
                "report_to": "none",
                "save_strategy": "no",
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
                **({"padding_free": False} if library is trl_ext else {}),  # tokens are counted as TRL feeds them
                **options,
            },
        ),
    )
    fed = []
    for scoring in getattr(trainer, "scoring_forwards", ()):
        scoring.is_compared = True  # the check of the logits runs 8 tokens twice
    for model in filter(None, (trainer.model, trainer.ref_model)):
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: fed.append((torch.is_grad_enabled(), args[0].numel()))
        )
    return trainer, fed


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.1}, {"steps_per_generation": 2, "loss_type": "grpo", "max_steps": 4}], ids=str
)
def test_training_is_that_of_trl_on_the_prompts_kept(workshop, tmp_path, options):
    dataset = prompts(80, seed=1)  # many: stock would roll out a prompt that is twice in a batch otherwise
    ours, fed = build(trl_ext, workshop, tmp_path, dataset, dynamic_sampling=True, **options)
    start = weights(ours)
    ours.train()
    assert all(int(prompt.split()[0][1:]) % 2 == 0 for prompt in ours.kept)  # rewards of odd prompts are identical
    draws = [log["dynamic_sampling/draws"] for log in ours.state.log_history if "dynamic_sampling/draws" in log]
    assert max(draws) > 1
    assert not any(log.get("dynamic_sampling/dead_groups") for log in ours.state.log_history)

    kept = Dataset.from_list([{"prompt": prompt} for prompt in ours.kept])
    stock, stock_fed = build(trl, workshop, tmp_path, kept, shuffle_dataset=False, **options)
    stock.train()
    assert stock.kept == ours.kept
    moved = weights(stock) - start
    assert moved.norm() > 0
    assert (weights(ours) - weights(stock)).norm() <= 1e-4 * moved.norm()
    # The reference and the old policy score what is kept, not what was drawn; all of it, as `Recording` may read it
    tokens, stock_tokens = (sum(n for grad, n in passes if not grad) for passes in (fed, stock_fed))
    assert tokens == stock_tokens
    assert (ours.batch["num_items_in_batch"] == stock.batch["num_items_in_batch"]).all()


def test_the_number_of_draws_is_limited_and_dead_groups_stay_after_the_last(workshop, tmp_path):
    dead = Dataset.from_list([{"prompt": f"w{2 * i + 1}"} for i in range(6)])
    ours, fed = build(
        trl_ext, workshop, tmp_path, dead, dynamic_sampling=True, dynamic_sampling_max_draws=3, max_steps=1
    )
    start = weights(ours)
    ours.train()
    log = ours.state.log_history[0]
    assert (log["dynamic_sampling/draws"], log["dynamic_sampling/dead_groups"]) == (3, 2)
    assert torch.equal(weights(ours), start)
    assert [grad for grad, _ in fed] == [True]  # one row


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"per_device_train_batch_size": 2, "num_generations": 8, "gradient_accumulation_steps": 4}, None),
        ({"per_device_train_batch_size": 6, "steps_per_generation": 2, "num_generations": 3}, None),
        ({"scale_rewards": "batch"}, "scale_rewards"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "normalize_then_sum"),
        ({"dynamic_sampling_max_draws": 0}, "dynamic_sampling_max_draws"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_before_the_first_step(workshop, tmp_path, options, said):
    def trainer():
        build(trl_ext, workshop, tmp_path, prompts(12, seed=1), dynamic_sampling=True, **options)

    if said is None:
        trainer()
    else:
        with pytest.raises(ValueError, match=said):
            trainer()


def test_groups_of_another_width_are_padded_as_trl_pads():
    batch = {
        "prompt_ids": torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4]]),
        "completion_ids": torch.tensor([[5], [6], [7], [8]]),
        "tool_mask": torch.tensor([[1], [0], [1], [0]]),
        "advantages": torch.tensor([0.0, 0.0, 1.0, -1.0]),
        "num_items_in_batch": torch.tensor(4),
    }
    draw = {
        "prompt_ids": torch.tensor([[9], [9], [10], [10]]),
        "completion_ids": torch.tensor([[11, 12], [13, 0], [14, 15], [16, 17]]),
        "tool_mask": torch.tensor([[1, 1], [1, 1], [0, 1], [1, 0]]),
        "advantages": torch.tensor([0.0, 0.0, 2.0, -2.0]),
        "num_items_in_batch": torch.tensor(7),
    }
    merged, still_dead = with_live_groups(
        *(batch, torch.tensor([True, False]), draw, torch.tensor([True, False]), 2),
        {"prompt_ids": 99, "completion_ids": 99, "tool_mask": 1},
    )
    assert merged["prompt_ids"].tolist() == [[99, 10], [99, 10], [3, 4], [3, 4]]
    assert merged["completion_ids"].tolist() == [[14, 15], [16, 17], [7, 99], [8, 99]]
    assert merged["tool_mask"].tolist() == [[0, 1], [1, 0], [1, 1], [0, 1]]
    assert merged["advantages"].tolist() == [2.0, -2.0, 1.0, -1.0]
    assert still_dead.tolist() == [False, False]


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.sampled_from([(torch.uint8, 255), (torch.int16, -1)]),
    st.integers(0, 2**31),
)
def test_routes_stay_with_their_tokens(widths, trailing, kind, seed):
    dtype, fill = kind
    generator = torch.Generator().manual_seed(seed)

    def drawn(prompt_width, width):
        batch = {}
        for side, tokens in (("prompt", prompt_width), ("completion", width)):
            batch[f"{side}_ids"] = torch.randint(1, 100, (4, tokens), generator=generator)
            unknown = torch.randint(0, 3, (4, tokens), generator=generator) == 0
            routes = batch[f"{side}_ids"][..., None, None].expand(-1, -1, *trailing).to(dtype)
            batch[f"{side}_routes"] = routes.masked_fill(unknown[..., None, None], fill)
        return batch

    batch, draw = drawn(*widths[:2]), drawn(*widths[2:])
    merged, _ = with_live_groups(
        *(batch, torch.tensor([False, True]), draw, torch.tensor([False, True]), 2),
        {"prompt_ids": 0, "completion_ids": 0, "prompt_routes": fill, "completion_routes": fill},
    )
    for side in ("prompt", "completion"):
        ids, routes = merged[f"{side}_ids"], merged[f"{side}_routes"]
        assert routes.dtype == dtype
        assert routes.shape == (*ids.shape, *trailing)
        assert ids[ids > 0].tolist() == [
            *batch[f"{side}_ids"][:2].flatten().tolist(),
            *draw[f"{side}_ids"][:2].flatten().tolist(),
        ]
        given_routes = [x[f"{side}_routes"][:2].flatten(0, 1) for x in (batch, draw)]
        assert torch.equal(routes[ids > 0], torch.cat(given_routes))
        assert (routes[ids == 0] == fill).all()


@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended GPU needs g++")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the pretended GPU needs a build of torch for the CPU")
def test_groups_on_a_device_are_replaced_with_their_routes_on_the_host():
    script = """
import pretended_gpu, torch
pretended_gpu.start()
from trl_ext.planning.dynamic_sampling import with_live_groups
with pretended_gpu.DeviceMode():
    routes = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)[..., None, None]
    batch = {"completion_ids": torch.tensor([[1, 2], [3, 4]]).cuda(), "completion_routes": routes}
    draw = {"completion_ids": torch.tensor([[5], [6]]).cuda(), "completion_routes": routes[:, :1] + 10}
    dead, dead_in_draw = torch.tensor([False, True]).cuda(), torch.tensor([True, False]).cuda()
    merged, _ = with_live_groups(batch, dead, draw, dead_in_draw, 1, {"completion_routes": 255})
    assert [x.device.type for x in merged.values()] == ["cuda", "cpu"]
    print([x.flatten().tolist() for x in merged.values()])
"""
    assert pretended_gpu.python("-c", script) == "[[1, 2, 6, 0], [1, 2, 13, 255]]"


@pytest.mark.parametrize("streaming", [False, True])
def test_further_prompts_come_again_and_again(streaming):
    dataset = prompts(5, seed=0)
    source = FurtherPrompts(dataset.to_iterable_dataset() if streaming else dataset, shuffle=True, seed=3)
    taken = [row["prompt"] for row in source.take(7) + source.take(8)]
    assert sorted(taken) == sorted(3 * list(dataset["prompt"]))
    assert taken[:5] != taken[5:10]
