"""Kimi delta attention in plain torch: the specification of the GPU kernels and the CPU path.

Shape legend: T tokens of a pack, N documents, h heads of this rank, d key channels (k in a state), v value
channels, C convolution channels of this rank, W convolution taps, M chunks of a pack, c tokens of a chunk,
b blocks of a chunk, s tokens of a block.

Source: Bailing V3 spec section 2.1; Kimi Linear (arXiv 2510.26692) for the chunked form.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 16
NORM_EPS = 1e-6


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    cu_seqlens: Tensor,
    history_NWC: Tensor | None = None,
    return_history: bool = False,
    lengths: tuple[int, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise causal convolution per document, then SiLU (Bailing V3 spec section 2.1).

    The last tap multiplies the current token.  `history_NWC` [N, W-1, C] holds the raw inputs before each
    document's first token (oldest first), zeros if absent.  Computed in fp32 (fp64 for fp64 inputs), returned
    in x's dtype; with `return_history` also the last W-1 raw inputs of each document, [N, W-1, C].
    `lengths` spares the GPU kernel of this name a device sync; here it is unused.
    """
    T, taps = x_TC.shape[0], weight_CW.shape[1]
    document_T, position_T = _document_positions(cu_seqlens, T)
    x_wide_TC, taps_C = x_TC.to(_wide(x_TC)), weight_CW.to(_wide(x_TC)).t().contiguous().unbind()
    y_TC = x_wide_TC * taps_C[-1]
    for back in range(1, taps):
        shifted_TC = F.pad(x_wide_TC, (0, 0, back, 0))[:T]
        inside_T1 = (position_T >= back).unsqueeze(1)
        if history_NWC is None:
            shifted_TC = shifted_TC.masked_fill(~inside_T1, 0)
        else:
            row_T = (taps - 1 + position_T - back).clamp(max=taps - 2)
            shifted_TC = torch.where(inside_T1, shifted_TC, history_NWC[document_T, row_T].to(shifted_TC))
        y_TC = torch.addcmul(y_TC, shifted_TC, taps_C[-1 - back])
    y_TC = F.silu(y_TC).to(x_TC.dtype)
    if not return_history:
        return y_TC
    return y_TC, last_inputs(x_TC, taps - 1, cu_seqlens, history_NWC)


