"""The Triton kernels. A program of `fold` or `gradient` turns a row of a tile's product into operands of the next one.

Triton compiles them for NVIDIA, AMD and Intel devices; with TRITON_INTERPRET=1 they run on the CPU.

A program reads its row once and keeps it in registers, so a tile has at most `MOST_COLUMNS` columns. It reads and
writes the row up to the `stride`, so that every access is a vector; what lies beyond the `width` reaches no result.
`RunningStatistics` and `Coefficients` define in torch what the kernels compute, and explain each number. For a pointer
that is None, the kernel is compiled without the code that uses it.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Return tanh(x) within 2 units in the last place. Near 0 the exponential form cancels, so it uses the series."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2 * tl.abs(x))
    large = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -large, large))


@triton.jit
def _logits(product_ptr, bias_ptr, columns, width, stride, scale, cap, CAPPED: tl.constexpr):
    """Return z and 1 - tanh^2: z = cap * tanh(scale * x). Without a cap, return scale * x and 1."""
    x = tl.load(product_ptr + columns, mask=columns < stride, other=0.0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if CAPPED:
        t = _tanh(x * scale)
        return t * cap, 1 - t * t
    else:
        return x * scale, tl.full(x.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=["start"])
def fold(
    product_ptr,  # (n, width) fp32, rows `stride` apart
    bias_ptr,  # (width,)
    targets_ptr,  # (n,) int64
    max_ptr,  # from here on (n,) fp32, in and out
    shift_ptr,
    sum_exp_ptr,
    target_logit_ptr,
    sum_shifted_exp_ptr,
    sum_sq_exp_ptr,
    sum_logits_ptr,
    max_before_target_ptr,
    coefficients_ptr,  # (n, width), out
    sums_ptr,  # (n, UNITS) fp32, sums of earlier tiles
    start,
    width,
    stride,  # from one row of a tile to the next, at least `width`
    scale,
    cap,
    absent,
    FAR: tl.constexpr,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Fold a row into its statistics, write exp(z - shift) (1 - tanh^2), and rescale earlier sums if needed."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    z, softcap_derivative = _logits(product_ptr + row * stride, bias_ptr, columns, width, stride, scale, cap, CAPPED)
    local = tl.load(targets_ptr + row) - start
    is_target = columns == local
    if sum_logits_ptr is not None:
        sum_logits = tl.load(sum_logits_ptr + row) + tl.sum(tl.where(inside, z, 0.0), 0)
        tl.store(sum_logits_ptr + row, sum_logits)
    if max_before_target_ptr is not None:
        before = tl.max(tl.where(inside & (columns < local), z, -float("inf")), 0)
        tl.store(max_before_target_ptr + row, tl.maximum(tl.load(max_before_target_ptr + row), before))
    if (local >= 0) & (local < width):
        tl.store(target_logit_ptr + row, tl.sum(tl.where(is_target, z, 0.0), 0))

    nontarget = tl.where(is_target, absent, tl.where(inside, z, -float("inf")))
    largest = tl.max(nontarget, 0)
    tl.store(max_ptr + row, tl.maximum(tl.load(max_ptr + row), largest))
    old_shift = tl.load(shift_ptr + row)
    shift = tl.where(largest > old_shift + FAR, largest, old_shift)
    shift_change = old_shift - shift
    rescale = tl.exp(shift_change)
    shifted = nontarget - shift
    exponentials = tl.exp(shifted)
    sum_exp = tl.load(sum_exp_ptr + row)
    if sum_shifted_exp_ptr is not None:
        earlier = tl.load(sum_shifted_exp_ptr + row) + shift_change * sum_exp
        weighed = tl.sum(tl.where(inside, shifted, 0.0) * exponentials, 0)
        tl.store(sum_shifted_exp_ptr + row, earlier * rescale + weighed)
    if sum_sq_exp_ptr is not None:
        squares = tl.sum(exponentials * exponentials, 0)
        tl.store(sum_sq_exp_ptr + row, tl.load(sum_sq_exp_ptr + row) * rescale * rescale + squares)
    tl.store(sum_exp_ptr + row, sum_exp * rescale + tl.sum(exponentials, 0))
    tl.store(shift_ptr + row, shift)
    if coefficients_ptr is not None:
        coefficients = (exponentials * softcap_derivative).to(coefficients_ptr.dtype.element_ty)
        tl.store(coefficients_ptr + row * stride + columns, coefficients, mask=columns < stride)
    if sums_ptr is not None:  # noqa: SIM102 (the outer condition is decided at compile time)
        if rescale != 1.0:
            for first in range(0, UNITS, 1024):
                units = first + tl.arange(0, 1024)
                sums = tl.load(sums_ptr + row * UNITS + units, mask=units < UNITS, other=0.0)
                tl.store(sums_ptr + row * UNITS + units, sums * rescale, mask=units < UNITS)


@triton.jit(do_not_specialize=["tokens"])
def finish(
    max_ptr,  # all (N,) fp32
    log_sum_exp_ptr,  # of the exponentials in units of exp(shift)
    target_logit_ptr,
    shift_ptr,  # in and out
    sum_exp_ptr,  # in and out
    sum_shifted_exp_ptr,
    rescale_ptr,  # from here on out
    log_odds_ptr,
    log_probs_ptr,
    entropy_ptr,
    tokens,
    absent,
    BLOCK: tl.constexpr,
):
    """Move the shift to the max, and write log-odds, log-probs and entropy."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    largest = tl.load(max_ptr + rows, mask=inside, other=0.0)
    shift = tl.load(shift_ptr + rows, mask=inside, other=0.0)
    sum_exp = tl.load(sum_exp_ptr + rows, mask=inside, other=1.0)
    log_sum_exp = tl.load(log_sum_exp_ptr + rows, mask=inside, other=0.0)
    target_logit = tl.load(target_logit_ptr + rows, mask=inside, other=0.0)
    rescale = tl.exp(shift - largest)
    tl.store(rescale_ptr + rows, rescale, mask=inside)
    tl.store(sum_exp_ptr + rows, sum_exp * rescale, mask=inside)
    tl.store(shift_ptr + rows, largest, mask=inside)
    at_most = tl.where(target_logit > largest, target_logit, largest)
    log_odds = target_logit - shift - log_sum_exp
    log_odds = tl.where((at_most == float("inf")) | (at_most <= absent), float("nan"), log_odds)
    tl.store(log_odds_ptr + rows, log_odds, mask=inside)
    # log(1 + exp(-|d|)) = 2 artanh(exp(-|d|) / (2 + exp(-|d|))): the series has the precision that log lacks near 1
    decay = tl.exp(-tl.abs(log_odds))
    x = decay / (2 + decay)
    square = x * x
    series = 1 / 9 + square * (1 / 11 + square * (1 / 13 + square * (1 / 15 + square * (1 / 17))))
    series = 1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * series)))
    log1p = 2 * x * series
    log_p = tl.where(log_odds < 0, log_odds, 0.0) - log1p
    tl.store(log_probs_ptr + rows, log_p, mask=inside)
    if entropy_ptr is not None:
        log_q = tl.where(log_odds > 0, -log_odds, 0.0) - log1p
        among_others = log_sum_exp - tl.load(sum_shifted_exp_ptr + rows, mask=inside, other=0.0) / sum_exp
        entropy = tl.exp(log_q) * (among_others - log_q) - tl.exp(log_p) * log_p
        tl.store(entropy_ptr + rows, entropy, mask=inside)


