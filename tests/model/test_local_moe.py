"""The MoE layer without a dispatcher against megatron-core's with the loop over experts: values and gradients."""

import dataclasses
from types import ModuleType

import pytest
import torch

from bailing_mtp.kernels.reference import train as twin
from bailing_mtp.model import fused, moe
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.model.mlp import swiglu
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from tests.model.test_presets import preset
from tests.mtp import models

FP32 = ModelSettings(torch.float32, torch.float32, expert_bias_rate=1e-3)


def _built(context, **settings) -> BuiltModel:
    arch = dataclasses.replace(preset("tiny"), swiglu_limits=(None, 0.05, 0.05, 0.05, 0.05))
    built = build_model(arch, dataclasses.replace(FP32, **settings), context, with_mtp=False)
    init_fresh(arch, Shard(), built.trunk, None, seed=3)
    return built


def _run(built: BuiltModel) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
    batch = models.pack((40, 1, 23, 64), vocab=preset("tiny").vocab_size)
    hidden = built.trunk(batch)
    hidden.square().mean().backward()
    grads = {name: p.grad for name, p in built.trunk.named_parameters()}
    counts = [b for name, b in built.trunk.named_buffers() if name.endswith("local_tokens_per_expert")]
    return hidden.detach(), grads, counts


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_grouped_layers_equal_looped_layers(context, recompute: str):
    hidden, grads, counts = _run(_built(context))
    our_hidden, our_grads, our_counts = _run(_built(context, experts="grouped", recompute=recompute))
    torch.testing.assert_close(our_hidden, hidden, atol=1e-5, rtol=1e-5)
    assert our_grads.keys() == grads.keys() and len(counts) == 4
    for name, grad in grads.items():
        if grad is not None:
            torch.testing.assert_close(our_grads[name], grad, atol=1e-6, rtol=1e-4, msg=name)
    for ours, theirs in zip(our_counts, counts, strict=True):
        assert torch.equal(ours, theirs) and ours.sum() == 128 * 4


def test_selective_recompute_keeps_less(context):
    def saved_bytes(recompute: str) -> int:
        built, seen = _built(context, experts="grouped", recompute=recompute), {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            seen[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            built.trunk(models.pack((256,), vocab=4096))
        parameters = {p.untyped_storage().data_ptr() for p in built.trunk.parameters()}
        return sum(x.untyped_storage().nbytes() for place, x in seen.items() if place not in parameters)

    assert saved_bytes("selective") < 0.6 * saved_bytes("none")


def test_placement_sorts_and_finds_back():
    ids_Tk = torch.tensor([[3, 0], [0, 2], [3, 2]])
    where = moe.placement(ids_Tk, 5)
    assert where.ends_E.tolist() == [2, 2, 4, 6, 6]
    assert where.token_A.tolist() == [0, 1, 1, 2, 0, 2]
    assert torch.equal(where.order_A[where.place_Tk.flatten()], torch.arange(6))


def _grads(run, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_fused_swiglu(limit: float | None, kernels: ModuleType = twin):
    x = 2 * torch.randn(7, 1, 26, generator=torch.Generator().manual_seed(0))
    _close(_grads(lambda x: fused.swiglu(kernels, x, limit), x), _grads(lambda x: swiglu(x, limit), x))


def test_fused_gated_norm(kernels: ModuleType = twin):
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(5, 3, 12, generator=generator) for _ in range(2))
    weight = torch.randn(12, generator=generator)

    def plain(x, gate, weight):
        return torch.nn.functional.rms_norm(x, (12,), weight, 1e-3) * gate.sigmoid()

    _close(
        _grads(lambda *a: fused.gated_norm(kernels, *a, 1e-3), x, gate, weight), _grads(plain, x, gate, weight)
    )
