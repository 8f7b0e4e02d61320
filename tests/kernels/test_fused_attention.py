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
SOME = (2, 1, 9, 1)


def _documents(cu_seqlens: Tensor) -> tuple[int, ...]:
    assert cu_seqlens.dtype == torch.int32
    return tuple(cu_seqlens.diff().tolist())


def _forward(q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, causal, debug, *, scale):
    asking, lengths = _documents(cu_q), _documents(cu_k)
    assert (longest_q, longest_k, dropout, causal, debug) == (max(asking), max(lengths), 0.0, True, False)
    assert asking in (SOME, lengths) and lengths == LENGTHS and k.shape == v.shape
    assert all(x.is_contiguous() for x in (q, k, v))
    o_Qhd, lse_Qh = twin.packed_causal_attention(q, k, v, lengths, scale, return_lse=True, query_lengths=asking)
    return o_Qhd, lse_Qh.t().contiguous(), torch.tensor(7), torch.tensor(8), torch.empty(0)


def _backward(grad, q, k, v, o, lse, cu_q, cu_k, longest_q, longest_k, dropout, causal, seed, offset, *, scale):
    """The gradient of attention from a given log-sum-exp and output, document by document."""
    asking, lengths = _documents(cu_q), _documents(cu_k)
    assert (longest_q, longest_k, dropout, causal) == (max(asking), max(lengths), 0.0, True)
    assert (int(seed), int(offset)) == (7, 8)
    assert lse.shape == (HEADS, q.shape[0]) and all(x.is_contiguous() for x in (grad, q, k, v, o, lse))
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for document, (n_asking, n_keys) in enumerate(zip(asking, lengths, strict=True)):
        rows = slice(int(cu_q[document]), int(cu_q[document + 1]))
        keys = slice(int(cu_k[document]), int(cu_k[document + 1]))
        q_h, o_h, grad_h = (x[rows].transpose(0, 1) for x in (q, o, grad))
        k_h, v_h = (x[keys].transpose(0, 1) for x in (k, v))
        later = torch.ones(n_asking, n_keys, dtype=torch.bool).triu(n_keys - n_asking + 1)
        weights = torch.exp((q_h @ k_h.mT * scale).masked_fill(later, -torch.inf) - lse[:, rows, None])
        toward = weights * (grad_h @ v_h.mT - (grad_h * o_h).sum(-1, keepdim=True)) * scale
        parts = ((rows, toward @ k_h), (keys, toward.mT @ q_h), (keys, weights.mT @ grad_h))
        for total, (where, part) in zip(grads, parts, strict=True):
            total[where] = part.transpose(0, 1)
    return tuple(grads)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_takes", lambda q: q.shape[0] > 0)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", _backward, raising=False)


def _run(
    kernels: ModuleType, rows: int, lengths: tuple[int, ...], asking: tuple[int, ...] | None = None
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    n_asking = sum(lengths if asking is None else asking)
    shapes = [(n_asking, D), (sum(lengths), D), (sum(lengths), V), *((n_asking, D), (n_asking, V)) * rows]
    leaves = [torch.randn(n, HEADS, d, generator=generator).requires_grad_() for n, d in shapes]
    chain = tuple(zip(leaves[3::2], leaves[4::2], strict=True))
    o_Qhv = kernels.chained_causal_attention(*leaves[:3], chain, lengths, SCALE, asking)
    upstream = torch.randn(o_Qhv.shape, generator=generator)
    return [o_Qhv.detach(), *torch.autograd.grad(o_Qhv, leaves, upstream)]


@pytest.mark.parametrize("asking", [None, SOME])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_documents_and_chains_equal_the_twin(stand_ins, rows: int, asking: tuple[int, ...] | None):
    for ours, theirs in zip(_run(attention, rows, LENGTHS, asking), _run(twin, rows, LENGTHS, asking), strict=True):
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
        asking, lengths = _documents(options["cu_seqlens_q"]), _documents(options["cu_seqlens_k"])
        assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (max(asking), max(LENGTHS)) and options["causal"]
        assert lengths == LENGTHS and q.shape[-1] == v.shape[-1]
        return twin.packed_causal_attention(q, k, v, lengths, options["softmax_scale"], query_lengths=asking)

    package.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.delitem(sys.modules, "bailing_mtp.kernels.flash", raising=False)
    flash = importlib.import_module("bailing_mtp.kernels.flash")
    for asking in (None, SOME):
        for ours, theirs in zip(_run(flash, 0, LENGTHS, asking), _run(twin, 0, LENGTHS, asking), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert len(calls) == 2
    assert torch.equal(_run(flash, 2, LENGTHS)[0], _run(attention, 2, LENGTHS)[0]) and len(calls) == 2
    monkeypatch.delitem(sys.modules, "bailing_mtp.kernels.flash")


def test_flash_is_refused_where_the_package_is_absent():
    arguments = ["model=tiny", "model.attention=flash", "train.steps=1", "data.path=x"]
    config = build_config(PretrainConfig, compose(PretrainConfig, "pretrain", arguments, run_dir="out"))
    check_backends(config, has_gpu=True, installed=lambda module: True)
    with pytest.raises(ConfigError, match="model.attention: 'flash' needs the module 'flash_attn'; install it with"):
        check_backends(config, has_gpu=True, installed=lambda module: False)
    with pytest.raises(ConfigError, match="model.attention: 'flash' needs a CUDA device"):
        check_backends(config, has_gpu=False, installed=lambda module: True)
