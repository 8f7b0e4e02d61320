"""Causal attention inside the documents of a pack by the flash-attn package, which importing this module needs.

Names, signatures and shape legend are those of `bailing_mtp.kernels.attention`.
"""

import torch.nn.functional as F
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from bailing_mtp.kernels import attention
from bailing_mtp.kernels.attention import document_bounds


def packed_causal_attention(
    q_Qhd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    query_lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """As the twin; values are padded to the keys' size. The package aligns its causal mask to the last key."""
    if not q_Qhd.shape[0]:
        return attention.packed_causal_attention(q_Qhd, k_Thd, v_Thv, lengths, scale, query_lengths)
    asking, missing = lengths if query_lengths is None else query_lengths, q_Qhd.shape[-1] - v_Thv.shape[-1]
    o_Qhd = flash_attn_varlen_func(
        q_Qhd,
        k_Thd,
        F.pad(v_Thv, (0, missing)),
        cu_seqlens_q=document_bounds(asking, q_Qhd.device),
        cu_seqlens_k=document_bounds(lengths, q_Qhd.device),
        max_seqlen_q=max(asking),
        max_seqlen_k=max(lengths),
        softmax_scale=scale,
        causal=True,
    )
    return o_Qhd[..., : v_Thv.shape[-1]]


def chained_causal_attention(
    q_Qhd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    chain: tuple[tuple[Tensor, Tensor], ...],
    lengths: tuple[int, ...],
    scale: float,
    query_lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """Without a chain as above. With one, torch's kernel: the package does not take a joined log-sum-exp."""
    if not chain:
        return packed_causal_attention(q_Qhd, k_Thd, v_Thv, lengths, scale, query_lengths)
    return attention.chained_causal_attention(q_Qhd, k_Thd, v_Thv, chain, lengths, scale, query_lengths)
