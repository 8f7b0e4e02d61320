"""Causal attention inside the documents of a pack on a GPU, by torch's own fused kernels.

Names, signatures and shape legend are those of the torch twin, `bailing_mtp.kernels.reference.attention`. Inputs
that the fused kernels do not take (fp32, the CPU, an empty pack) go to the twin.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from bailing_mtp.kernels.reference import attention as reference

FUSED_DTYPES = (torch.bfloat16, torch.float16)
EQUAL_LENGTHS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Of these cuDNN's is the fastest for heads of 192 and 128, but it plans anew for every length."""


def packed_causal_attention(
    q_Qhd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    query_lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """As the twin, which keeps every score; documents of one length are a batch, others go as they lie."""
    if not _takes(q_Qhd):
        return reference.packed_causal_attention(q_Qhd, k_Thd, v_Thv, lengths, scale, query_lengths=query_lengths)
    asking = lengths if query_lengths is None else query_lengths
    _check(q_Qhd, k_Thd, lengths, asking)
    if len(set(lengths)) > 1 or asking != lengths:
        return _Varlen.apply((lengths, asking), scale, q_Qhd, k_Thd, v_Thv)
    q_nhld, k_nhld, v_nhlv = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q_Qhd, k_Thd, v_Thv))
    with sdpa_kernel(EQUAL_LENGTHS, set_priority=True):
        o_nhlv = F.scaled_dot_product_attention(q_nhld, k_nhld, v_nhlv, is_causal=True, scale=scale)
    return o_nhlv.transpose(1, 2).flatten(0, 1)


def chained_causal_attention(
    q_Qhd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    chain: tuple[tuple[Tensor, Tensor], ...],
    lengths: tuple[int, ...],
    scale: float,
    query_lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """As the twin, without holding scores."""
    if not chain:
        return packed_causal_attention(q_Qhd, k_Thd, v_Thv, lengths, scale, query_lengths)
    if not _takes(q_Qhd):
        return reference.chained_causal_attention(q_Qhd, k_Thd, v_Thv, chain, lengths, scale, query_lengths)
    asking = lengths if query_lengths is None else query_lengths
    _check(q_Qhd, k_Thd, lengths, asking)
    return _Varlen.apply((lengths, asking), scale, q_Qhd, k_Thd, v_Thv, *(x for row in chain for x in row))


def _check(q_Qhd: Tensor, k_Thd: Tensor, lengths: tuple[int, ...], asking: tuple[int, ...]) -> None:
    sums, rows = (sum(asking), sum(lengths)), (q_Qhd.shape[0], k_Thd.shape[0])
    assert sums == rows, f"lengths of queries and keys sum to {sums}, there are {rows}"


def _takes(q_Thd: Tensor) -> bool:
    return q_Thd.is_cuda and q_Thd.dtype in FUSED_DTYPES and q_Thd.shape[0] > 0


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a cached inference tensor could not be used in a later backward
def document_bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 prefix sums [N+1]; made once for all layers, and without waiting for the device."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # From pageable memory the copy would wait for all queued work.
    return bounds.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else bounds.to(device)


class _Varlen(torch.autograd.Function):
    """torch's flash attention over documents as they lie, joined with the rows of a chain, if there are any.

    The kernel wants one head size, so values are padded to the keys'. Its backward is called with the *joined*
    output and log-sum-exp, as in ring attention: then weights, and the share of each part, are those of the one
    softmax (see the twin).
    """

    @staticmethod
    def forward(
        ctx: Any,
        both: tuple[tuple[int, ...], tuple[int, ...]],
        scale: float,
        q_Qhd: Tensor,
        k_Thd: Tensor,
        v_Thv: Tensor,
        *chain: Tensor,
    ) -> Tensor:
        # The kernel aligns its causal mask to the last key of each document.
        lengths, asking = both
        bounds = tuple(document_bounds(x, q_Qhd.device) for x in (asking, lengths))
        longest, n_values = (max(asking), max(lengths)), v_Thv.shape[-1]
        q_Qhd, k_Thd, padded_Thd = q_Qhd.contiguous(), k_Thd.contiguous(), _padded(v_Thv, q_Qhd.shape[-1])
        o_Qhd, lse_hQ, *seeds = torch.ops.aten._flash_attention_forward(
            q_Qhd, k_Thd, padded_Thd, *bounds, *longest, 0.0, True, False, scale=scale
        )
        o_Qhv = o_Qhd[..., :n_values]
        if chain:
            o_Qhv, lse_hQ = _join(o_Qhv, lse_hQ, q_Qhd, chain, scale)
        ctx.scale, ctx.longest = scale, longest
        ctx.save_for_backward(q_Qhd, k_Thd, v_Thv, o_Qhv, lse_hQ, *bounds, seeds[0], seeds[1], *chain)
        return o_Qhv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Qhv: Tensor) -> tuple[Tensor | None, ...]:
        q_Qhd, k_Thd, v_Thv, o_Qhv, lse_hQ, q_bounds, k_bounds, seed, offset, *chain = ctx.saved_tensors
        d, n_values = q_Qhd.shape[-1], v_Thv.shape[-1]
        q_grad, k_grad, padded_grad = torch.ops.aten._flash_attention_backward(
            _padded(grad_Qhv, d), q_Qhd, k_Thd, _padded(v_Thv, d), _padded(o_Qhv, d), lse_hQ, q_bounds, k_bounds,
            *ctx.longest, 0.0, True, seed, offset, scale=ctx.scale,
        )  # fmt: skip
        v_grad = padded_grad[..., :n_values]
        if not chain:
            return None, None, q_grad, k_grad, v_grad
        q, grad, lse_Qh = q_Qhd.float(), grad_Qhv.float(), lse_hQ.t()
        shared_Qh1 = (grad * o_Qhv.float()).sum(-1, keepdim=True)
        q_total, chain_grads = q_grad.float(), []
        for key, value in zip(chain[::2], chain[1::2], strict=True):
            weight_Qh1 = torch.exp((q * key).sum(-1) * ctx.scale - lse_Qh).unsqueeze(-1)
            score_grad_Qh1 = weight_Qh1 * ((grad * value).sum(-1, keepdim=True) - shared_Qh1) * ctx.scale
            q_total += score_grad_Qh1 * key
            chain_grads += [(score_grad_Qh1 * q).to(key.dtype), (weight_Qh1 * grad).to(value.dtype)]
        return None, None, q_total.to(q_Qhd.dtype), k_grad, v_grad, *chain_grads


def _padded(x_Thv: Tensor, size: int) -> Tensor:
    missing = size - x_Thv.shape[-1]
    assert missing >= 0, "values are at most as wide as keys"
    return F.pad(x_Thv, (0, missing)) if missing else x_Thv.contiguous()


def _join(
    o_Qhv: Tensor, lse_hQ: Tensor, q_Qhd: Tensor, chain: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the documents' keys and the chain's rows together."""
    q, keys, values = q_Qhd.float(), chain[::2], chain[1::2]
    scores = [(q * key).sum(-1) * scale for key in keys]
    own_lse_Qh = lse_hQ.t()
    lse_Qh = torch.stack((own_lse_Qh, *scores)).logsumexp(0)
    joined = o_Qhv.float() * torch.exp(own_lse_Qh - lse_Qh).unsqueeze(-1)
    for score_Qh, value in zip(scores, values, strict=True):
        joined += torch.exp(score_Qh - lse_Qh).unsqueeze(-1) * value
    return joined.to(o_Qhv.dtype), lse_Qh.t().contiguous()
