"""benchmarks/routes.py: in bf16, replay lowers the mismatch with the sampler at least three times."""

import pytest
import routes


@pytest.mark.slow
def test_replay_lowers_the_mismatch_with_the_sampler() -> None:
    for fp32_head in (False, True):
        lines = [
            {line["subject"]: line["mismatch_kl"] for line in routes.mismatch("x", seed, routes.SHAPE, fp32_head, 0.0)}
            for seed in routes.SEEDS
        ]
        assert sum(x["own"] for x in lines) > 3 * sum(x["replayed"] for x in lines)
        if fp32_head:
            assert all(x["own"] > 3 * x["replayed"] > 0 for x in lines)
