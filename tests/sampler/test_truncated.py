"""With `keep_sampling_mask`, the ratio to a vLLM that truncates its distribution is 1, as without truncation."""

import pytest

RATIO, MEAN = "sampling/importance_sampling_ratio_unclipped", "sampling/importance_sampling_ratio/mean"
CUT = {"top_p": 0.9, "top_k": 20, "vllm_importance_sampling_mode": "token_truncate"}
CASES = {
    "top_p and top_k": {"config": CUT},
    "min_p and top_k": {"config": {**CUT, "top_p": 1.0, "top_k": 40, "min_p": 0.2}, "engine": {"max_logprobs": -1}},
    "iterations with lora": {"config": {**CUT, "num_iterations": 2, "gradient_accumulation_steps": 2}, "lora": True},
}


def column(run, name):
    return [float(entry[name]) for entry in run["log"] if name in entry]


@pytest.mark.parametrize("name", CASES)
def test_the_ratio_is_one_and_vllm_returns_the_same_completions(train, name):
    case = {**CASES[name], "steps": 2}
    ours = train(**{**case, "config": {**case["config"], "keep_sampling_mask": True}})
    lowest, highest = column(ours, f"{RATIO}/min"), column(ours, f"{RATIO}/max")
    assert lowest
    assert max(abs(x - 1) for x in lowest + highest) <= 1e-5
    assert "biased" not in ours["printed"]
    assert "(`keep_sampling_mask`)" in " ".join(ours["printed"].split())
    print(name, "largest |ratio - 1|", max(abs(x - 1) for x in lowest + highest))
    if name == "top_p and top_k":
        stock = train(**case, trainer="stock")
        assert column(ours, "reward")[0] == column(stock, "reward")[0]
        print("stock's ratio, mean", column(stock, MEAN))
        assert column(stock, MEAN)[0] < 0.95


UNKNOWN = {
    "top_p": (0.9, "(set `top_k` too)"),
    "top_k": (30, "20 tokens, fewer than `top_k=30` (raise vLLM's `max_logprobs`)"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_vllm_does_not_tell_the_tokens_the_plan_says_so(train, name):
    value, said = UNKNOWN[name]
    printed = train(steps=1, config={name: value, "keep_sampling_mask": True})["printed"]
    assert "`keep_sampling_mask=True` has no effect" in printed
    assert said in printed
    assert "is biased" in printed
    assert "not samples" not in printed
