"""The check of the first batch leaves nothing behind: no random draw, no mode, no gradient."""

import pytest
import torch

from definition import floats_apart
from test_scoring_forward import batch, build
from trl_ext.scoring import ScoringOptions, attach_scoring_forward


def scored(model, checked: bool):
    """Log-probs, gradients and the random state after one training forward and backward."""
    scoring = attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy")))
    scoring.packing.checked = checked
    fed: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, args, output: fed.append(args[0].numel()))
    torch.manual_seed(0)
    inputs, labels = batch()
    out = model(**inputs, labels=labels, fused_lm_head=True)
    out.log_probs.sum().backward()
    handle.remove()
    gradients = [param.grad.clone() for param in model.parameters()]
    return out.log_probs.detach(), gradients, torch.random.get_rng_state(), fed


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_is_the_same_with_and_without_it(dropout):
    def model():
        made = build("untied", attention_dropout=dropout).train()
        made.base_model.layers[0].eval()  # a part that the user keeps from dropping
        return made

    checked_model, unchecked_model = model(), model()
    log_probs, gradients, state, fed = scored(checked_model, checked=False)
    others = scored(unchecked_model, checked=True)
    assert len(fed) > len(others[3]) == 1  # it did run
    assert torch.equal(log_probs, others[0])
    assert all(torch.equal(x, y) for x, y in zip(gradients, others[1], strict=True))
    assert torch.equal(state, others[2])
    modes = [[module.training for module in made.modules()] for made in (checked_model, unchecked_model)]
    assert modes[0] == modes[1]
    assert not all(modes[0])


def test_a_model_that_takes_other_positions_for_padded_rows_is_fed_padded(caplog):
    """OPT counts positions by its mask, so that padding before a row does not move it: the columns are not its own."""
    import transformers as t

    torch.manual_seed(0)
    config = t.OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    inputs, labels = batch()
    results = []
    for free in (False, True):
        torch.manual_seed(0)
        model = t.OPTForCausalLM(config).eval()
        scoring = attach_scoring_forward(model, ScoringOptions(padding_free=free))
        with torch.no_grad():
            results.append(model(**inputs, labels=labels, fused_lm_head=True).log_probs)
    assert "differ from the padded forward's" in scoring.packing.why_padded
    assert scoring.packing.why_padded in caplog.text
    assert floats_apart(results[1], results[0]) == 0
