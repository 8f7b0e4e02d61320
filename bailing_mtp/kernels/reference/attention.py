"""Causal attention inside the documents of a pack, in torch.

Shape legend: T tokens of a pack, h heads of this rank, d channels of a query or key head, v channels of a
value head, n documents of one length, l tokens of such a document, b query rows of a block, c rows of a chain.
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


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
    q_parts, k_parts, v_parts = (x.split(lengths) for x in (q_Thd, k_Thd, v_Thv))
    outputs = {}
    for documents in _by_length(lengths):
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


def chained_causal_attention(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thv: Tensor,
    chain: tuple[tuple[Tensor, Tensor], ...],
    lengths: tuple[int, ...],
    scale: float,
) -> Tensor:
    """Attention of a draft chain's newest row: [T, h, v] in q's dtype.

    Row t attends to `k`, `v` of its document up to t, as `packed_causal_attention`, and besides to row t alone of
    every (k_Thd, v_Thv) in `chain`: the rows that its own chain has written so far, its own among them. Joined by
    log-sum-exp, differentiable throughout (training-time test of EAGLE-3, arXiv 2503.01840).
    """
    if not chain:
        return packed_causal_attention(q_Thd, k_Thd, v_Thv, lengths, scale)
    assert sum(lengths) == q_Thd.shape[0], f"lengths sum to {sum(lengths)}, T is {q_Thd.shape[0]}"
    return _Chained.apply(lengths, scale, q_Thd, k_Thd, v_Thv, *(x for row in chain for x in row))


SCORES_PER_BLOCK = 2**26
"""Elements of the scores that chained attention holds at a time: 256 MiB in fp32."""


class _Chained(torch.autograd.Function):
    """Chained attention in blocks of query rows; backward computes the scores again.

    The backward of either part, documents or chain, is that of plain attention called with the *joined* output and
    log-sum-exp, as in ring attention: so weights, and the share of each, are those of the one softmax.
    """

    @staticmethod
    def forward(
        ctx, lengths: tuple[int, ...], scale: float, q_Thd: Tensor, k_Thd: Tensor, v_Thv: Tensor, *chain: Tensor
    ) -> Tensor:
        wide, ctx.lengths, ctx.scale = _wide(q_Thd), lengths, scale
        q, k, v = (x.to(wide) for x in (q_Thd, k_Thd, v_Thv))
        chain_keys, chain_values = chain[::2], chain[1::2]
        chain_scores_Thc = torch.stack([(q * key.to(wide)).sum(-1) * scale for key in chain_keys], -1)
        chain_lse_Th = chain_scores_Thc.logsumexp(-1)
        o_Thv, lse_Th = torch.empty_like(v), torch.empty_like(chain_lse_Th)
        for documents in _by_length(lengths):
            q_nhld, k_nhld, v_nhlv = (_stacked(x, lengths, documents) for x in (q, k, v))
            chain_lse_nhl = _stacked(chain_lse_Th, lengths, documents)
            for begin, end in _blocks(q_nhld):
                scores_nhbl = _scores(q_nhld, k_nhld, begin, end, scale)
                lse_nhb = torch.logaddexp(scores_nhbl.logsumexp(-1), chain_lse_nhl[..., begin:end])
                part_nhbv = torch.exp(scores_nhbl - lse_nhb.unsqueeze(-1)) @ v_nhlv[..., :end, :]
                _put(o_Thv, part_nhbv, lengths, documents, begin)
                _put(lse_Th, lse_nhb, lengths, documents, begin)
        for score_Th, value in zip(chain_scores_Thc.unbind(-1), chain_values, strict=True):
            o_Thv += torch.exp(score_Th - lse_Th).unsqueeze(-1) * value.to(wide)
        o_Thv = o_Thv.to(q_Thd.dtype)
        ctx.save_for_backward(q_Thd, k_Thd, v_Thv, o_Thv, lse_Th, *chain)
        return o_Thv

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_Thv: Tensor) -> tuple[Tensor | None, ...]:
        q_Thd, k_Thd, v_Thv, o_Thv, lse_Th, *chain = ctx.saved_tensors
        wide, lengths, scale = lse_Th.dtype, ctx.lengths, ctx.scale
        q, k, v, grad = (x.to(wide) for x in (q_Thd, k_Thd, v_Thv, grad_Thv))
        shared_Th = (grad * o_Thv.to(wide)).sum(-1)
        q_grad, k_grad, v_grad = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for documents in _by_length(lengths):
            q_n, k_n, v_n, grad_n, lse_n, shared_n = (
                _stacked(x, lengths, documents) for x in (q, k, v, grad, lse_Th, shared_Th)
            )
            k_grad_n, v_grad_n = torch.zeros_like(k_n), torch.zeros_like(v_n)
            for begin, end in _blocks(q_n):
                rows, keys = (..., slice(begin, end), slice(None)), (..., slice(0, end), slice(None))
                weights = torch.exp(_scores(q_n, k_n, begin, end, scale) - lse_n[..., begin:end, None])
                v_grad_n[keys] += weights.transpose(-1, -2) @ grad_n[rows]
                weights *= grad_n[rows] @ v_n[keys].transpose(-1, -2) - shared_n[..., begin:end, None]
                k_grad_n[keys] += weights.transpose(-1, -2) @ q_n[rows] * scale
                _put(q_grad, weights @ k_n[keys] * scale, lengths, documents, begin)
            _put(k_grad, k_grad_n, lengths, documents, 0)
            _put(v_grad, v_grad_n, lengths, documents, 0)
        chain_grads = []
        for key, value in zip(chain[::2], chain[1::2], strict=True):
            weight_Th1 = torch.exp((q * key.to(wide)).sum(-1) * scale - lse_Th).unsqueeze(-1)
            toward_Th1 = (grad * value.to(wide)).sum(-1, keepdim=True) - shared_Th.unsqueeze(-1)
            score_grad_Th1 = weight_Th1 * toward_Th1 * scale
            q_grad += score_grad_Th1 * key.to(wide)
            chain_grads += [(score_grad_Th1 * q).to(key.dtype), (weight_Th1 * grad).to(value.dtype)]
        grads = (q_grad.to(q_Thd.dtype), k_grad.to(k_Thd.dtype), v_grad.to(v_Thv.dtype))
        return None, None, *grads, *chain_grads


def _by_length(lengths: tuple[int, ...]) -> list[list[int]]:
    """Documents of equal length together; empty ones left out."""
    groups = defaultdict(list)
    for document, length in enumerate(lengths):
        if length:
            groups[length].append(document)
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


def _blocks(q_nhld: Tensor) -> list[tuple[int, int]]:
    n, h, tokens, _ = q_nhld.shape
    rows = max(16, SCORES_PER_BLOCK // (n * h * tokens))
    return [(begin, min(begin + rows, tokens)) for begin in range(0, tokens, rows)]


def _scores(q_nhld: Tensor, k_nhld: Tensor, begin: int, end: int, scale: float) -> Tensor:
    """Scaled causal scores of query rows begin..end-1 to all keys before `end`."""
    index = torch.arange(end, device=q_nhld.device)
    later = index > index[begin:, None]
    scores = q_nhld[..., begin:end, :] @ k_nhld[..., :end, :].transpose(-1, -2)
    return scores.mul_(scale).masked_fill_(later, -torch.inf)


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
