"""Causal attention inside the documents of a pack, in torch.

Shape legend: T tokens of a pack, Q of them that ask, h heads of this rank, d channels of a query or key head, v
channels of a value head, n documents of one shape, l tokens of such a document, m of them that ask, b query rows of a
block, c rows of a chain.
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right


def packed_causal_attention(
    q_Qhd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    return_lse: bool = False,
    query_lengths: tuple[int, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each token to its own document up to itself: [Q, h, v] in q's dtype.

    `lengths` are the document lengths in tokens on the host (they sum to T; zero is allowed), so that nothing
    waits for the device.  The last `query_lengths[n]` tokens of document n ask (None: all of them).  Documents of
    equal lengths form one batch.  With `return_lse` also the log-sum-exp of the scaled scores, [Q, h] in fp32 (fp64
    for fp64 inputs), differentiable like the output; scores are then held whole, m * l per head and document.
    """
    asking = _asking(q_Qhd, k_Thd, lengths, query_lengths)
    attend = _attend_with_lse if return_lse else _attend
    q_parts, k_parts, v_parts = q_Qhd.split(asking), k_Thd.split(lengths), v_Thv.split(lengths)
    outputs = {}
    for documents in _by_length(lengths, asking):
        q_nhmd, k_nhld, v_nhlv = (
            torch.stack([parts[n] for n in documents]).transpose(1, 2)
            for parts in (q_parts, k_parts, v_parts)
        )
        results = [x.transpose(1, 2).unbind() for x in attend(q_nhmd, k_nhld, v_nhlv, scale)]
        outputs.update(zip(documents, zip(*results, strict=True), strict=True))
    if not outputs:
        # Empty, and still a function of all inputs.
        lse_Qh = q_Qhd.sum(-1) + 0.0 * k_Thd.sum()
        o_Qhv = lse_Qh.unsqueeze(-1) * v_Thv.sum(0)
        return (o_Qhv, lse_Qh.to(_wide(q_Qhd))) if return_lse else o_Qhv
    joined = [torch.cat(pieces) for pieces in zip(*(outputs[n] for n in sorted(outputs)), strict=True)]
    return (joined[0], joined[1]) if return_lse else joined[0]


