"""The GPU's attention paths on stand-ins for the fused kernels: what is handed to them and what is made of it."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bailing_mtp.config import ConfigError, PretrainConfig, build_config, check_backends
from bailing_mtp.kernels import attention
from bailing_mtp.kernels.reference import attention as twin
from recipes.compose import compose

LENGTHS, HEADS, D, V, SCALE = (5, 1, 9, 3), 2, 12, 8, 0.3


def _documents(cu_seqlens: Tensor) -> tuple[int, ...]:
    assert cu_seqlens.dtype == torch.int32
    return tuple(cu_seqlens.diff().tolist())


def _forward(q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, causal, debug, *, scale):
    assert (longest_q, longest_k, dropout, causal, debug) == (max(LENGTHS), max(LENGTHS), 0.0, True, False)
    assert torch.equal(cu_q, cu_k) and q.shape == k.shape == v.shape
    assert all(x.is_contiguous() for x in (q, k, v))
    o_Thd, lse_Th = twin.packed_causal_attention(q, k, v, _documents(cu_q), scale, return_lse=True)
    return o_Thd, lse_Th.t().contiguous(), torch.tensor(7), torch.tensor(8), torch.empty(0)


def _backward(grad, q, k, v, o, lse, cu_q, cu_k, longest_q, longest_k, dropout, causal, seed, offset, *, scale):
    """The gradient of attention from a given log-sum-exp and output, document by document."""
    assert (longest_q, dropout, causal, int(seed), int(offset)) == (max(LENGTHS), 0.0, True, 7, 8)
    assert lse.shape == (HEADS, q.shape[0]) and all(x.is_contiguous() for x in (grad, q, k, v, o, lse))
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for begin, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        rows = slice(begin, end)
        q_h, k_h, v_h, o_h, grad_h = (x[rows].transpose(0, 1) for x in (q, k, v, o, grad))
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        weights = torch.exp((q_h @ k_h.mT * scale).masked_fill(later, -torch.inf) - lse[:, rows, None])
        toward = weights * (grad_h @ v_h.mT - (grad_h * o_h).sum(-1, keepdim=True)) * scale
        for total, part in zip(grads, (toward @ k_h, toward.mT @ q_h, weights.mT @ grad_h), strict=True):
            total[rows] = part.transpose(0, 1)
    return tuple(grads)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_takes", lambda q: q.shape[0] > 0)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", _backward, raising=False)


def _run(kernels: ModuleType, rows: int, lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    sizes = (D, D, V) + (D, V) * rows
    leaves = [torch.randn(sum(lengths), HEADS, d, generator=generator).requires_grad_() for d in sizes]
    chain = tuple(zip(leaves[3::2], leaves[4::2], strict=True))
    o_Thv = kernels.chained_causal_attention(*leaves[:3], chain, lengths, SCALE)
    upstream = torch.randn(o_Thv.shape, generator=generator)
    return [o_Thv.detach(), *torch.autograd.grad(o_Thv, leaves, upstream)]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_documents_and_chains_equal_the_twin(stand_ins, rows: int):
    for ours, theirs in zip(_run(attention, rows, LENGTHS), _run(twin, rows, LENGTHS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_documents_of_one_length_are_a_batch(stand_ins, monkeypatch: pytest.MonkeyPatch):
    backends = [torch.nn.attention.SDPBackend.MATH]
    monkeypatch.setattr(attention, "EQUAL_LENGTHS", backends)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
    for ours, theirs in zip(_run(attention, 0, (6, 6, 6)), _run(twin, 0, (6, 6, 6)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_flash_attn_gets_padded_values(stand_ins, monkeypatch: pytest.MonkeyPatch):
    package, calls = ModuleType("flash_attn"), []

    def varlen(q, k, v, **options) -> Tensor:
        calls.append(options)
        assert options["max_seqlen_q"] == options["max_seqlen_k"] == max(LENGTHS) and options["causal"]
        assert q.shape == v.shape
        lengths = _documents(options["cu_seqlens_q"])
        return twin.packed_causal_attention(q, k, v, lengths, options["softmax_scale"])

    package.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.delitem(sys.modules, "bailing_mtp.kernels.flash", raising=False)
    flash = importlib.import_module("bailing_mtp.kernels.flash")
    for ours, theirs in zip(_run(flash, 0, LENGTHS), _run(twin, 0, LENGTHS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert len(calls) == 1
    assert torch.equal(_run(flash, 2, LENGTHS)[0], _run(attention, 2, LENGTHS)[0]) and len(calls) == 1
    monkeypatch.delitem(sys.modules, "bailing_mtp.kernels.flash")


def test_flash_is_refused_where_the_package_is_absent():
    arguments = ["model=tiny", "model.attention=flash", "train.steps=1", "data.path=x"]
    config = build_config(PretrainConfig, compose(PretrainConfig, "pretrain", arguments, run_dir="out"))
    check_backends(config, has_gpu=True, installed=lambda module: True)
    with pytest.raises(ConfigError, match="model.attention: 'flash' needs the module 'flash_attn'; install it with"):
        check_backends(config, has_gpu=True, installed=lambda module: False)
    with pytest.raises(ConfigError, match="model.attention: 'flash' needs a CUDA device"):
        check_backends(config, has_gpu=False, installed=lambda module: True)
