"""A reference model on the host, with CUDA: the values are equal bit for bit, and it needs less memory."""

import pytest
import torch
import trl
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

import trl_ext
from device_memory import allocated_by
from tiny import V_WORDS, preferences, word_tokenizer
from trl_ext.host.reference import HostedReference
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="measures CUDA")

DEVICE = torch.device("cuda", 0)
MIB = 2**20


def config(**changes):
    """Return a config of 107 million weights, 214 MB in bf16, whose copies take as long as the computation."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8}
    ids = {"vocab_size": 4096, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaConfig(**{**shape, **ids, "num_key_value_heads": 8, "tie_word_embeddings": True, **changes})


def scored(model, tokens, autocast):
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        return model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast", "bf16 weights"])
def test_values_equal_the_model_on_the_device_and_memory_is_two_layers(precision, tied):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config(tie_word_embeddings=tied)).eval()
    if precision == "bf16 weights":
        plain = plain.bfloat16()
    hosted = AutoModelForCausalLM.from_config(plain.config).to(plain.dtype).eval()
    hosted.load_state_dict(plain.state_dict())
    for model in (plain, hosted):
        attach_scoring_forward(model, ScoringOptions())
    plain.to(DEVICE)
    reference = HostedReference(hosted, DEVICE)
    autocast = precision == "bf16 autocast"
    # In some calls the copies end before the computation, in others after it
    for rows, length in ((1, 8), (4, 256), (8, 512), (1, 8), (4, 256)):
        tokens = torch.randint(4096, (rows, length), device=DEVICE)
        assert torch.equal(scored(hosted, tokens, autocast), scored(plain, tokens, autocast))
    # torch's `is_pinned` does not know memory that it did not allocate
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        scored(hosted, tokens, autocast)
    pinned = [event for event in profiled.events() if event.name == "Memcpy HtoD (Pinned -> Device)"]
    assert len(pinned) >= 1 + hosted.config.num_hidden_layers
    assert all(param.device.type == "cpu" for param in hosted.parameters())
    own = reference.rest_bytes + 2 * reference.layer_bytes
    weights = sum(param.nbytes for param in hosted.parameters())
    assert own < 0.5 * weights
    tokens = torch.randint(4096, (4, 256), device=DEVICE)
    of_plain, of_hosted = (allocated_by(lambda m=m: scored(m, tokens, autocast)) for m in (plain, hosted))
    assert of_hosted <= of_plain + own + MIB


def test_dpo_needs_less_device_memory_by_the_size_of_the_model(tmp_path):
    torch.manual_seed(0)
    assert config().vocab_size >= V_WORDS
    model = AutoModelForCausalLM.from_config(config()).bfloat16()
    size = sum(param.nbytes for param in model.parameters())
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    losses, peaks = {}, {}

    def train(name, library, **where):
        trainer = library.DPOTrainer(
            model=str(tmp_path / "model"),
            args=library.DPOConfig(
                output_dir=str(tmp_path / name),
                model_init_kwargs={"dtype": "bfloat16", "device_map": None},
                bf16=False,
                per_device_train_batch_size=4,
                gradient_checkpointing=False,
                learning_rate=0.01,
                max_steps=3,
                logging_steps=1,
                optim="sgd",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **where,
            ),
            train_dataset=preferences(12, seed=1),
        )
        trainer.train()
        losses[name] = [log["loss"] for log in trainer.state.log_history if "loss" in log]

    train("warm-up", trl_ext)  # without what libraries allocate once
    for name, library, where in (
        ("stock", trl, {}),
        ("on the device", trl_ext, {}),
        ("on the host", trl_ext, {"reference_device": "cpu"}),
    ):
        peaks[name] = allocated_by(lambda n=name, library=library, where=where: train(n, library, **where))
    print({name: f"{peak / MIB:.0f} MiB" for name, peak in peaks.items()}, f"model {size / MIB:.0f} MiB")
    assert len(losses["on the host"]) == 3
    assert losses["on the host"] == losses["on the device"]
    assert peaks["stock"] - peaks["on the host"] >= 0.9 * size
    assert peaks["on the device"] - peaks["on the host"] >= 0.9 * size
