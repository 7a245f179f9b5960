"""Peak memory of the head, from the allocator's records: it never makes a tensor of tokens times vocabulary."""

import pytest
import torch
from allocations import peak_bytes

from trl_ext import linear_log_probs
from trl_ext.heads import tiled
from trl_ext.heads.kernels import work

TOKENS, VOCABULARY, WIDTH = 4096, 32768, 1024


@pytest.mark.parametrize(
    ("dtype", "head"),
    [
        (torch.float32, "frozen"),
        (torch.bfloat16, "no_grad"),
        pytest.param(torch.float32, "no_grad", marks=pytest.mark.slow),
        pytest.param(torch.float32, "trained", marks=pytest.mark.slow),
        pytest.param(torch.float32, "entropy", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "frozen", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "trained", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "entropy", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_peak_memory_is_inputs_outputs_gradients_and_one_tile(dtype, head):
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_(head != "no_grad")
    weight = (torch.randn(VOCABULARY, WIDTH) / 32).to(dtype).requires_grad_(head == "trained")
    targets = torch.randint(VOCABULARY, (TOKENS,))
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")

    def run():
        with torch.set_grad_enabled(head != "no_grad"):
            out = linear_log_probs(hidden, weight, targets, outputs=outputs, entropy_requires_grad=head == "entropy")
        if head != "no_grad":
            loss = out.log_probs.sum() + (out.entropy.sum() if head == "entropy" else 0)
            loss.backward()

    extra = peak_bytes(run)
    inputs = sum(x.nbytes for x in (hidden, weight, targets))
    returned = TOKENS * (3 * 4 + 1)
    # The gradient of the hidden states is summed in fp32, then cast to its dtype
    gradients = 0 if head == "no_grad" else TOKENS * WIDTH * 4 + hidden.nbytes
    gradients += weight.nbytes if head == "trained" else 0
    rows = tiled.rows_per_tile(TOKENS, hidden.device, None)
    tile = rows * tiled.columns_per_tile(rows, VOCABULARY, hidden.device) * 4
    allowed = 1.2 * (inputs + returned + tile + gradients)
    print(f"{dtype} {head}: {inputs + extra} bytes, {(inputs + extra) / allowed * 1.2:.3f} of inputs, outputs, ...")
    assert inputs + extra <= allowed
    assert extra < TOKENS * VOCABULARY * 4 / 2  # much less than the logits


def test_the_measurement_sees_the_logits_of_a_plain_head():
    hidden, weight = torch.randn(256, 64), torch.randn(2048, 64)
    assert peak_bytes(lambda: (hidden @ weight.t()).log_softmax(-1)) >= 2 * 256 * 2048 * 4


@pytest.mark.parametrize("trained", [False, True])
def test_few_tokens_do_not_cast_the_whole_weight(trained):
    vocabulary, width = 60000, 256
    weight = torch.randn(vocabulary, width).requires_grad_(trained)
    hidden, targets = torch.randn(4, width, requires_grad=True), torch.randint(vocabulary, (4,))

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_probs = linear_log_probs(hidden, weight, targets).log_probs
        log_probs.sum().backward()

    gradients = weight.nbytes if trained else 0
    # Slices of 8192 rows: two in bf16, one in fp32, and the gradient of a trained weight
    assert peak_bytes(run) < gradients + 8192 * width * (2 * 2 + 4 + 4 * trained) * 1.2


@pytest.mark.parametrize("vocabulary", [50257, 128256, 151936])
@pytest.mark.parametrize("elements", [2**21, 2**24, 2**25])  # of a small GPU to an H200
def test_every_row_of_a_tile_is_aligned_on_a_gpu(monkeypatch, elements: int, vocabulary: int):
    monkeypatch.setitem(tiled._ELEMENTS, "cuda", elements)
    device, widths = torch.device("cuda", 7), set()
    for tokens in range(1, 2**15 + 1):
        rows = tiled.rows_per_tile(tokens, device, None)
        widths.add(tiled.columns_per_tile(rows, vocabulary, device))
        assert rows == tokens or rows % 128 == 0
    assert all(width % 256 == 0 for width in widths)
    last = work.as_tile(torch.empty(4 * work.row_stride(vocabulary % 8192)), 4, vocabulary % 8192)
    assert last.stride(0) * 2 % 128 == 0  # bytes of a row in half precision
