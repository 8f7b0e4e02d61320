"""What a token brings to delta attention before it meets the state: convolution, norms, gates.

Shape legend: as kernels.reference.kda_verify.

Source: Bailing V3 spec section 2.1.
"""

import triton
import triton.language as tl


@triton.jit
def _convolve(
    projected,
    window,
    conv,
    s_S1,
    channel_1D,
    live_S1,
    TAPS: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
):
    """SiLU of the convolution at each token, rounded to the inputs' dtype, in fp32: [S, D]."""
    y_SD = tl.zeros([s_S1.shape[0], channel_1D.shape[1]], tl.float32)
    for tap in tl.static_range(TAPS):
        j_S1 = s_S1 + tap
        held_SD = tl.load(window + j_S1 * X + channel_1D, mask=live_S1 & (j_S1 < TAPS - 1), other=0.0)
        fed_S1 = live_S1 & (j_S1 >= TAPS - 1)
        fed_SD = tl.load(projected + (j_S1 - (TAPS - 1)) * Y + channel_1D, mask=fed_S1, other=0.0)
        weight_1D = tl.load(conv + channel_1D * TAPS + tap).to(tl.float32)
        y_SD += tl.where(fed_S1, fed_SD.to(tl.float32), held_SD.to(tl.float32)) * weight_1D
    return (y_SD * tl.sigmoid(y_SD)).to(projected.dtype.element_ty).to(tl.float32)


@triton.jit
def _advance(
    projected,
    window,
    target,
    channel_1D,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
):
    """Write the next window: TAPS - 1 inputs of history, then those of the S tokens."""
    j_w1 = tl.arange(0, ROWS)[:, None]
    held_w1, fed_w1 = j_w1 < TAPS - 1, (j_w1 >= TAPS - 1) & (j_w1 < TAPS - 1 + S)
    held_wD = tl.load(window + j_w1 * X + channel_1D, mask=held_w1, other=0.0)
    fed_wD = tl.load(projected + (j_w1 - (TAPS - 1)) * Y + channel_1D, mask=fed_w1, other=0.0)
    tl.store(target + j_w1 * X + channel_1D, tl.where(fed_w1, fed_wD, held_wD), mask=held_w1 | fed_w1)


@triton.jit
def _decay(z, rate, lower_bound, BOUNDED: tl.constexpr):
    if BOUNDED:
        log_decay = lower_bound * tl.sigmoid(rate * z)
    else:
        # What log(1 + e) loses of a small e is less than exp() rounds away below.
        softplus = tl.where(z > 20.0, z, tl.log(1.0 + tl.exp(tl.minimum(z, 20.0))))
        log_decay = -rate * softplus
    return tl.exp(log_decay)


@triton.jit
def prepare(
    q_RhD,
    v_RhV,
    kq_Rh,
    projected,
    conv,
    A_log,
    dt_bias,
    window,
    decay,
    key,
    count_N,
    parity_N,
    slots_n,
    window_stride,
    key_stride,
    lower_bound,
    unit_eps,
    program,
    h: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    TAPS: tl.constexpr,
    BOUNDED: tl.constexpr,
    S_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
):
    """One head of one row: its tokens side by side, and its next window.

    Keys and decays go where they are recorded; q, v and the products of k and q to buffers of the step.
    """
    row = (program // h).to(tl.int64)
    head = program % h
    X: tl.constexpr = h * (2 * D + V)
    Y: tl.constexpr = X + h * (D + V) + h
    slot = tl.load(slots_n + row).to(tl.int64)
    parity = tl.load(parity_N + slot).to(tl.int64)
    window_slot = slot * ((TAPS - 1 + T) * X)
    source = window + parity * window_stride + window_slot + tl.load(count_N + slot) * X
    target = window + (1 - parity) * window_stride + window_slot
    record = (1 - parity) * key_stride + (slot * T * h + head) * D
    projected += row * (S * Y)
    s_S1 = tl.arange(0, S_PAD)[:, None]
    live_S1 = s_S1 < S
    ids_1D, ids_1V = tl.arange(0, D)[None, :], tl.arange(0, V)[None, :]
    q_1D, k_1D, v_1V = head * D + ids_1D, (h + head) * D + ids_1D, 2 * h * D + head * V + ids_1V
    q_SD = _convolve(projected, source, conv, s_S1, q_1D, live_S1, TAPS, X, Y)
    k_SD = _convolve(projected, source, conv, s_S1, k_1D, live_S1, TAPS, X, Y)
    v_SV = _convolve(projected, source, conv, s_S1, v_1V, live_S1, TAPS, X, Y)
    f_SD = tl.load(projected + s_S1 * Y + X + q_1D, mask=live_S1, other=0.0).to(tl.float32)
    bias_1D = tl.load(dt_bias + q_1D).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    q_SD = q_SD * (tl.rsqrt(tl.sum(q_SD * q_SD, axis=1) + unit_eps) * (D**-0.5))[:, None]
    k_SD = k_SD * tl.rsqrt(tl.sum(k_SD * k_SD, axis=1) + unit_eps)[:, None]
    kq_S1 = tl.sum(q_SD * k_SD, axis=1)[:, None]
    decay_SD = _decay(f_SD + bias_1D, rate, lower_bound, BOUNDED)
    first = row * S * h + head
    tl.store(q_RhD + first * D + s_S1 * (h * D) + ids_1D, q_SD, mask=live_S1)
    tl.store(v_RhV + first * V + s_S1 * (h * V) + ids_1V, v_SV, mask=live_S1)
    tl.store(kq_Rh + first + s_S1 * h, kq_S1, mask=live_S1)
    tl.store(key + record + s_S1 * (h * D) + ids_1D, k_SD, mask=live_S1)
    tl.store(decay + record + s_S1 * (h * D) + ids_1D, decay_SD, mask=live_S1)
    _advance(projected, source, target, q_1D, S, W_PAD, TAPS, X, Y)
    _advance(projected, source, target, k_1D, S, W_PAD, TAPS, X, Y)
    _advance(projected, source, target, v_1V, S, W_PAD, TAPS, X, Y)
