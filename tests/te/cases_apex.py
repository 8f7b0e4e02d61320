"""Adam, gradient norms and weight gradients: torch's unless the config names apex, whatever can be imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import amp_C
import apex.optimizers
import fused_weight_gradient_mlp_cuda
import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from transformer_engine.pytorch import Linear

from bailing_mtp.config import OptimConfig
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.optimizer_state import allocate, optimizer_shards, optimizer_steps
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import train_step
from tests.distributed import worlds

APEX = worlds.OPTIM.model_copy(update={"fused": "apex"})
_OWNERS = (ColumnParallelLinear, RowParallelLinear)
FUSED = dataclasses.replace(worlds.FP32, fused_weight_gradients=True)


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as context:
        yield context


@pytest.fixture(autouse=True)
def counted_anew() -> None:
    amp_C.CALLS.clear()
    fused_weight_gradient_mlp_cuda.CALLS.clear()


def _state(context: ParallelContext, optim: OptimConfig, settings: ModelSettings) -> TrainState:
    return build_state(worlds.fixture_model("moe", context, settings), context, optim, steps=10)


def _flat(state: TrainState) -> dict[str, torch.Tensor]:
    """Parameters (in fp32 the optimizer's shards are views of them) and the routers' biases."""
    found: dict[str, torch.Tensor] = {}
    for i, chunk in enumerate(state.chunks):
        found |= {f"{i}.{name}": parameter for name, parameter in chunk.module.named_parameters()}
        found |= {f"{i}.{name}": x for name, x in chunk.module.named_buffers() if name.endswith("expert_bias")}
    return found


def _kinds(state: TrainState) -> set[type]:
    return {type(part.optimizer) for part in state.optimizer.chained_optimizers}


def test_nothing_is_taken_that_was_not_asked_for(context):
    state = _state(context, worlds.OPTIM, worlds.FP32)
    worlds.three_steps(state, worlds.microbatches())
    assert _kinds(state) == {torch.optim.AdamW}
    assert not amp_C.CALLS and not fused_weight_gradient_mlp_cuda.CALLS


@pytest.mark.parametrize("backend", ["local", "te"])
def test_apex_trains_the_same_weights(context, backend: str):
    plain = _state(context, worlds.OPTIM, worlds.FP32)
    expected = worlds.three_steps(plain, worlds.microbatches())
    settings = dataclasses.replace(FUSED, backend=backend, experts="grouped" if backend == "te" else "loop")
    state = _state(context, APEX, settings)
    metrics = worlds.three_steps(state, worlds.microbatches())
    assert _kinds(state) == {apex.optimizers.FusedAdam}
    assert amp_C.CALLS["l2norm"] and amp_C.CALLS["scale"]
    # transformer-engine adds its own; of its layers only the attention gates are megatron-core's.
    n_linears = sum(isinstance(module, _OWNERS) for chunk in state.chunks for module in chunk.modules())
    assert n_linears == (3 if backend == "te" else 30)
    assert fused_weight_gradient_mlp_cuda.CALLS["wgrad"] == 12 * n_linears
    te_linears = [module for chunk in state.chunks for module in chunk.modules() if isinstance(module, Linear)]
    assert all(module.fuse_wgrad_accumulation for module in te_linears) and bool(te_linears) == (backend == "te")
    for ours, theirs in zip(metrics, expected, strict=True):
        for name in ("train/lm_loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name
    for chunk, reference in zip(state.chunks, plain.chunks, strict=True):
        for (name, ours), theirs in zip(chunk.module.named_parameters(), reference.module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4, msg=name)


def test_states_are_stored_and_found_again(context):
    state = _state(context, APEX, FUSED)
    train_step(state, worlds.microbatches(), worlds.OBJECTIVE)
    assert optimizer_steps(state.optimizer) == 1
    shards = optimizer_shards(state.optimizer)
    # As a checkpoint does it: room for the states of so many steps, then their values.
    other = _state(context, APEX, FUSED)
    allocate(other.optimizer, 1)
    assert optimizer_steps(other.optimizer) == 1
    mains = _flat(other)
    with torch.no_grad():
        for name, main in _flat(state).items():
            mains[name].copy_(main)
        for ours, theirs in zip(optimizer_shards(other.optimizer), shards, strict=True):
            for name, moment in theirs.states.items():
                ours.states[name].copy_(moment)
    for one in (state, other):
        train_step(one, worlds.microbatches(), worlds.OBJECTIVE)
        assert optimizer_steps(one.optimizer) == 2
    for name, main in _flat(state).items():
        assert torch.equal(mains[name], main), name


def test_the_next_state_decides_anew(context):
    assert _kinds(_state(context, APEX, FUSED)) == {apex.optimizers.FusedAdam}
    assert _kinds(_state(context, worlds.OPTIM, worlds.FP32)) == {torch.optim.AdamW}
