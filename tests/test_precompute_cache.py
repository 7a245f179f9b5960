"""Precomputed reference log-probs: found again by the same run, never taken from stock TRL or from another setting."""

import pytest
import trl
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext
from tiny import Workshop, lora_config, preferences


@pytest.fixture
def passes(workshop: Workshop, tmp_path):
    """Builds a trainer that precomputes over a data set on disk, and returns how many reference passes that took."""
    folder = str(tmp_path / "data")
    preferences(8, 0).save_to_disk(folder)

    def count(library=trl_ext, **options):
        taken = []

        class Counting(library.DPOTrainer):
            def compute_ref_log_probs(self, model, inputs):
                taken.append(1)
                return super().compute_ref_log_probs(model, inputs)

        path = workshop.model("untied")
        Counting(
            AutoModelForCausalLM.from_pretrained(path),
            args=library.DPOConfig(
                str(tmp_path / "run"),
                **{"bf16": False, **options},
                use_cpu=True,
                report_to="none",
                precompute_ref_log_probs=True,
                per_device_train_batch_size=4,
                dataloader_pin_memory=False,
            ),
            train_dataset=load_from_disk(folder),
            processing_class=AutoTokenizer.from_pretrained(path),
            peft_config=lora_config(init_lora_weights=True),
        )
        return len(taken)

    return count


def test_the_cache_is_ours_and_is_found_again(passes):
    assert passes(trl) == 2
    assert passes(trl) == 0  # stock finds its own file: the measure can tell
    assert passes(trl_ext) == 2
    assert passes(trl_ext) == 0


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated:FutureWarning")
def test_other_sequences_or_another_precision_are_computed_anew(passes):
    # With keep_end TRL's own key depends on none of these
    assert passes(trl, truncation_mode="keep_end") == 2
    assert passes(trl, truncation_mode="keep_end", max_length=6) == 0
    assert passes(truncation_mode="keep_end") == 2
    assert passes(truncation_mode="keep_end", learning_rate=3e-4) == 0
    for other in ({"max_length": 6}, {"ld_alpha": 0.5}, {"bf16": True}, {"head": "dense"}):
        assert passes(truncation_mode="keep_end", **other) == 2, other