@triton.jit(do_not_specialize=["start"])
def gradient(
    product_ptr,  # (n, width) fp32, rows `stride` apart
    bias_ptr,  # (width,)
    targets_ptr,  # (n,) int64
    maximum_ptr,  # from here on (n,) fp32
    offset_ptr,
    entropy_slope_ptr,
    scale_ptr,
    uniform_grad_ptr,
    scaled_row_factor_ptr,
    scaled_target_ptr,
    nontarget_grad_ptr,  # (n, width), out
    grad_logits_ptr,  # (n, width), out
    start,
    width,
    stride,  # from one row of a tile to the next, at least `width`
    scale,
    cap,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write `nontarget_grad` and `grad_logits` of a row, as `Coefficients` defines them."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    z, softcap_derivative = _logits(product_ptr + row * stride, bias_ptr, columns, width, stride, scale, cap, CAPPED)
    is_target = columns == tl.load(targets_ptr + row) - start
    # The target's logit may be far larger than the others
    shifted = tl.where(is_target, 0.0, tl.where(inside, z - tl.load(maximum_ptr + row), 0.0))
    nontarget_grad = tl.exp(shifted)
    if entropy_slope_ptr is not None:
        nontarget_grad *= shifted * tl.load(entropy_slope_ptr + row) + tl.load(offset_ptr + row)
    if uniform_grad_ptr is not None:
        nontarget_grad = nontarget_grad * tl.load(scale_ptr + row) + tl.load(uniform_grad_ptr + row)
    nontarget_grad *= softcap_derivative
    if nontarget_grad_ptr is not None:
        off_target = tl.where(is_target, 0.0, nontarget_grad).to(nontarget_grad_ptr.dtype.element_ty)
        tl.store(nontarget_grad_ptr + row * stride + columns, off_target, mask=columns < stride)
    if grad_logits_ptr is not None:
        off_target = nontarget_grad * tl.load(scaled_row_factor_ptr + row)
        grad_logits = tl.where(is_target, tl.load(scaled_target_ptr + row), off_target)
        grad_logits = grad_logits.to(grad_logits_ptr.dtype.element_ty)
        tl.store(grad_logits_ptr + row * stride + columns, grad_logits, mask=columns < stride)
