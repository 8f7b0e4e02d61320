"""Optimizer states in host memory between steps: the same training bit for bit, and nothing left on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training import state as state_module
from bailing_mtp.training.offload import OptimizerOffload
from bailing_mtp.training.optimizer_state import optimizer_shards
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.training.update import TrainingDiverged
from tests.distributed import worlds
from tests.mtp import models

OFFLOADED = worlds.OPTIM.model_copy(update={"offload": "cpu"})
BF16 = dataclasses.replace(worlds.FP32, dtype=torch.bfloat16, router_dtype=torch.bfloat16)
BATCHES = [models.pack((9, 6, 4), seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as found:
        yield found


def offloaded(context: ParallelContext, settings: ModelSettings = worlds.FP32) -> TrainState:
    return build_state(worlds.fixture_model("moe", context, settings), context, OFFLOADED, 10, models.PLAIN_DDP)


def places(state: TrainState) -> dict[str, int]:
    shards = enumerate(optimizer_shards(state.optimizer))
    return {f"{index}.{name}": x.data_ptr() for index, shard in shards for name, x in shard.states.items()}


@pytest.mark.parametrize("settings", [worlds.FP32, BF16], ids=["fp32", "bf16"])
def test_training_is_the_same_bit_for_bit(context: ParallelContext, settings: ModelSettings):
    plain, moved = models.fixture_state(context, settings), offloaded(context, settings)
    assert plain.offload is None
    for batch in BATCHES:
        expected = train_step(plain, [batch], models.objective()).metrics
        found = train_step(moved, [batch], models.objective()).metrics
        assert {name: found[name] for name in expected} == expected
        assert found.keys() - expected.keys() == {"time/offload_s", "memory/offloaded_gb"}
    weights, moved_weights = models.weights(plain), models.weights(moved)
    assert all(torch.equal(weights[name], moved_weights[name]) for name in weights)
    pairs = zip(optimizer_shards(plain.optimizer), optimizer_shards(moved.optimizer), strict=True)
    assert all(torch.equal(a.states[name], b.states[name]) for a, b in pairs for name in a.states)


@pytest.mark.parametrize("settings", [worlds.FP32, BF16], ids=["fp32", "bf16"])
def test_moments_come_slice_by_slice(
    context: ParallelContext, settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
):
    away: list[int] = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda adam: (away.append(state.offload.host_bytes), step(adam))[1])
    monkeypatch.setattr(state_module, "OptimizerOffload", lambda *found: OptimizerOffload(*found, slice_bytes=60_000))
    state = offloaded(context, settings)
    parameters = [p for chunk in state.chunks for p in chunk.parameters()]
    masters = 4 * sum(p.numel() for p in parameters if p.dtype is not torch.float32)
    moments = 8 * sum(p.numel() for p in parameters)
    # Before the first step there are master weights alone.
    assert state.offload.host_bytes == masters
    for batch in BATCHES[:2]:
        train_step(state, [batch], models.objective())
    n_slices, at_rest = len(away) // 2, places(state)
    assert state.offload.host_bytes == masters + moments and n_slices > 4 and max(away[:n_slices]) < moments
    train_step(state, [BATCHES[2]], models.objective())
    assert places(state) == at_rest, "the places in host memory are kept"
    on_device = [moments - n_bytes for n_bytes in away[2 * n_slices :]]
    largest = max(p.numel() for p in parameters)
    assert sum(on_device) == moments and max(on_device) <= 2 * max(60_000, 4 * largest)


def test_a_step_that_is_refused_leaves_them_in_host_memory(context: ParallelContext):
    state = offloaded(context)
    train_step(state, [BATCHES[0]], models.objective())
    at_rest, values = places(state), [shard.states["exp_avg"].clone() for shard in optimizer_shards(state.optimizer)]
    with pytest.raises(TrainingDiverged):
        train_step(state, [BATCHES[1]], models.Poisoned(models.objective(), "doc0", float("inf")))
    parameter = next(state.trunk.parameters())
    hook = parameter.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(TrainingDiverged):
        train_step(state, [BATCHES[1]], models.objective())
    hook.remove()
    assert places(state) == at_rest and state.offload.host_bytes > 0
    after = [shard.states["exp_avg"] for shard in optimizer_shards(state.optimizer)]
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))


def test_time_is_counted_once(context: ParallelContext):
    state = offloaded(context)
    assert train_step(state, [BATCHES[0]], models.objective()).metrics["time/offload_s"] > 0
    assert state.offload.take_seconds() == 0
