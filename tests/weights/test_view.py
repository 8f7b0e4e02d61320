"""A published view is the trainer's own storage, and says when it has grown old."""

import dataclasses

import pytest
import torch
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.weights.names import Shard
from bailing_mtp.weights.view import KdaWeights, MlaWeights, MoeWeights, StaleWeights, WeightsView, publish
from tests.weights.stand_in import WHOLE, build, state, tiny_config


def published(shard: Shard = WHOLE, **changes: object):
    arch = Architecture.from_hf(tiny_config(**changes), "test")
    trunk, mtp = build(arch, shard)
    trunk.arch = arch
    return trunk, mtp, publish(trunk, mtp, shard, WeightsClock(trained=3))


def tensors_of(node: object) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, tuple):
        return [tensor for child in node for tensor in tensors_of(child)]
    if dataclasses.is_dataclass(node) and not isinstance(node, Architecture):
        return [t for field in dataclasses.fields(node) for t in tensors_of(getattr(node, field.name))]
    return []


@pytest.mark.parametrize("shard", [WHOLE, Shard(tp=2, tp_rank=1, ep=4, ep_rank=2)])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "tie_word_embeddings": True}])
def test_every_tensor_aliases_the_modules_and_none_is_left_out(shard, changes):
    trunk, mtp, view = published(shard, **changes)
    theirs = {t.data_ptr(): t for t in (*state(trunk).values(), *state(mtp).values())}
    ours = tensors_of(view)
    assert {t.data_ptr() for t in ours} == set(theirs)
    for tensor in ours:
        original = theirs[tensor.data_ptr()]
        assert tensor.numel() == original.numel() and tensor.is_contiguous() and not tensor.requires_grad


def test_the_tree_follows_the_plan_and_sees_updates():
    trunk, mtp, view = published()
    kinds = [(type(layer.mixer), type(layer.mlp).__name__) for layer in view.layers]
    assert kinds == [(KdaWeights, "DenseWeights"), (KdaWeights, "MoeWeights"), (MlaWeights, "MoeWeights")]
    assert view.mtp.layer.plan.is_mtp and isinstance(view.mtp.layer.mlp, MoeWeights)
    parameter = mtp.get_parameter("block.self_attention.kv_b_proj.weight")
    with torch.no_grad():
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    # Four heads of six key rows and four value rows, over a latent of seven.
    kv_b_hxC = view.mtp.layer.mixer.kv_b_hxC
    assert torch.equal(kv_b_hxC, parameter.detach().view(4, 10, 7))


def test_without_an_mtp_layer():
    trunk, _, _ = published()
    assert publish(trunk, None, WHOLE, WeightsClock()).mtp is None


def test_a_view_is_current_until_the_next_step():
    trunk, _, view = published()
    view.require_current()
    view.clock.trained += 1
    with pytest.raises(StaleWeights, match="version 3, but the trainer is at 4"):
        view.require_current()
    newer: WeightsView = publish(trunk, None, WHOLE, view.clock)
    newer.require_current()
