"""An optimizer's state as flat shards of named parameters, and the random generators' states.

megatron-core's own "fully reshardable" form gathers every fp32 state on every data-parallel rank, and finds a
parameter's state by its place in its group, which is wrong where a group mixes dtypes. Here a rank hands out
views of what it owns, so that storing gathers nothing and loading writes in place.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from bailing_mtp.training.adamw8bit import PackedAdamW8bit, RankState

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


@dataclass(frozen=True)
class OptimizerShard:
    """Elements start..stop-1 of a flattened local parameter, which this rank updates."""

    parameter: nn.Parameter
    start: int
    stop: int
    states: dict[str, Tensor]
    """Flat fp32 views: "exp_avg", "exp_avg_sq", and "master" where the parameter itself is not fp32."""


def optimizer_shards(optimizer: ChainedOptimizer) -> list[OptimizerShard]:
    """This rank's shards of fp32 states, which exist after the first step, or after `allocate`."""
    shards = []
    for part in _parts(optimizer):
        if isinstance(part.optimizer, PackedAdamW8bit):
            continue
        for parameter, main in _parameters(part):
            place = part._get_model_param_range_map(parameter)["param"]
            states = {name: part.optimizer.state[main][name] for name in MOMENTS}
            if parameter.dtype is not torch.float32:
                states[MASTER] = main.detach()
            shards.append(OptimizerShard(parameter, place.start, place.end, states))
    return shards


def rank_states(optimizer: ChainedOptimizer) -> list[RankState]:
    """This rank's 8-bit states, whose blocks belong to its layout; none where states are fp32."""
    packed = [part.optimizer for part in _parts(optimizer) if isinstance(part.optimizer, PackedAdamW8bit)]
    return [state for inner in packed for state in inner.rank_states()]


@torch.no_grad()
def allocate(optimizer: ChainedOptimizer, n_steps: int) -> None:
    """Give every shard the state that it has after `n_steps` updates, with zero moments to be filled."""
    for part in _parts(optimizer):
        if isinstance(part.optimizer, PackedAdamW8bit):
            part.optimizer.set_steps(n_steps)
            continue
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                state = part.optimizer.state[main]
                state.update({name: torch.zeros_like(main, dtype=torch.float32) for name in MOMENTS})
                if isinstance(part.optimizer, torch.optim.Adam):
                    on_device = group.get("capturable") or group.get("fused")
                    device = main.device if on_device else torch.device("cpu")
                    state["step"] = torch.tensor(float(n_steps), dtype=torch.float32, device=device)
            if not isinstance(part.optimizer, torch.optim.Adam):
                group["step"] = n_steps


def optimizer_steps(optimizer: ChainedOptimizer) -> int:
    """Updates so far, which Adam's bias correction counts; 0 before the first."""
    counts = {
        int(group["step"])
        for part in _parts(optimizer)
        for group in part.optimizer.param_groups
        if group["params"] and "step" in group  # apex counts by group, and passes over one that is empty here
    }
    counts |= {
        int(state["step"]) for part in _parts(optimizer) for state in part.optimizer.state.values() if "step" in state
    }
    assert len(counts) <= 1, f"parameters disagree on the number of updates: {counts}"
    return counts.pop() if counts else 0


def _parts(optimizer: ChainedOptimizer) -> list[DistributedOptimizer | FP32Optimizer]:
    return [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def _parameters(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Model parameters and the fp32 shards that the inner optimizer updates in their place."""
    halves = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
    wholes = zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)
    for parameters, mains in (*halves, *wholes):
        yield from zip(parameters, mains, strict=True)


def generator_states() -> dict[str, Any]:
    """States of this rank's random generators (torch, the GPU's, megatron-core's, numpy, Python) as JSON values."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "tracker": {name: _text(state) for name, state in get_cuda_rng_tracker().get_states().items()},
        "python": [version, list(internal), gauss],
        "numpy": [kind, _text(torch.from_numpy(keys.view(np.uint8).copy())), *rest],
    }
    if torch.cuda.is_available():
        states["cuda"] = _text(torch.cuda.get_rng_state())
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Continue where `generator_states` was taken, on the same kind of device."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, _bytes(keys).numpy().view(np.uint32), *rest))
    get_cuda_rng_tracker().set_states({name: _bytes(text) for name, text in states["tracker"].items()})
    torch.set_rng_state(_bytes(states["torch"]))
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(_bytes(states["cuda"]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().contiguous().numpy().tobytes()).decode("ascii")


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
