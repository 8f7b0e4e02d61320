"""Optimizer states in host memory between steps: the same training bit for bit, and nothing left on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training import update
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
def test_states_are_in_host_memory_but_during_a_step(
    context: ParallelContext, settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
):
    state, during = offloaded(context, settings), []
    parameters = [p for chunk in state.chunks for p in chunk.parameters()]
    halves = sum(p.numel() for p in parameters if p.dtype is not torch.float32)
    # Before the first step there are master weights alone.
    assert state.offload.host_bytes == 4 * halves
    check = update._require_finite
    monkeypatch.setattr(update, "_require_finite", lambda *found: (check(*found), during.append(places_now())))

    def places_now() -> tuple[int, dict[str, int]]:
        return state.offload.host_bytes, places(state) if state.step else {}

    for batch in BATCHES[:3]:
        train_step(state, [batch], models.objective())
    at_rest = places(state)
    assert state.offload.host_bytes == 4 * halves + 8 * sum(p.numel() for p in parameters)
    train_step(state, [BATCHES[3]], models.objective())
    assert places(state) == at_rest, "the places in host memory are kept"
    assert [n_bytes for n_bytes, _ in during] == [0, 0, 0, 0]
    assert during[3][1].keys() == at_rest.keys() and not set(during[3][1].values()) & set(at_rest.values())


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