def _document_positions(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Document index and position inside the document, of each token of the pack; both [T]."""
    token_T = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document_T = torch.searchsorted(cu_seqlens, token_T, right=True) - 1
    return document_T, token_T - cu_seqlens[document_T]


def last_inputs(x_TC: Tensor, rows: int, cu_seqlens: Tensor, history_NWC: Tensor | None) -> Tensor:
    """The last `rows` inputs of each document, reaching into its history when it is shorter; [N, rows, C]."""
    documents, channels = cu_seqlens.shape[0] - 1, x_TC.shape[1]
    if history_NWC is None:
        history_NWC = x_TC.new_zeros(documents, rows, channels)
    length_N1 = (cu_seqlens[1:] - cu_seqlens[:-1]).unsqueeze(1)
    position_NR = length_N1 - rows + torch.arange(rows, device=x_TC.device)
    source_N1 = x_TC.shape[0] + rows * torch.arange(documents, device=x_TC.device).unsqueeze(1)
    row_NR = torch.where(
        position_NR >= 0, cu_seqlens[:-1].unsqueeze(1) + position_NR, source_N1 + rows + position_NR
    )
    return torch.cat([x_TC, history_NWC.reshape(-1, channels).to(x_TC)])[row_NR]


def kda_gate(f_Thd: Tensor, A_log_h: Tensor, dt_bias_hd: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay [T, h, d] in fp32 (Bailing V3 spec section 2.1).

    With a bound: `bound * sigmoid(exp(A_log) * z)`, in (bound, 0); without: `-exp(A_log) * softplus(z)`,
    where `z = f + dt_bias`.
    """
    wide = _wide(f_Thd)
    z_Thd = f_Thd.to(wide) + dt_bias_hd.to(wide)
    rate_h1 = A_log_h.to(wide).exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate_h1 * F.softplus(z_Thd)
    return lower_bound * torch.sigmoid(rate_h1 * z_Thd)


def recurrent_kda(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    log_decay_Thd: Tensor,
    beta_Th: Tensor,
    cu_seqlens: Tensor,
    lengths: tuple[int, ...],
    initial_state_Nhkv: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """KDA token by token, as Bailing V3 spec section 2.1 writes it.  Arguments and results as `chunk_kda`."""
    _check(q_Thd, v_Thv, cu_seqlens, lengths)
    wide = _wide(q_Thd)
    q_wide_Thd, k_wide_Thd = _normalise(q_Thd.to(wide), k_Thd.to(wide))
    v_wide_Thv, decay_Thd, beta_wide_Th = v_Thv.to(wide), log_decay_Thd.to(wide).exp(), beta_Th.to(wide)
    if initial_state_Nhkv is None:
        initial_state_Nhkv = q_wide_Thd.new_zeros(len(lengths), *q_Thd.shape[1:], v_Thv.shape[-1])
    outputs, finals, start = [], [], 0
    for document, length in enumerate(lengths):
        state_hkv = initial_state_Nhkv[document].to(wide)
        for t in range(start, start + length):
            state_hkv = decay_Thd[t].unsqueeze(-1) * state_hkv
            predicted_hv = torch.einsum("hkv,hk->hv", state_hkv, k_wide_Thd[t])
            update_hv = beta_wide_Th[t].unsqueeze(-1) * (v_wide_Thv[t] - predicted_hv)
            state_hkv = state_hkv + k_wide_Thd[t].unsqueeze(-1) * update_hv.unsqueeze(-2)
            outputs.append(torch.einsum("hkv,hk->hv", state_hkv, q_wide_Thd[t]))
        finals.append(state_hkv)
        start += length
    o_Thv = torch.stack(outputs) if outputs else v_wide_Thv
    return o_Thv.to(q_Thd.dtype), torch.stack(finals) if output_final_state else None


def chunk_kda(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    log_decay_Thd: Tensor,
    beta_Th: Tensor,
    cu_seqlens: Tensor,
    lengths: tuple[int, ...],
    initial_state_Nhkv: Tensor | None = None,
    output_final_state: bool = False,
    bounded_decay: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule per document of a pack: outputs [T, h, v] in q's dtype, final states [N, h, k, v].

    q and k are L2-normalised here and q is scaled by d^-1/2; beta is after its sigmoid.  `lengths` are the
    document lengths in tokens on the host (they sum to T; zero is allowed), so that nothing waits for the
    device; `cu_seqlens` says the same on the device.  States and arithmetic are fp32 (fp64 for fp64 q).
    `bounded_decay` promises log decays in [-5, 0]: the GPU kernel of this name is then faster; unused here.

    Bailing V3 spec section 2.1, in chunks: with the decay products of a chunk, the updates u of its tokens
    solve a unit triangular system, and the state is read and written once per chunk.
    """
    _check(q_Thd, v_Thv, cu_seqlens, lengths)
    wide = _wide(q_Thd)
    plan = _chunk_plan(lengths, CHUNK_TOKENS, q_Thd.device)
    q_wide_Thd, k_wide_Thd = _normalise(q_Thd.to(wide), k_Thd.to(wide))
    q_Mhcd, k_Mhcd, log_decay_Mhcd = (
        _to_chunks(x, plan) for x in (q_wide_Thd, k_wide_Thd, log_decay_Thd.to(wide))
    )
    v_Mhcv, beta_Mhc1 = _to_chunks(v_Thv.to(wide), plan), _to_chunks(beta_Th.to(wide).unsqueeze(-1), plan)

    products = _decay_products(q_Mhcd, k_Mhcd, log_decay_Mhcd.exp())
    right_side = torch.cat([v_Mhcv, k_Mhcd * products.from_start_Mhcd], -1)
    solved = torch.linalg.solve_triangular(
        beta_Mhc1 * products.k_scores_Mhcc, beta_Mhc1 * right_side, upper=False, unitriangular=True
    )
    # u = u_fresh - u_state @ state: what the chunk writes, as a function of the state it starts from.
    u_fresh_Mhcv, u_state_Mhcd = solved.split([v_Thv.shape[-1], q_Thd.shape[-1]], -1)

    state_Nhkv = initial_state_Nhkv
    if state_Nhkv is None:
        state_Nhkv = q_wide_Thd.new_zeros(len(lengths), *q_Thd.shape[1:], v_Thv.shape[-1])
    chunks = (
        u_fresh_Mhcv,
        u_state_Mhcd,
        q_Mhcd * products.from_start_Mhcd,
        products.q_scores_Mhcc,
        (k_Mhcd * products.to_end_Mhcd).transpose(-1, -2),
        products.whole_Mhd.unsqueeze(-1),
    )
    o_Mhcv, final_Nhkv = _scan(chunks, state_Nhkv.to(wide), plan)
    o_Thv = _from_chunks(o_Mhcv, plan)
    return o_Thv.to(q_Thd.dtype), final_Nhkv if output_final_state else None


def gated_chunk_kda(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    f_Thd: Tensor,
    beta_Th: Tensor,
    A_log_h: Tensor,
    dt_bias_hd: Tensor,
    lower_bound: float | None,
    cu_seqlens: Tensor,
    lengths: tuple[int, ...],
) -> Tensor:
    """`chunk_kda` of `kda_gate`'s decays and sigmoid(beta), from the raw projections; [T, h, v]."""
    log_decay_Thd = kda_gate(f_Thd, A_log_h, dt_bias_hd, lower_bound)
    beta_Th = beta_Th.to(_wide(beta_Th)).sigmoid()
    return chunk_kda(q_Thd, k_Thd, v_Thv, log_decay_Thd, beta_Th, cu_seqlens, lengths)[0]


class _DecayProducts(NamedTuple):
    """Decays and decayed dot products of each chunk.  `scores[i, j]` weighs token j's update at token i."""

    q_scores_Mhcc: Tensor  # q_i . diag(decay of tokens j+1..i) k_j, for j <= i
    k_scores_Mhcc: Tensor  # the same with k_i, for j < i
    from_start_Mhcd: Tensor  # decay of tokens 0..i
    to_end_Mhcd: Tensor  # decay of tokens i+1..c-1
    whole_Mhd: Tensor  # decay of all tokens


def _decay_products(q_Mhcd: Tensor, k_Mhcd: Tensor, decay_Mhcd: Tensor) -> _DecayProducts:
    """Build the decayed products from blocks of one token by joining neighbours until a block is a chunk.

    Across the border of two joined blocks the decay of tokens j+1..i is (to the end of the left block) times
    (from the start of the right block).  So scores are matrix products of factors in (0, 1]: no pairwise
    [c, c, d] tensor, no difference of cumulative sums, and no overflow whatever the gate.
    """
    M, h, chunk, d = q_Mhcd.shape
    from_start, to_end, whole = (
        decay_Mhcd.unsqueeze(-2),
        torch.ones_like(decay_Mhcd).unsqueeze(-2),
        decay_Mhcd,
    )
    q_scores = (q_Mhcd * k_Mhcd).sum(-1)[..., None, None]
    k_scores = torch.zeros_like(q_scores)
    block = 1
    while block < chunk:
        pairs = (M, h, chunk // (2 * block), 2, block)
        q_right, (k_left, k_right) = q_Mhcd.view(*pairs, d)[..., 1, :, :], k_Mhcd.view(*pairs, d).unbind(-3)
        start_left, start_right = from_start.view(*pairs, d).unbind(-3)
        end_left, end_right = to_end.view(*pairs, d).unbind(-3)
        whole_left, whole_right = whole.view(*pairs[:-1], d).unbind(-2)
        rows = torch.cat([q_right * start_right, k_right * start_right], -2)
        q_cross, k_cross = (rows @ (k_left * end_left).transpose(-1, -2)).split(block, -2)
        q_scores, k_scores = _join(q_scores, q_cross), _join(k_scores, k_cross)
        from_start = torch.cat([start_left, whole_left.unsqueeze(-2) * start_right], -2)
        to_end = torch.cat([end_left * whole_right.unsqueeze(-2), end_right], -2)
        whole = whole_left * whole_right
        block *= 2
    return _DecayProducts(
        q_scores.squeeze(2), k_scores.squeeze(2), from_start.squeeze(2), to_end.squeeze(2), whole.squeeze(2)
    )


def _join(scores_Mhbss: Tensor, cross: Tensor) -> Tensor:
    """Lower-triangular scores of twice the block size: neighbours on the diagonal, `cross` below it."""
    M, h, blocks, block, _ = scores_Mhbss.shape
    left, right = scores_Mhbss.view(M, h, blocks // 2, 2, block, block).unbind(3)
    return torch.cat([F.pad(left, (0, block)), torch.cat([cross, right], -1)], -2)


def _scan(chunks: tuple[Tensor, ...], state_Nhkv: Tensor, plan: "_ChunkPlan") -> tuple[Tensor, Tensor]:
    """Carry the states through the chunks, all documents that still have one in a single batch per step."""
    state, finished, outputs = state_Nhkv[plan.order_N], [], []
    # One split, not a slice per step: the backward of a slice fills a zero tensor as large as all chunks.
    steps = zip(*(x.split(plan.active_documents) for x in chunks), strict=True)
    for u_fresh, u_state, q_decayed, q_scores, k_decayed, whole in steps:
        if u_fresh.shape[0] < state.shape[0]:
            finished.append(state[u_fresh.shape[0] :])
            state = state[: u_fresh.shape[0]]
        u = u_fresh - u_state @ state
        outputs.append(q_decayed @ state + q_scores @ u)
        state = whole * state + k_decayed @ u
    finished.append(state)
    return torch.cat(outputs), torch.cat(finished[::-1])[plan.rank_N]


class _ChunkPlan(NamedTuple):
    """Where each token sits in the chunks: these go by index in the document, then longest document first."""

    slot_T: Tensor  # token -> row of the flattened [M * c] chunks
    token_S: Tensor  # row -> token, or T for padding
    order_N: Tensor  # documents, longest first
    rank_N: Tensor  # its inverse
    active_documents: tuple[int, ...]  # documents that have a chunk of this index


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a cached inference tensor could not be saved for a later backward
def _chunk_plan(lengths: tuple[int, ...], chunk: int, device: torch.device) -> _ChunkPlan:
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    start_N = torch.tensor([0, *lengths]).cumsum(0)
    counts = [-(-lengths[n] // chunk) for n in order]
    # A pack of no tokens still makes one (empty) step, so that its output is a function of all inputs.
    active = tuple(sum(count > index for count in counts) for index in range(max([1, *counts])))
    first = [
        (start_N[n] + index * chunk, start_N[n + 1]) for index, a in enumerate(active) for n in order[:a]
    ]
    tokens = sum(lengths)
    begin_M1, end_M1 = torch.tensor(first, dtype=torch.long).view(-1, 2, 1).unbind(1)
    token_Mc = begin_M1 + torch.arange(chunk)
    token_S = token_Mc.where(token_Mc < end_M1, tokens).flatten()
    slot_T = token_S.argsort(stable=True)[:tokens]
    order_N = torch.tensor(order, dtype=torch.long)
    return _ChunkPlan(*(x.to(device) for x in (slot_T, token_S, order_N, order_N.argsort())), active)


class _TakeRows(torch.autograd.Function):
    """Rows of x by index, zeros where the index is len(x).

    No row is taken twice, so that the gradient is the same operation with the inverse index: much faster on
    a CPU than accumulating by index.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return F.pad(x, (0, 0, 0, 1)).index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return _TakeRows.apply(grad, inverse, index), None, None


def _to_chunks(x_Thd: Tensor, plan: _ChunkPlan) -> Tensor:
    h, d = x_Thd.shape[1:]
    rows = _TakeRows.apply(x_Thd.reshape(-1, h * d), plan.token_S, plan.slot_T)
    return rows.view(-1, CHUNK_TOKENS, h, d).transpose(1, 2).contiguous()


def _from_chunks(x_Mhcv: Tensor, plan: _ChunkPlan) -> Tensor:
    _, h, _, v = x_Mhcv.shape
    rows = x_Mhcv.transpose(1, 2).reshape(-1, h * v)
    return _TakeRows.apply(rows, plan.slot_T, plan.token_S).view(-1, h, v)


def _normalise(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def _check(q_Thd: Tensor, v_Thv: Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]) -> None:
    assert sum(lengths) == q_Thd.shape[0] == v_Thv.shape[0], (
        f"lengths sum to {sum(lengths)}, T is {q_Thd.shape[0]}"
    )
    assert cu_seqlens.shape == (len(lengths) + 1,), (
        f"cu_seqlens {tuple(cu_seqlens.shape)}, {len(lengths)} documents"
    )
