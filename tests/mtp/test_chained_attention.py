"""Attention of a draft chain: one softmax over the document's rows and the chain's, written out per token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bailing_mtp.kernels.reference import attention
from bailing_mtp.kernels.reference.attention import chained_causal_attention, packed_causal_attention

LENGTHS = (4, 1, 0, 7, 4, 1, 40)
SCALE = 0.4


def _inputs(n_chain: int, dtype: torch.dtype = torch.float64, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator, sizes = torch.Generator().manual_seed(n_chain), (6, 6, 4, *(6, 4) * n_chain)
    return [
        torch.randn(sum(lengths), 3, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    ]


def _pairs(chain: list[Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple(zip(chain[::2], chain[1::2], strict=True))


def _plain(q: Tensor, k: Tensor, v: Tensor, *chain: Tensor) -> Tensor:
    outputs, end = [], 0
    for length in LENGTHS:
        start, end = end, end + length
        for t in range(start, end):
            keys = torch.cat([k[start : t + 1], *(key[t : t + 1] for key in chain[::2])])
            values = torch.cat([v[start : t + 1], *(value[t : t + 1] for value in chain[1::2])])
            weights = (torch.einsum("hd,lhd->hl", q[t], keys) * SCALE).softmax(-1)
            outputs.append(torch.einsum("hl,lhv->hv", weights, values))
    return torch.stack(outputs)


@pytest.mark.parametrize("n_chain", [1, 2, 4])
@pytest.mark.parametrize("scores_per_block", [1, 2**26])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, n_chain: int, scores_per_block: int):
    """In one block, and in blocks of 16 rows, which cut the longest document."""
    monkeypatch.setattr(attention, "SCORES_PER_BLOCK", scores_per_block)
    tensors = _inputs(n_chain)
    ours = chained_causal_attention(*tensors[:3], _pairs(tensors[3:]), LENGTHS, SCALE)
    theirs = _plain(*tensors)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    grads = [torch.autograd.grad(o, tensors, upstream) for o in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n_chain", [0, 2])
@pytest.mark.parametrize("scores_per_block", [1, 2**26])
def test_some_queries_are_the_last_rows_of_all(monkeypatch: pytest.MonkeyPatch, n_chain: int, scores_per_block: int):
    """Values, and the gradients of an upstream that is zero for the queries left out."""
    monkeypatch.setattr(attention, "SCORES_PER_BLOCK", scores_per_block)
    asking, ends = (1, 1, 0, 5, 4, 0, 23), torch.tensor(LENGTHS).cumsum(0).tolist()
    rows = torch.cat([torch.arange(end - n, end) for n, end in zip(asking, ends, strict=True)])
    tensors = _inputs(n_chain)
    q, k, v, *chain = tensors
    some = chained_causal_attention(
        q[rows], k, v, _pairs([x[rows] for x in chain]), LENGTHS, SCALE, query_lengths=asking
    )
    every = chained_causal_attention(q, k, v, _pairs(chain), LENGTHS, SCALE)
    torch.testing.assert_close(some, every[rows])
    upstream = torch.randn(some.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    grads = [torch.autograd.grad(o, tensors, upstream) for o in (some, every[rows])]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_large_scores_do_not_overflow():
    tensors = [(x.detach() * 100).requires_grad_() for x in _inputs(2, torch.float32)]
    o = chained_causal_attention(*tensors[:3], _pairs(tensors[3:]), LENGTHS, SCALE)
    grads = torch.autograd.grad(o.sum(), tensors)
    assert o.isfinite().all() and all(grad.isfinite().all() for grad in grads)


def test_bf16_rounds_once():
    tensors = _inputs(2, torch.bfloat16)
    o = chained_causal_attention(*tensors[:3], _pairs(tensors[3:]), LENGTHS, SCALE)
    assert o.dtype is torch.bfloat16
    torch.testing.assert_close(o, _plain(*(x.float() for x in tensors)).bfloat16(), atol=2e-3, rtol=8e-3)


def test_nothing_that_grows_with_the_square_is_saved():
    """Scores of 512 tokens would be 512 * 512 per head; what is kept is a few rows per token."""
    lengths, saved = (512,), []
    tensors = _inputs(2, torch.float32, lengths)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        chained_causal_attention(*tensors[:3], _pairs(tensors[3:]), lengths, SCALE)
    assert 0 < max(x.numel() for x in saved) <= 512 * 3 * 6


def test_no_chain_is_packed_attention_and_no_tokens_have_gradients():
    tensors = _inputs(0)
    ours = chained_causal_attention(*tensors, (), LENGTHS, SCALE)
    assert torch.equal(ours, packed_causal_attention(*tensors, LENGTHS, SCALE))
    empty = [x.detach()[:0].requires_grad_() for x in _inputs(1)]
    o = chained_causal_attention(*empty[:3], _pairs(empty[3:]), (0, 0), SCALE)
    assert o.shape == (0, 3, 4)
    assert all(grad.shape == x.shape for grad, x in zip(torch.autograd.grad(o.sum(), empty), empty, strict=True))
