"""Optimizer states that live in host memory between optimizer steps.

What is moved: the moments, and the fp32 master weights where parameters are not fp32. Master weights are on the device
while gradients are clipped and applied; moments come and go a slice of parameters at a time, so the device never holds
all of them. Each tensor keeps its identity and changes its storage, so whoever holds it (megatron-core's optimizer, a
checkpoint) sees the values wherever they are. Nothing is rounded: training is the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

SLICE_BYTES = 2**30
"""Bytes of the fp32 parameters whose moments are on the device together; one parameter may be larger."""
MASTER = "master"


@dataclass(frozen=True)
class _Owner:
    """A parameter as an optimizer of the chain updates it. `place`: number of the optimizer, number in it."""

    place: tuple[int, int]
    part: DistributedOptimizer
    main: Tensor
    is_master: bool

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Moments, not the count of updates."""
        for name, state in self.part.optimizer.state.get(self.main, {}).items():
            if isinstance(state, Tensor) and state.dim() > 0:
                yield name, state


class OptimizerOffload:
    """Moves the states of `optimizer`, whose parameters are on `device`, to host memory and back.

    On a GPU machine host memory is pinned, and each tensor's place there is kept; on the CPU a move is a copy.
    """

    def __init__(self, optimizer: ChainedOptimizer, device: torch.device, slice_bytes: int = SLICE_BYTES) -> None:
        self._device, self._slice_bytes = device, slice_bytes
        self._host: dict[tuple[int, int, str], Tensor] = {}
        self._owners: list[_Owner] = []
        self._moved_s = 0.0
        for number, part in enumerate(optimizer.chained_optimizers):
            if part.is_stub_optimizer:
                continue
            # It counts updates for each parameter, so that updating them one slice after the other is the same.
            assert isinstance(part.optimizer, torch.optim.Adam), type(part.optimizer)
            masters = {id(main) for group in part.shard_fp32_from_float16_groups for main in group}
            mains = [main for group in part.optimizer.param_groups for main in group["params"]]
            owners = [_Owner((number, i), part, main, id(main) in masters) for i, main in enumerate(mains)]
            self._owners += owners
            part.optimizer.step = functools.partial(self._step, owners, part.optimizer.step)
        self.to_host()

    @property
    def host_bytes(self) -> int:
        """Bytes of states that are in host memory now."""
        return sum(tensor.nbytes for key, tensor in self._tensors(self._owners) if self._is_away(key, tensor))

    @torch.no_grad()
    def to_host(self) -> None:
        """Take all states that are on the device to host memory, and free what they held there."""
        with self._timed():
            self._put_away(self._owners)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, master weights are on the device and the optimizer may step; afterwards all is in host memory."""
        with self._timed():
            for owner in self._owners:
                if owner.is_master:
                    self._bring(owner.main)
        try:
            yield
        finally:
            self.to_host()

    def take_seconds(self) -> float:
        """Seconds spent on moves since the last call."""
        seconds, self._moved_s = self._moved_s, 0.0
        return seconds

    @torch.no_grad()
    def _step(self, owners: Sequence[_Owner], inner_step: Callable[[], None]) -> None:
        """The inner optimizer's step, which passes over parameters without a gradient."""
        grads = [owner.main.grad for owner in owners]
        for owner in owners:
            owner.main.grad = None
        begin = 0
        while begin < len(owners):
            end = self._slice_end(owners, begin)
            with self._timed():
                for owner in owners[begin:end]:
                    for _, state in owner.states():
                        self._bring(state)
            for owner, grad in zip(owners[begin:end], grads[begin:end], strict=True):
                owner.main.grad = grad
            inner_step()
            with self._timed():
                for owner in owners[begin:end]:
                    owner.main.grad = None
                self._put_away(owners[begin:end], masters=False)
            begin = end
        for owner, grad in zip(owners, grads, strict=True):
            owner.main.grad = grad

    def _slice_end(self, owners: Sequence[_Owner], begin: int) -> int:
        end, n_bytes = begin + 1, owners[begin].main.nbytes
        while end < len(owners) and n_bytes + owners[end].main.nbytes <= self._slice_bytes:
            n_bytes += owners[end].main.nbytes
            end += 1
        return end

    def _bring(self, tensor: Tensor) -> None:
        tensor.data = torch.empty_like(tensor.data, device=self._device).copy_(tensor.data, non_blocking=True)

    def _put_away(self, owners: Sequence[_Owner], masters: bool = True) -> None:
        for key, tensor in self._tensors(owners):
            if self._is_away(key, tensor) or (key[2] == MASTER and not masters):
                continue
            if key not in self._host:
                pinned = self._device.type == "cuda"
                self._host[key] = torch.empty_like(tensor.data, device="cpu", pin_memory=pinned)
            tensor.data = self._host[key].copy_(tensor.data, non_blocking=True)

    def _is_away(self, key: tuple[int, int, str], tensor: Tensor) -> bool:
        return key in self._host and tensor.data_ptr() == self._host[key].data_ptr()

    @staticmethod
    def _tensors(owners: Sequence[_Owner]) -> Iterator[tuple[tuple[int, int, str], Tensor]]:
        for owner in owners:
            if owner.is_master:
                yield (*owner.place, MASTER), owner.main
            for name, state in owner.states():
                yield (*owner.place, name), state

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin_s = time.monotonic()
        yield
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._moved_s += time.monotonic() - begin_s
