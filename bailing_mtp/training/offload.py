"""Optimizer states that live in host memory between optimizer steps.

What is moved: the moments, and the fp32 master weights where parameters are not fp32. Each tensor keeps its identity
and changes its storage, so whoever holds it (megatron-core's optimizer, a checkpoint) sees the values wherever they
are. Nothing is rounded: training is the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

Key = tuple[int, int, str]
"""Optimizer of the chain, parameter in it, name of the state."""
MASTER = "master"


class OptimizerOffload:
    """Moves the states of `optimizer`, whose parameters are on `device`, to host memory and back.

    On a GPU machine host memory is pinned, and each tensor's place there is kept; on the CPU a move is a copy.
    """

    def __init__(self, optimizer: ChainedOptimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._host: dict[Key, Tensor] = {}
        self.is_on_device = True
        self._moved_s = 0.0
        self.to_host()

    @property
    def host_bytes(self) -> int:
        """Bytes of states that are in host memory now."""
        return 0 if self.is_on_device else sum(tensor.nbytes for _, tensor in self._states())

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """States are on the device inside, and in host memory afterwards."""
        self.to_device()
        try:
            yield
        finally:
            self.to_host()

    @torch.no_grad()
    def to_device(self) -> None:
        """Bring the states to the device; their places in host memory stay reserved."""
        assert not self.is_on_device, "optimizer states are on the device already"
        begin_s = time.monotonic()
        for _, tensor in self._states():
            tensor.data = torch.empty_like(tensor.data, device=self._device).copy_(tensor.data, non_blocking=True)
        self.is_on_device = True
        self._wait(begin_s)

    @torch.no_grad()
    def to_host(self) -> None:
        """Take the states to host memory and free what they held on the device."""
        assert self.is_on_device, "optimizer states are in host memory already"
        begin_s = time.monotonic()
        for key, tensor in self._states():
            if key not in self._host:
                pinned = self._device.type == "cuda"
                self._host[key] = torch.empty_like(tensor.data, device="cpu", pin_memory=pinned)
            tensor.data = self._host[key].copy_(tensor.data, non_blocking=True)
        self.is_on_device = False
        self._wait(begin_s)

    def take_seconds(self) -> float:
        """Seconds spent on moves since the last call."""
        seconds, self._moved_s = self._moved_s, 0.0
        return seconds

    def _states(self) -> Iterator[tuple[Key, Tensor]]:
        """Everything but what is a parameter's own storage, and counts of updates."""
        for number, part in enumerate(self._optimizer.chained_optimizers):
            if part.is_stub_optimizer:
                continue
            masters = {id(main) for group in part.shard_fp32_from_float16_groups for main in group}
            for index, main in enumerate(_parameters(part)):
                if id(main) in masters:
                    yield (number, index, MASTER), main
                for name, state in part.optimizer.state.get(main, {}).items():
                    if isinstance(state, Tensor) and state.dim() > 0:
                        yield (number, index, name), state

    def _wait(self, begin_s: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._moved_s += time.monotonic() - begin_s


def _parameters(part: DistributedOptimizer) -> list[Tensor]:
    return [main for group in part.optimizer.param_groups for main in group["params"]]
