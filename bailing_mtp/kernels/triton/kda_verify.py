"""Kimi delta attention of one decode step with deferred commit.

The state is read once, replayed, and written once; the step's own tokens run from registers. Few rows: one
launch, a program per head of a row. Many: the tokens' part, the state in tiles of its values, and the gated
norm are launches of their own, so that nothing waits while it holds a state. In both, a program writes no
record or window that another still replays: those go to the other buffer.

Shape legend: as kernels.reference.kda_verify; c chunks of the key axis, j keys of a chunk. The state is laid
out [c, V, j] in registers, so that most of a sum over keys stays within one thread.

Source: Bailing V3 spec section 2.1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bailing_mtp.kernels.reference.kda import NORM_EPS
from bailing_mtp.kernels.reference.kda_verify import KdaLayerMemory
from bailing_mtp.kernels.triton.kda_tokens import prepare

CHUNK = 32
"""Keys of a chunk: 128 bytes of a state row, read by 8 lanes."""
FUSED_PROGRAMS = 512
"""Heads of all rows up to which one launch is fastest for several tokens; for one token it always is."""
V_TILE = 64


@triton.jit
def _prepare(
    q_RhD, v_RhV, kq_Rh, projected, conv, A_log, dt_bias, window, decay, key, count_N, parity_N, slots_n,
    window_stride, key_stride, lower_bound, unit_eps,
    h: tl.constexpr, D: tl.constexpr, V: tl.constexpr, S: tl.constexpr, T: tl.constexpr, TAPS: tl.constexpr,
    BOUNDED: tl.constexpr, S_PAD: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    prepare(
        q_RhD, v_RhV, kq_Rh, projected, conv, A_log, dt_bias, window, decay, key, count_N, parity_N, slots_n,
        window_stride, key_stride, lower_bound, unit_eps, tl.program_id(0),
        h, D, V, S, T, TAPS, BOUNDED, S_PAD, W_PAD,
    )  # fmt: skip


@triton.jit
def _over_keys(x_cVj):
    return tl.sum(tl.sum(x_cVj, axis=0), axis=1)


@triton.jit
def _vectors(decay, key, q_RhD, v_RhV, key_target, first, ids_cj, ids_V, h: tl.constexpr, D: tl.constexpr,
             V: tl.constexpr, s: tl.constexpr):  # fmt: skip
    """Decay, key, query and value of token s, as prepare() left them."""
    decay_cj = tl.load(decay + key_target + s * h * D)
    k_cj = tl.load(key + key_target + s * h * D)
    q_cj = tl.load(q_RhD + (first + s * h) * D + ids_cj)
    v_V = tl.load(v_RhV + (first + s * h) * V + ids_V)
    return decay_cj, k_cj, q_cj, v_V


@triton.jit
def _kda_verify(
    out, q_RhD, v_RhV, kq_Rh, projected, conv, A_log, dt_bias, o_norm, state, window, decay, key, update,
    count_N, parity_N, slots_n, window_stride, key_stride, update_stride, lower_bound, norm_eps, unit_eps,
    h: tl.constexpr, D: tl.constexpr, V: tl.constexpr, S: tl.constexpr, T: tl.constexpr, TAPS: tl.constexpr,
    BOUNDED: tl.constexpr, S_PAD: tl.constexpr, W_PAD: tl.constexpr, CHUNK: tl.constexpr, V_TILE: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """FUSED: the whole of a head; `out` is the result. Else V_TILE values of it; `out` is [R, h, V] in fp32."""
    program = tl.program_id(0)
    row = (program // h).to(tl.int64)
    head = program % h
    slot = tl.load(slots_n + row).to(tl.int64)
    count = tl.load(count_N + slot)
    parity = tl.load(parity_N + slot).to(tl.int64)
    ids_cj = tl.arange(0, D // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    ids_V = tl.program_id(1) * V_TILE + tl.arange(0, V_TILE)
    state += (slot * h + head) * (V * D) + ids_V[None, :, None] * D + ids_cj[:, None, :]
    # Lanes are dealt along axes by their contiguity, ties differently from release to release. Those that one
    # chunk leaves over must go to further values, not to its other chunks: a sum would take 7 times the shuffles.
    state = tl.max_contiguous(state, [1, 2, CHUNK])
    state_cVj = tl.load(state)
    if FUSED:
        prepare(
            q_RhD, v_RhV, kq_Rh, projected, conv, A_log, dt_bias, window, decay, key, count_N, parity_N, slots_n,
            window_stride, key_stride, lower_bound, unit_eps, program,
            h, D, V, S, T, TAPS, BOUNDED, S_PAD, W_PAD,
        )  # fmt: skip
        # What prepare() wrote is read below by other threads of this program.
        tl.debug_barrier()
    key_target = (1 - parity) * key_stride + (slot * T * h + head) * D + ids_cj
    first = row * S * h + head
    # A token's vectors are fetched under the one before, the first's under the state; not where a program holds
    # so much of a state that there are no registers for them.
    AHEAD: tl.constexpr = S == 1 or not FUSED
    if AHEAD:
        decay_cj, k_cj, q_cj, v_V = _vectors(decay, key, q_RhD, v_RhV, key_target, first, ids_cj, ids_V, h, D, V, 0)

    key_source = parity * key_stride + (slot * T * h + head) * D + ids_cj
    update_source = parity * update_stride + (slot * T * h + head) * V + ids_V
    for t in tl.static_range(T):
        live = t < count
        old_decay_cj = tl.load(decay + key_source + t * h * D, mask=live, other=1.0)
        old_k_cj = tl.load(key + key_source + t * h * D, mask=live, other=0.0)
        update_V = tl.load(update + update_source + t * h * V, mask=live, other=0.0)
        state_cVj = state_cVj * old_decay_cj[:, None, :] + update_V[None, :, None] * old_k_cj[:, None, :]
    tl.store(state, state_cVj)
    update_target = (1 - parity) * update_stride + (slot * T * h + head) * V + ids_V
    X: tl.constexpr = h * (2 * D + V)
    Y: tl.constexpr = X + h * (D + V) + h
    updates, outputs = (), ()
    for s in tl.static_range(S):
        if not AHEAD:
            decay_cj, k_cj, q_cj, v_V = _vectors(
                decay, key, q_RhD, v_RhV, key_target, first, ids_cj, ids_V, h, D, V, s
            )
        this_decay_cj, this_k_cj, this_q_cj, this_v_V = decay_cj, k_cj, q_cj, v_V
        if AHEAD and s + 1 < S:
            decay_cj, k_cj, q_cj, v_V = _vectors(
                decay, key, q_RhD, v_RhV, key_target, first, ids_cj, ids_V, h, D, V, s + 1
            )
        beta = tl.sigmoid(tl.load(projected + (row * S + s) * Y + X + h * (D + V) + head).to(tl.float32))
        state_cVj = state_cVj * this_decay_cj[:, None, :]
        # Both sums over keys read the state before the update, so that neither waits for the other.
        update_V = beta * (this_v_V - _over_keys(state_cVj * this_k_cj[:, None, :]))
        before_V = _over_keys(state_cVj * this_q_cj[:, None, :])
        outputs = outputs + (before_V + update_V * tl.load(kq_Rh + first + s * h),)
        updates = updates + (update_V,)
        if s + 1 < S:
            state_cVj += update_V[None, :, None] * this_k_cj[:, None, :]
    for s in tl.static_range(S):
        o_V = outputs[s]
        if FUSED:
            gate_V = tl.load(projected + (row * S + s) * Y + X + h * D + head * V + ids_V).to(tl.float32)
            norm_V = tl.load(o_norm + ids_V).to(tl.float32)
            o_V = o_V * tl.rsqrt(tl.sum(o_V * o_V, axis=0) / V + norm_eps) * norm_V * tl.sigmoid(gate_V)
        tl.store(update + update_target + s * h * V, updates[s])
        tl.store(out + (first + s * h) * V + ids_V, o_V.to(out.dtype.element_ty))


@triton.jit
def _gated_norm(
    out,
    o_RhV,
    projected,
    o_norm,
    norm_eps,
    h: tl.constexpr,
    V: tl.constexpr,
    Y: tl.constexpr,
    GATE: tl.constexpr,
    H_TILE: tl.constexpr,
):
    """The norm of each head's output, times its gate; the gates are columns GATE and on of `projected`."""
    row = tl.program_id(0).to(tl.int64)
    ids_h1 = tl.program_id(1) * H_TILE + tl.arange(0, H_TILE)[:, None]
    places_hV = ids_h1 * V + tl.arange(0, V)[None, :]
    o_hV = tl.load(o_RhV + row * (h * V) + places_hV, mask=ids_h1 < h, other=0.0)
    gate_hV = tl.load(projected + row * Y + GATE + places_hV, mask=ids_h1 < h, other=0.0).to(tl.float32)
    norm_V = tl.load(o_norm + tl.arange(0, V)).to(tl.float32)
    o_hV = o_hV * tl.rsqrt(tl.sum(o_hV * o_hV, axis=1) / V + norm_eps)[:, None]
    o_hV = o_hV * norm_V[None, :] * tl.sigmoid(gate_hV)
    tl.store(out + row * (h * V) + places_hV, o_hV.to(out.dtype.element_ty), mask=ids_h1 < h)


