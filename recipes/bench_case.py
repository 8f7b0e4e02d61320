"""What a kernel benchmark is made of: random inputs, a call, and its comparison with the torch twin.

Shape legend: rows R, choices k of E experts.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from bailing_mtp.contracts.architecture import Architecture

from .bench_floors import Floors

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1.2e-2}
"""Norm of the error relative to the norm of the twin's result, by the dtype that a kernel computes from."""


class Draw:
    """Random tensors, made on the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        options = {"device": self.device, "dtype": dtype or self.dtype}
        return torch.empty(*shape, **options).normal_(0.0, scale, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """fp32 in [0, 1)."""
        return torch.rand(*shape, generator=self._generator, device=self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._generator, device=self.device)

    def integers(self, end: int, *shape: int) -> Tensor:
        """int64 in 0 .. end - 1."""
        return torch.randint(end, shape, generator=self._generator, device=self.device)

    def choices(self, R: int, E: int, k: int) -> Tensor:
        """k distinct of E for each row, int64 [R, k]."""
        return self.uniform(R, E).argsort(-1)[:, :k].contiguous()


@dataclass(frozen=True)
class Workload:
    """One model's sizes, and the kernel set under test (names as in kernels.reference.decode)."""

    arch: Architecture
    floors: Floors
    kernels: ModuleType
    context_tokens: int


@dataclass(frozen=True)
class Call:
    """One kernel on one set of inputs."""

    run: Callable[[], object]
    error: Callable[[], float]
    """Runs the kernel and its twin from equal inputs, and says how far apart they end. Called before `run`."""
    floor_bytes: int
    tolerance: float


@dataclass(frozen=True)
class Case:
    """One kernel at one shape; each call of `make` gives a set of inputs of its own."""

    kernel: str
    rows: int
    fed_tokens: int
    make: Callable[[Draw], Call]


def worst_error(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Largest relative error among pairs of tensors; infinite where shapes differ or a value is not finite."""
    worst = 0.0
    for our, their in zip(ours, theirs, strict=True):
        if our.shape != their.shape:
            return math.inf
        ours_double, theirs_double = our.double(), their.double()
        difference = (ours_double - theirs_double).norm() / theirs_double.norm().clamp(min=1e-30)
        error = difference.item()
        worst = max(worst, error) if math.isfinite(error) else math.inf
    return worst


def differing_rows(ours: Tensor, theirs: Tensor) -> Tensor:
    """bool [R]: rows of integers that are not equal."""
    return (ours != theirs).flatten(1).any(1) if ours.dim() > 1 else ours != theirs
