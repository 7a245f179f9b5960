"""The scoring forward equals each family's logits for both kinds of labels, and changes nothing else."""

import copy

import pytest
import torch
import transformers as t
from accelerate.utils import convert_outputs_to_fp32
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from head_definition import floats_apart
from model_families import BASE, FAMILIES, batch, build
from tiny import MODELS
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward


@pytest.mark.parametrize("name", [*FAMILIES, *MODELS])
def test_log_probs_of_every_family_equal_those_of_its_logits(name):
    model = build(name)
    inputs, labels = batch()
    with torch.no_grad():
        logits = model(**inputs).logits[:, :-1].float() / 0.7
    attach_scoring_forward(model, ScoringOptions(temperature=0.7, outputs=("log_probs", "entropy", "mean_logits")))
    with torch.no_grad():
        scored = model(**inputs, labels=labels, fused_lm_head=True)
    mask = labels[:, 1:] != -100
    log_p = logits.log_softmax(-1)
    targets = labels[:, 1:].clamp(min=0)
    expected = {
        "log_probs": log_p.gather(-1, targets[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "mean_logits": logits.mean(-1),
    }
    for field, value in expected.items():
        assert floats_apart(getattr(scored, field), value * mask) < 1e-5, field
    assert torch.equal(scored.label_mask, mask)
    assert scored.loss.item() == pytest.approx(-float((expected["log_probs"] * mask).sum() / mask.sum()), rel=1e-5)


def test_positions_without_a_label_are_not_scored(monkeypatch):
    import trl_ext.scoring.forward as forward

    run_head, scored = forward.run_head, []

    def counting(name, hidden, *args, **kwargs):
        scored.append(len(hidden))
        return run_head(name, hidden, *args, **kwargs)

    monkeypatch.setattr(forward, "run_head", counting)
    model = build("untied")
    attach_scoring_forward(model, ScoringOptions()).is_compared = True
    inputs, labels = batch()
    model(**inputs, labels=labels, fused_lm_head=True)
    assert scored == [int((labels[:, 1:] != -100).sum())]
    assert scored[0] < labels[:, 1:].numel()


def test_a_deep_copy_scores_with_its_own_weights():
    model = build("untied")
    attach_scoring_forward(model, ScoringOptions())
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(model.lm_head.weight)
    inputs, labels = batch()
    assert model(**inputs).logits.abs().sum().item() == 0
    assert twin(**inputs).logits.abs().sum().item() > 0
    scored = [m(**inputs, labels=labels, fused_lm_head=True).log_probs for m in (model, twin)]
    assert not torch.equal(*scored)


def test_shift_labels_are_scored_without_shifting():
    model = build("untied")
    attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy"), padding_free=False))
    inputs, labels = batch()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    ours = model(**inputs, shift_labels=shifted, fused_lm_head=True)
    other = model(**inputs, labels=labels, fused_lm_head=True)
    assert ours.log_probs.shape == labels.shape
    assert torch.equal(ours.log_probs[:, :-1], other.log_probs)
    assert torch.equal(ours.label_mask[:, :-1], other.label_mask)


def test_num_items_in_batch_divides_the_loss():
    model = build("untied")
    attach_scoring_forward(model, ScoringOptions())
    inputs, labels = batch()
    out = model(**inputs, labels=labels, fused_lm_head=True, num_items_in_batch=7)
    assert out.loss.item() == pytest.approx(-out.log_probs.sum().item() / 7)


def test_a_batch_without_labels_gives_a_zero_with_a_graph():
    for trained in (False, True):
        model = build("untied")
        model.lm_head.requires_grad_(trained)
        attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy", "is_top1")))
        inputs, labels = batch()
        out = model(**inputs, labels=labels.fill_(-100), fused_lm_head=True)
        assert out.loss.item() == 0
        assert out.log_probs.abs().sum().item() == 0
        out.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(g is not None and g.isfinite().all() and float(g.abs().sum()) == 0 for g in gradients)


def test_missing_labels_are_an_error():
    model = build("untied")
    attach_scoring_forward(model, ScoringOptions())
    with pytest.raises(ValueError, match="`labels` or `shift_labels`"):
        model(**batch()[0], fused_lm_head=True)


def test_generation_and_the_plain_forward_do_not_change():
    inputs, labels = batch()
    plain, attached = build("tied"), build("tied")
    attach_scoring_forward(attached, ScoringOptions())
    a, b = plain(**inputs, labels=labels), attached(**inputs, labels=labels)
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.loss, b.loss)
    settings = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": 0}
    generated = []
    for model in (plain, attached):
        torch.manual_seed(5)
        generated.append(model.generate(**inputs, **settings))
    assert torch.equal(*generated)
    with pytest.raises(ValueError, match="not used by the model"):
        attached.generate(**inputs, no_such_argument=1)


@pytest.mark.parametrize("name", ["experts", "mixtral", "gpt-oss", "granite-moe"])
def test_router_loss_equals_the_models(name):
    model = build(name, router_aux_loss_coef=0.5)
    inputs, labels = batch()
    own = model(**inputs, labels=labels, output_router_logits=True)
    attach_scoring_forward(model, ScoringOptions())
    ours = model(**inputs, labels=labels, output_router_logits=True, fused_lm_head=True)
    assert ours.aux_loss.item() == pytest.approx(own.aux_loss.item(), rel=1e-6)
    assert ours.aux_loss.item() > 0
    assert model(**inputs, labels=labels, fused_lm_head=True).aux_loss is None
    # The model's loss includes the weighted router loss
    lone = -ours.log_probs.sum() / ours.label_mask.sum()
    assert ours.loss.item() == pytest.approx((lone + 0.5 * own.aux_loss).item(), rel=1e-5)


def test_the_head_in_fp32_is_cast_before_the_product():
    model = build("untied").bfloat16()
    model.lm_head.float()
    attach_scoring_forward(model, ScoringOptions(cast_lm_head_to_fp32=True, padding_free=False))
    inputs, labels = batch()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scored = model(**inputs, labels=labels, fused_lm_head=True)
        hidden = model.base_model(**inputs).last_hidden_state[:, :-1]
    logits = hidden.double() @ model.lm_head.weight.double().t()
    mask = labels[:, 1:] != -100
    expected = logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * mask
    assert floats_apart(scored.log_probs, expected) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = build("untied").train()
        attach_scoring_forward(model, ScoringOptions())
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        inputs, labels = batch()
        model(**inputs, labels=labels, fused_lm_head=True).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert floats_apart(a, b) < 1e-6


def vision_model():
    torch.manual_seed(0)
    text = {**BASE, "vocab_size": 97, "rope_parameters": {"type": "default", "mrope_section": [1, 1, 2]}}
    config = t.Qwen2VLConfig(
        text_config={**text, "tie_word_embeddings": False},
        vision_config={
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "in_channels": 3,
            "mlp_ratio": 2,
        },
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    return t.Qwen2VLForConditionalGeneration(config).eval()


def test_the_text_of_a_vision_language_model_is_scored_with_its_images():
    model = vision_model()
    ids = torch.randint(3, 80, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 2] = 92
    ids[:, 3:7] = 90  # one image of 4 x 4 patches, merged by 2 x 2
    ids[:, 7] = 93
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2 * 16, 3 * 4 * 4, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == 90).int(),
    }
    labels = ids.masked_fill(torch.arange(12) < 8, -100)
    with torch.no_grad():
        log_p = model(**inputs).logits[:, :-1].log_softmax(-1)
        other = model(**inputs | {"pixel_values": inputs["pixel_values"] + 1}).logits[:, :-1].log_softmax(-1)
    attach_scoring_forward(model, ScoringOptions())
    with torch.no_grad():
        ours = model(**inputs, labels=labels, fused_lm_head=True).log_probs
    mask = labels[:, 1:] != -100
    targets = labels[:, 1:].clamp(min=0)[..., None]
    assert floats_apart(ours, log_p.gather(-1, targets)[..., 0] * mask) < 1e-5
    assert floats_apart(ours, other.gather(-1, targets)[..., 0] * mask) > 1e-3  # the image changed the result