def _options(programs: int, tokens: int, state_values: int, fused: bool) -> dict[str, int]:
    """Launch options of _kda_verify for programs that hold `state_values` of a state each."""
    warps = 8 if fused else 4
    if fused and programs > 64:
        # Two programs to a multiprocessor, one's loads under the other's arithmetic.
        if tokens > 1 and state_values == 128 * 128:
            return {"num_warps": warps, "maxnreg": 128}
        warps = 4
    if not fused and state_values == V_TILE * 128:
        # Three programs to a multiprocessor.
        return {"num_warps": warps, "maxnreg": 168}
    return {"num_warps": max(1, min(warps, state_values // 512))}


def kda_verify(
    projected_RY: Tensor,
    conv_XW: Tensor,
    A_log_h: Tensor,
    dt_bias_hD: Tensor,
    o_norm_V: Tensor,
    memory: KdaLayerMemory,
    count_N: Tensor,
    parity_N: Tensor,
    slots_n: Tensor,
    n_tokens: int,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """As kernels.reference.kda_verify.kda_verify. Head sizes are powers of two."""
    h, D, V = (*A_log_h.shape, dt_bias_hD.shape[1], o_norm_V.shape[0])
    if D & (D - 1) or V & (V - 1):
        raise ValueError(f"head sizes {D} and {V}: the Triton kernel takes powers of two")
    (R, Y), (N, T), W = projected_RY.shape, memory.decay_2NThD.shape[1:3], conv_XW.shape[1]
    assert n_tokens <= T and projected_RY.is_contiguous() and conv_XW.is_contiguous()
    assert memory.window_2NwX.dtype == projected_RY.dtype and count_N.shape == (N,)
    assert memory.state_NhVD.is_contiguous() and all(field[0].is_contiguous() for field in memory[1:])
    state, window, decay, key, update = memory
    fused, device = n_tokens == 1 or slots_n.shape[0] * h <= FUSED_PROGRAMS, projected_RY.device
    out_Rx = torch.empty(R, h * V, dtype=projected_RY.dtype, device=device)
    q_RhD, v_RhV, kq_Rh = (torch.empty(R, h, x, dtype=torch.float32, device=device) for x in (D, V, 1))
    o_RhV = out_Rx if fused else torch.empty(R, h, V, dtype=torch.float32, device=device)
    bound = 0.0 if lower_bound is None else lower_bound
    pads = {"S_PAD": triton.next_power_of_2(n_tokens), "W_PAD": triton.next_power_of_2(W - 1 + n_tokens)}
    sizes = {
        "h": h,
        "D": D,
        "V": V,
        "S": n_tokens,
        "T": T,
        "TAPS": W,
        "BOUNDED": lower_bound is not None,
    } | pads
    weights = (projected_RY, conv_XW, A_log_h, dt_bias_hD)
    where = (count_N, parity_N, slots_n, window.stride(0), key.stride(0))
    programs, tile = slots_n.shape[0] * h, V if fused else min(V, V_TILE)
    if not fused:
        _prepare[(programs,)](
            q_RhD, v_RhV, kq_Rh, *weights, window, decay, key, *where, bound, NORM_EPS, **sizes, num_warps=4
        )
    _kda_verify[(programs, V // tile)](
        o_RhV, q_RhD, v_RhV, kq_Rh, *weights, o_norm_V, *memory, *where, update.stride(0), bound, norm_eps, NORM_EPS,
        **sizes, CHUNK=min(CHUNK, D), V_TILE=tile, FUSED=fused, **_options(programs, n_tokens, tile * D, fused),
    )  # fmt: skip
    if not fused:
        heads = min(4, triton.next_power_of_2(h))
        _gated_norm[(R, triton.cdiv(h, heads))](
            out_Rx, o_RhV, projected_RY, o_norm_V, norm_eps, h=h, V=V, Y=Y, GATE=Y - h - h * V, H_TILE=heads
        )
    return out_Rx