def chained_causal_attention(
    q_Qhd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    chain: tuple[tuple[Tensor, Tensor], ...],
    lengths: tuple[int, ...],
    scale: float,
    query_lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """Attention of a draft chain's newest row: [Q, h, v] in q's dtype.

    Row t attends to `k`, `v` of its document up to t, as `packed_causal_attention`, and besides to row t alone of
    every (k_Qhd, v_Qhv) in `chain`: the rows that its own chain has written so far, its own among them. Joined by
    log-sum-exp, differentiable throughout (training-time test of EAGLE-3, arXiv 2503.01840).
    """
    if not chain:
        return packed_causal_attention(q_Qhd, k_Thd, v_Thv, lengths, scale, query_lengths=query_lengths)
    both = lengths, _asking(q_Qhd, k_Thd, lengths, query_lengths)
    return _Chained.apply(both, scale, q_Qhd, k_Thd, v_Thv, *(x for row in chain for x in row))


def _asking(
    q_Qhd: Tensor, k_Thd: Tensor, lengths: tuple[int, ...], query_lengths: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Query rows of each document."""
    asking = lengths if query_lengths is None else query_lengths
    assert sum(lengths) == k_Thd.shape[0], f"lengths sum to {sum(lengths)}, T is {k_Thd.shape[0]}"
    assert sum(asking) == q_Qhd.shape[0], f"query lengths sum to {sum(asking)}, there are {q_Qhd.shape[0]}"
    assert all(m <= n for m, n in zip(asking, lengths, strict=True)), "queries are the last tokens of a document"
    return asking


SCORES_PER_BLOCK = 2**26
"""Elements of the scores that chained attention holds at a time: 256 MiB in fp32."""


class _Chained(torch.autograd.Function):
    """Chained attention in blocks of query rows; backward computes the scores again.

    The backward of either part, documents or chain, is that of plain attention called with the *joined* output and
    log-sum-exp, as in ring attention: so weights, and the share of each, are those of the one softmax.
    """

    @staticmethod
    def forward(
        ctx,
        both: tuple[tuple[int, ...], tuple[int, ...]],
        scale: float,
        q_Qhd: Tensor,
        k_Thd: Tensor,
        v_Thv: Tensor,
        *chain: Tensor,
    ) -> Tensor:
        wide, ctx.lengths, ctx.scale = _wide(q_Qhd), both, scale
        lengths, asking = both
        q, k, v = (x.to(wide) for x in (q_Qhd, k_Thd, v_Thv))
        chain_keys, chain_values = chain[::2], chain[1::2]
        chain_scores_Qhc = torch.stack([(q * key.to(wide)).sum(-1) * scale for key in chain_keys], -1)
        chain_lse_Qh = chain_scores_Qhc.logsumexp(-1)
        o_Qhv, lse_Qh = q.new_empty(*q.shape[:2], v.shape[-1]), torch.empty_like(chain_lse_Qh)
        for documents in _by_length(lengths, asking):
            q_nhmd, chain_lse_nhm = (_stacked(x, asking, documents) for x in (q, chain_lse_Qh))
            k_nhld, v_nhlv = (_stacked(x, lengths, documents) for x in (k, v))
            for begin, end in _blocks(q_nhmd, k_nhld):
                scores_nhbl = _scores(q_nhmd, k_nhld, begin, end, scale)
                lse_nhb = torch.logaddexp(scores_nhbl.logsumexp(-1), chain_lse_nhm[..., begin:end])
                part_nhbv = torch.exp(scores_nhbl - lse_nhb.unsqueeze(-1)) @ v_nhlv[..., : scores_nhbl.shape[-1], :]
                _put(o_Qhv, part_nhbv, asking, documents, begin)
                _put(lse_Qh, lse_nhb, asking, documents, begin)
        for score_Qh, value in zip(chain_scores_Qhc.unbind(-1), chain_values, strict=True):
            o_Qhv += torch.exp(score_Qh - lse_Qh).unsqueeze(-1) * value.to(wide)
        o_Qhv = o_Qhv.to(q_Qhd.dtype)
        ctx.save_for_backward(q_Qhd, k_Thd, v_Thv, o_Qhv, lse_Qh, *chain)
        return o_Qhv

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_Qhv: Tensor) -> tuple[Tensor | None, ...]:
        q_Qhd, k_Thd, v_Thv, o_Qhv, lse_Qh, *chain = ctx.saved_tensors
        wide, (lengths, asking), scale = lse_Qh.dtype, ctx.lengths, ctx.scale
        q, k, v, grad = (x.to(wide) for x in (q_Qhd, k_Thd, v_Thv, grad_Qhv))
        shared_Qh = (grad * o_Qhv.to(wide)).sum(-1)
        q_grad, k_grad, v_grad = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for documents in _by_length(lengths, asking):
            q_n, grad_n, lse_n, shared_n = (_stacked(x, asking, documents) for x in (q, grad, lse_Qh, shared_Qh))
            k_n, v_n = (_stacked(x, lengths, documents) for x in (k, v))
            k_grad_n, v_grad_n = torch.zeros_like(k_n), torch.zeros_like(v_n)
            for begin, end in _blocks(q_n, k_n):
                scores_nhbl = _scores(q_n, k_n, begin, end, scale)
                rows, keys = (..., slice(begin, end), slice(None)), (..., slice(0, scores_nhbl.shape[-1]), slice(None))
                weights = torch.exp(scores_nhbl - lse_n[..., begin:end, None])
                v_grad_n[keys] += weights.transpose(-1, -2) @ grad_n[rows]
                weights *= grad_n[rows] @ v_n[keys].transpose(-1, -2) - shared_n[..., begin:end, None]
                k_grad_n[keys] += weights.transpose(-1, -2) @ q_n[rows] * scale
                _put(q_grad, weights @ k_n[keys] * scale, asking, documents, begin)
            _put(k_grad, k_grad_n, lengths, documents, 0)
            _put(v_grad, v_grad_n, lengths, documents, 0)
        chain_grads = []
        for key, value in zip(chain[::2], chain[1::2], strict=True):
            weight_Qh1 = torch.exp((q * key.to(wide)).sum(-1) * scale - lse_Qh).unsqueeze(-1)
            toward_Qh1 = (grad * value.to(wide)).sum(-1, keepdim=True) - shared_Qh.unsqueeze(-1)
            score_grad_Qh1 = weight_Qh1 * toward_Qh1 * scale
            q_grad += score_grad_Qh1 * key.to(wide)
            chain_grads += [(score_grad_Qh1 * q).to(key.dtype), (weight_Qh1 * grad).to(value.dtype)]
        grads = (q_grad.to(q_Qhd.dtype), k_grad.to(k_Thd.dtype), v_grad.to(v_Thv.dtype))
        return None, None, *grads, *chain_grads


def _by_length(lengths: tuple[int, ...], asking: tuple[int, ...]) -> list[list[int]]:
    """Documents of equal lengths together; those in which nothing asks left out."""
    groups = defaultdict(list)
    for document, both in enumerate(zip(lengths, asking, strict=True)):
        if both[1]:
            groups[both].append(document)
    return list(groups.values())


def _stacked(x: Tensor, lengths: tuple[int, ...], documents: list[int]) -> Tensor:
    """[T, h, ...] -> [n, h, l, ...] of these documents."""
    parts = x.split(lengths)
    return torch.stack([parts[document] for document in documents]).transpose(1, 2)


def _put(whole: Tensor, values: Tensor, lengths: tuple[int, ...], documents: list[int], begin: int) -> None:
    """Write [n, h, b, ...] over the rows from `begin` on of these documents in the whole [T, h, ...]."""
    parts = whole.split(lengths)
    for document, value in zip(documents, values.transpose(1, 2), strict=True):
        parts[document][begin : begin + value.shape[0]] = value


def _blocks(q_nhmd: Tensor, k_nhld: Tensor) -> list[tuple[int, int]]:
    n, h, asking, _ = q_nhmd.shape
    rows = max(16, SCORES_PER_BLOCK // (n * h * k_nhld.shape[2]))
    return [(begin, min(begin + rows, asking)) for begin in range(0, asking, rows)]


def _scores(q_nhmd: Tensor, k_nhld: Tensor, begin: int, end: int, scale: float) -> Tensor:
    """Scaled causal scores of query rows begin..end-1 to all keys up to the last one's."""
    before = k_nhld.shape[2] - q_nhmd.shape[2]
    index = torch.arange(before + end, device=q_nhmd.device)
    later = index > index[before + begin :, None]
    scores = q_nhmd[..., begin:end, :] @ k_nhld[..., : before + end, :].transpose(-1, -2)
    return scores.mul_(scale).masked_fill_(later, -torch.inf)


def _attend(q_nhmd: Tensor, k_nhld: Tensor, v_nhlv: Tensor, scale: float) -> tuple[Tensor]:
    missing, square = q_nhmd.shape[-1] - v_nhlv.shape[-1], q_nhmd.shape[2] == k_nhld.shape[2]
    mask = None if square else causal_lower_right(q_nhmd.shape[2], k_nhld.shape[2])
    options = {"attn_mask": mask, "is_causal": square, "scale": scale}
    if q_nhmd.device.type == "cpu" and missing > 0:
        # The flash kernel of the CPU wants equal head sizes; without it every score would be held in memory.
        padded = F.scaled_dot_product_attention(q_nhmd, k_nhld, F.pad(v_nhlv, (0, missing)), **options)
        return (padded[..., :-missing],)
    return (F.scaled_dot_product_attention(q_nhmd, k_nhld, v_nhlv, **options),)


def _attend_with_lse(q_nhmd: Tensor, k_nhld: Tensor, v_nhlv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = _wide(q_nhmd)
    scores_nhml = _scores(q_nhmd.to(wide), k_nhld.to(wide), 0, q_nhmd.shape[2], scale)
    lse_nhm = scores_nhml.logsumexp(-1)
    o_nhmv = torch.exp(scores_nhml - lse_nhm.unsqueeze(-1)) @ v_nhlv.to(wide)
    return o_nhmv.to(q_nhmd.dtype), lse_nhm


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)