def smoothed_loss(model, wrapped):
    attach_scoring_forward(model, ScoringOptions())
    inputs, labels = batch()
    asked = ("log_probs", "mean_log_probs")
    out = wrapped(**inputs, labels=labels, fused_lm_head=True, head_outputs=asked)
    (out.log_probs.sum() - 0.1 * out.mean_log_probs.sum()).backward()
    return out.mean_log_probs.detach()


def mean_log_probs_through(group, wrapper):
    model = build("softcap")
    model.lm_head.requires_grad_(False)
    if wrapper == "DDP":
        model.forward = convert_outputs_to_fp32(model.forward)  # as Accelerate does under autocast
        wrapped = DistributedDataParallel(model, process_group=group)
    else:
        wrapped = fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    found = smoothed_loss(model, wrapped)
    gradient = model.model.layers[0].mlp.up_proj.weight.grad
    return found, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_mean_log_probs_pass_through_wrappers_of_the_model(ranks, wrapper):
    model = build("softcap")
    model.lm_head.requires_grad_(False)
    expected = smoothed_loss(model, model)
    inputs, labels = batch()
    with torch.no_grad():
        defined = build("softcap")(**inputs).logits[:, :-1].log_softmax(-1).mean(-1) * (labels[:, 1:] != -100)
    assert floats_apart(expected, defined) < 1e-5
    for found, gradient in ranks.run(mean_log_probs_through, 2, wrapper):
        assert floats_apart(found, expected) < 1e-6
        exact = model.model.layers[0].mlp.up_proj.weight.grad
        assert floats_apart(gradient, exact) < 1e-5 * float(exact.abs().max())
