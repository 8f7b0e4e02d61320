"""The short convolution against F.conv1d document by document, its history, and its gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bailing_mtp.kernels.reference.kda import short_conv

LENGTHS = (5, 1, 0, 2, 3, 8)
CHANNELS = 6


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS), CHANNELS), (CHANNELS, 4), (len(LENGTHS), 3, CHANNELS))
    x, weight, history = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    return x.requires_grad_(), weight.requires_grad_(), history.requires_grad_(), cu_seqlens


def _plain(x_TC: Tensor, weight_CW: Tensor, history_NWC: Tensor) -> tuple[Tensor, Tensor]:
    outputs, last = [], []
    for document_TC, history_WC in zip(x_TC.split(LENGTHS), history_NWC, strict=True):
        inputs_TC = torch.cat([history_WC, document_TC])
        last.append(inputs_TC[-3:])
        if len(document_TC):
            outputs.append(F.conv1d(inputs_TC.t(), weight_CW.unsqueeze(1), groups=CHANNELS).t())
    return F.silu(torch.cat(outputs)), torch.stack(last)


def test_by_hand() -> None:
    x_TC, weight_CW = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1000.0, 100.0, 10.0, 1.0]])
    y_TC = short_conv(x_TC, weight_CW, torch.tensor([0, 2, 3]))
    torch.testing.assert_close(y_TC, F.silu(torch.tensor([[1.0], [12.0], [3.0]])))


def test_without_history_starts_each_document_from_zeros() -> None:
    x, weight, history, cu_seqlens = _inputs()
    y, last = short_conv(x, weight, cu_seqlens, return_history=True)
    expected_y, expected_last = _plain(x, weight, torch.zeros_like(history))
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(last, expected_last)


def test_with_history_and_gradients() -> None:
    tensors, cu_seqlens = _inputs()[:3], _inputs()[3]
    ours = short_conv(*tensors[:2], cu_seqlens, tensors[2], return_history=True)
    expected = _plain(*tensors)
    upstream = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) for x in ours]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(
        torch.autograd.grad(ours, tensors, upstream),
        torch.autograd.grad(expected, tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_two_parts_with_the_history_between_equal_the_whole() -> None:
    x, weight, _, _ = _inputs()
    whole = short_conv(x, weight, torch.tensor([0, len(x)]))
    for first in (1, 2, 7):
        head, between = short_conv(x[:first], weight, torch.tensor([0, first]), return_history=True)
        tail = short_conv(x[first:], weight, torch.tensor([0, len(x) - first]), between)
        torch.testing.assert_close(torch.cat([head, tail]), whole)


def test_bf16_is_rounded_once() -> None:
    x, weight, _, cu_seqlens = _inputs()
    x, weight = x.detach().bfloat16(), weight.detach().bfloat16()
    expected = short_conv(x.float(), weight.float(), cu_seqlens).bfloat16()
    assert short_conv(x, weight, cu_seqlens).equal(expected)
