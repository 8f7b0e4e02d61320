"""Optimizer states really leave the device, and come back as they were."""

import dataclasses

import pytest
import torch

from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.optimizer_state import optimizer_shards
from bailing_mtp.training.state import build_state
from bailing_mtp.training.step import train_step
from tests.distributed import worlds
from tests.mtp import models

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_leave_the_device_and_return(context: ParallelContext, dtype: torch.dtype):
    settings = dataclasses.replace(worlds.FP32, dtype=dtype, router_dtype=dtype)
    optim = worlds.OPTIM.model_copy(update={"offload": "cpu"})
    built = worlds.fixture_model("moe", context, settings)
    state = build_state(built, context, optim, 10, models.PLAIN_DDP)
    for seed in range(2):
        metrics = train_step(state, [models.pack((9, 6, 4), seed=seed)], models.objective()).metrics
    assert metrics["memory/offloaded_gb"] > 0 and metrics["time/offload_s"] > 0

    def states() -> list[torch.Tensor]:
        return [x for shard in optimizer_shards(state.optimizer) for x in shard.states.values()]

    at_rest = [x.clone() for x in states()]
    assert all(x.device.type == "cpu" and x.is_pinned() for x in states())
    n_bytes, before = state.offload.host_bytes, torch.cuda.memory_allocated()
    with state.offload.on_device():
        halves = [shard for shard in optimizer_shards(state.optimizer) if "master" in shard.states]
        assert all(shard.states["master"].device.type == "cuda" for shard in halves)
        on_device = sum(shard.states["master"].nbytes for shard in halves)
        assert torch.cuda.memory_allocated() - before >= on_device and state.offload.host_bytes == n_bytes - on_device
    del halves
    assert torch.cuda.memory_allocated() == before
    assert all(torch.equal(x, kept) for x, kept in zip(states(), at_rest, strict=True))
