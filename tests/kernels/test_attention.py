"""Packed causal attention against softmax written out per document: values, log-sum-exp, gradients."""

import pytest
import torch
from torch import Tensor

from bailing_mtp.kernels.reference.attention import packed_causal_attention

LENGTHS = (4, 1, 0, 7, 4, 1, 12)
SCALE = 0.3


def _inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator, T = torch.Generator().manual_seed(0), sum(LENGTHS)
    return [
        torch.randn(T, 3, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in (6, 6, 4)
    ]


def _plain(q_Thd: Tensor, k_Thd: Tensor, v_Thv: Tensor) -> tuple[Tensor, Tensor]:
    outputs, lses, end = [], [], 0
    for length in LENGTHS:
        start, end = end, end + length
        for t in range(start, end):
            scores_hl = torch.einsum("hd,lhd->hl", q_Thd[t], k_Thd[start : t + 1]) * SCALE
            outputs.append(torch.einsum("hl,lhv->hv", scores_hl.softmax(-1), v_Thv[start : t + 1]))
            lses.append(scores_hl.logsumexp(-1))
    return torch.stack(outputs), torch.stack(lses)


def _compare(ours: list[Tensor], expected: list[Tensor], tensors: list[Tensor]) -> None:
    upstream = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) for x in ours]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(
        torch.autograd.grad(ours, tensors, upstream),
        torch.autograd.grad(expected, tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_output_and_gradients() -> None:
    tensors = _inputs()
    _compare([packed_causal_attention(*tensors, LENGTHS, SCALE)], [_plain(*tensors)[0]], tensors)


def test_log_sum_exp_and_gradients() -> None:
    tensors = _inputs()
    ours = packed_causal_attention(*tensors, LENGTHS, SCALE, return_lse=True)
    _compare(list(ours), list(_plain(*tensors)), tensors)


def test_first_token_of_a_document_returns_its_own_value() -> None:
    q, k, v = _inputs()
    o = packed_causal_attention(q, k, v, LENGTHS, SCALE)
    first = torch.tensor([0, 4, 5, 12, 16, 17])
    torch.testing.assert_close(o[first], v[first])


@pytest.mark.parametrize("return_lse", [False, True])
def test_no_tokens_give_empty_gradients(return_lse: bool) -> None:
    tensors = [x.detach()[:0].requires_grad_() for x in _inputs()]
    o = packed_causal_attention(*tensors, (0, 0), SCALE, return_lse)
    o = o[0] if return_lse else o
    assert o.shape == (0, 3, 4)
    assert all(
        grad.shape == x.shape for grad, x in zip(torch.autograd.grad(o.sum(), tensors), tensors, strict=True)
    )


def test_bf16_log_sum_exp_is_fp32() -> None:
    tensors = _inputs(torch.bfloat16)
    o, lse = packed_causal_attention(*tensors, LENGTHS, SCALE, return_lse=True)
    expected_o, expected_lse = _plain(*(x.float() for x in tensors))
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(o, expected_o.bfloat16(), atol=2e-3, rtol=8e-3)
