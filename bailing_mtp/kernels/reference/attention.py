"""Causal attention inside the documents of a pack, in torch.

Shape legend: T tokens of a pack, h heads of this rank, d channels of a query or key head, v channels of a
value head, n documents of one length, l tokens of such a document.
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_causal_attention(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each token to its own document up to itself: [T, h, v] in q's dtype.

    `lengths` are the document lengths in tokens on the host (they sum to T; zero is allowed), so that nothing
    waits for the device.  Documents of equal length form one batch.  With `return_lse` also the log-sum-exp
    of the scaled scores, [T, h] in fp32 (fp64 for fp64 inputs), differentiable like the output; scores are
    then held whole, l * l per head and document.
    """
    assert sum(lengths) == q_Thd.shape[0], f"lengths sum to {sum(lengths)}, T is {q_Thd.shape[0]}"
    attend = _attend_with_lse if return_lse else _attend
    by_length = defaultdict(list)
    for document, length in enumerate(lengths):
        if length:
            by_length[length].append(document)
    q_parts, k_parts, v_parts = (x.split(lengths) for x in (q_Thd, k_Thd, v_Thv))
    outputs = {}
    for documents in by_length.values():
        q_nhld, k_nhld, v_nhlv = (
            torch.stack([parts[n] for n in documents]).transpose(1, 2)
            for parts in (q_parts, k_parts, v_parts)
        )
        results = [x.transpose(1, 2).unbind() for x in attend(q_nhld, k_nhld, v_nhlv, scale)]
        outputs.update(zip(documents, zip(*results, strict=True), strict=True))
    if not outputs:
        lse_Th = (q_Thd * k_Thd).sum(-1)  # empty, and still a function of all inputs
        o_Thv = lse_Th.unsqueeze(-1) * v_Thv
        return (o_Thv, lse_Th.to(_wide(q_Thd))) if return_lse else o_Thv
    joined = [torch.cat(pieces) for pieces in zip(*(outputs[n] for n in sorted(outputs)), strict=True)]
    return (joined[0], joined[1]) if return_lse else joined[0]


def _attend(q_nhld: Tensor, k_nhld: Tensor, v_nhlv: Tensor, scale: float) -> tuple[Tensor]:
    missing = q_nhld.shape[-1] - v_nhlv.shape[-1]
    if q_nhld.device.type == "cpu" and missing > 0:
        # The flash kernel of the CPU wants equal head sizes; without it every score would be held in memory.
        padded = F.scaled_dot_product_attention(
            q_nhld, k_nhld, F.pad(v_nhlv, (0, missing)), is_causal=True, scale=scale
        )
        return (padded[..., :-missing],)
    return (F.scaled_dot_product_attention(q_nhld, k_nhld, v_nhlv, is_causal=True, scale=scale),)


def _attend_with_lse(q_nhld: Tensor, k_nhld: Tensor, v_nhlv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide, tokens = _wide(q_nhld), q_nhld.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q_nhld.device).triu(1)
    scores_nhll = (q_nhld.to(wide) @ k_nhld.to(wide).transpose(-1, -2) * scale).masked_fill(later, -torch.inf)
    lse_nhl = scores_nhll.logsumexp(-1)
    o_nhlv = torch.exp(scores_nhll - lse_nhl.unsqueeze(-1)) @ v_nhlv.to(wide)
    return o_nhlv.to(q_nhld.dtype), lse_nhl


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)
