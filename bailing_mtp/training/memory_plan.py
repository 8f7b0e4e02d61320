"""What a training run will need of a rank's device memory at most, computed before anything is loaded.

Phases follow one another and do not add up: the peak is the largest of them. Weights, gradients, optimizer states, a
reference model and a rollout's memory that is kept are there in all of them.

Sources: megatron-core's DistributedDataParallel (16-bit and fp32 parameters in buffers, gradients in fp32) and
distributed optimizer (states sharded over data-parallel ranks); training.offload for what moves during a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from bailing_mtp.config import MtpConfig, OptimConfig
from bailing_mtp.errors import UserError
from bailing_mtp.training.activations import FP32, PassSizes, pass_bytes
from bailing_mtp.training.adamw8bit import PIECE_ELEMENTS
from bailing_mtp.training.offload import SLICE_BYTES
from bailing_mtp.training.pieces import BLOCK

GIB = 2**30
RESERVE = 0.03
"""Share of the device that no plan may use: what the allocator cannot hand out (fragments between blocks)."""
LIBRARY_BYTES = 2**26
"""Workspaces of the matrix libraries."""


class ModelCounts(NamedTuple):
    """Parameters of one rank. 16-bit ones have fp32 master weights in adamw; `dense` ones are replicated over all
    data-parallel ranks, experts over fewer."""

    weight_bytes: int
    """Of all weights and expert biases, frozen ones included."""
    dense_half: int
    expert_half: int
    dense_fp32: int
    expert_fp32: int
    largest: int
    """Elements of the largest trained parameter."""

    @property
    def trained(self) -> int:
        return self.dense_half + self.expert_half + self.dense_fp32 + self.expert_fp32


def count_model(trained: Sequence[nn.Module], frozen: Sequence[nn.Module] = ()) -> ModelCounts:
    """Count modules, which may be on the meta device."""
    modules = [*trained, *frozen]
    weight_bytes = sum(p.numel() * p.itemsize for module in modules for p in module.parameters())
    weight_bytes += sum(x.numel() * x.itemsize for module in modules for x in module.buffers())
    counts = dict.fromkeys(((False, True), (True, True), (False, False), (True, False)), 0)
    largest = 0
    for parameter in (p for module in trained for p in module.parameters()):
        is_expert = not getattr(parameter, "allreduce", True)
        counts[is_expert, parameter.dtype is not torch.float32] += parameter.numel()
        largest = max(largest, parameter.numel())
    return ModelCounts(weight_bytes, *counts.values(), largest)


class OptimizerStates(NamedTuple):
    """Bytes on one rank, wherever they lie."""

    master: int
    moments: int


def optimizer_states(counts: ModelCounts, optim: OptimConfig, dp: int, expert_dp: int) -> OptimizerStates:
    """adamw: fp32 master weights of 16-bit parameters and two fp32 moments. adamw8bit: two moments of a byte a value
    and an fp32 scale a block (those of small parameters are fp32, a few kilobytes)."""
    half = -(-counts.dense_half // dp) - (-counts.expert_half // expert_dp)
    full = -(-counts.dense_fp32 // dp) - (-counts.expert_fp32 // expert_dp)
    if optim.name == "adamw8bit":
        return OptimizerStates(0, 2 * (half + full + -(-(half + full) // BLOCK) * FP32))
    return OptimizerStates(half * FP32, 2 * (half + full) * FP32)


@dataclass(frozen=True)
class RolloutBytes:
    """What rollouts of the policy add. memory: caches and states. graphs: captured steps. working: of prefills."""

    memory: int
    graphs: int
    working: int
    stays: bool
    """Whether memory and graphs stay while the policy is trained."""


@dataclass(frozen=True)
class PlanInputs:
    """Everything a plan is computed from."""

    counts: ModelCounts
    passes: PassSizes
    optim: OptimConfig
    mtp: MtpConfig
    dp: int = 1
    expert_dp: int = 1
    reference_bytes: int = 0
    rollout: RolloutBytes | None = None
    least_tokens: int = 1
    """Of a microbatch: its longest row, or pair of rows."""


@dataclass(frozen=True)
class TrainingPlan:
    """Bytes of one rank. `parts` are there all the time, `phases` whole sums."""

    parts: dict[str, int]
    activations: int
    """What the forward keeps; part of the phase of forward and backward."""
    phases: dict[str, int]

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most, and what it needs."""
        name = max(self.phases, key=lambda phase: self.phases[phase])
        return name, self.phases[name]

    def lines(self, room_bytes: int) -> list[str]:
        """For a user: parts, phases, peak against the device."""
        parts = "  ".join(f"{name} {_gib(size)}" for name, size in self.parts.items() if size)
        phases = "  ".join(f"{name} {_gib(size)}" for name, size in self.phases.items())
        phase, peak = self.peak
        reserve = int(room_bytes * RESERVE)
        return [
            f"memory plan of this rank, GiB: {parts}",
            f"  phases: {phases} (activations kept for the backward: {_gib(self.activations)})",
            f"  peak {_gib(peak)} ({phase}) of {_gib(room_bytes)}; in reserve {_gib(reserve)}, left "
            f"{_gib(room_bytes - reserve - peak)}",
        ]


FORWARD_BACKWARD, STEP, ROLLOUT, START = "forward and backward", "optimizer step", "rollout", "start"


def plan_training(inputs: PlanInputs) -> TrainingPlan:
    """The plan of one rank."""
    counts, optim, rollout = inputs.counts, inputs.optim, inputs.rollout
    states = optimizer_states(counts, optim, inputs.dp, inputs.expert_dp)
    at_rest = 0 if optim.offload == "cpu" else sum(states)
    weights, gradients = counts.weight_bytes, counts.trained * FP32
    kept = rollout.memory + rollout.graphs if rollout is not None and rollout.stays else 0
    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer states": at_rest,
        "reference model": inputs.reference_bytes,
        "rollout memory": kept,
        "libraries": LIBRARY_BYTES,
    }
    base = sum(parts.values())
    passes = pass_bytes(inputs.passes, inputs.mtp)
    # DDP moves parameters into buffers, the largest of which exists twice for a moment.
    copied = 2 * max(counts.dense_half, counts.expert_half, 2 * counts.dense_fp32, 2 * counts.expert_fp32)
    phases = {
        START: weights + gradients + max(copied, states.master),
        FORWARD_BACKWARD: base + passes.peak,
        STEP: base + step_bytes(counts, optim, states),
    }
    if rollout is not None:
        phases[ROLLOUT] = base - kept + rollout.memory + rollout.graphs + rollout.working
    return TrainingPlan(parts, passes.kept, phases)


def step_bytes(counts: ModelCounts, optim: OptimConfig, states: OptimizerStates) -> int:
    """What an optimizer step adds to what is there between steps.

    Norms, clipping and Adam's fused update work in place. 8-bit states are updated a piece at a time, which is copied
    with its gradient. States that are offloaded come back: master weights whole, moments a slice of parameters after
    another.
    """
    if optim.name == "adamw8bit":
        return PIECE_ELEMENTS * (2 + FP32)
    if optim.offload == "none":
        return 0
    slice_bytes = min(counts.trained * FP32, max(SLICE_BYTES, counts.largest * FP32))
    return states.master + min(2 * slice_bytes, states.moments)


def require_fit(inputs: PlanInputs, room_bytes: int) -> TrainingPlan:
    """The plan, if it fits into `room_bytes` of device memory with the reserve. Raises UserError with keys that would
    help, and what the peak would be with each."""
    plan = plan_training(inputs)
    phase, peak = plan.peak
    allowed = int(room_bytes * (1 - RESERVE))
    if peak <= allowed:
        return plan
    ways = [f"{key} ({_gib(size)})" for key, size in ways_to_fit(inputs) if size < peak]
    if inputs.rollout is not None and (phase == ROLLOUT or inputs.rollout.stays):
        ways.append("a smaller rollout.memory_gb or rollout.max_running")
    ways.append("parallel.tp or parallel.ep over more GPUs")
    raise UserError(
        f"train: a rank needs {_gib(peak)} GiB at its peak ({phase}), and {_gib(allowed)} of its GPU's "
        f"{_gib(room_bytes)} may be planned for; what would help, with the peak in GiB: {', '.join(ways)}\n"
        + "\n".join(plan.lines(room_bytes))
    )


def ways_to_fit(inputs: PlanInputs) -> list[tuple[str, int]]:
    """Keys that lower a plan, each alone and allowed beside the others, with the peak that it would leave."""
    optim, passes = inputs.optim, inputs.passes
    changed: list[tuple[str, PlanInputs]] = []
    if (optim.name, optim.offload, optim.fused) == ("adamw", "none", "none"):
        changed.append(("optim.offload=cpu", replace(inputs, optim=optim.model_copy(update={"offload": "cpu"}))))
        if inputs.dp == inputs.expert_dp == 1:
            eight = optim.model_copy(update={"name": "adamw8bit"})
            changed.append(("optim.name=adamw8bit", replace(inputs, optim=eight)))
    for mode in ("selective", "full"):
        if passes.settings.recompute not in (mode, "full"):
            settings = replace(passes.settings, recompute=mode)
            changed.append((f"train.recompute={mode}", replace(inputs, passes=replace(passes, settings=settings))))
    half = passes.tokens // 2
    if half >= inputs.least_tokens:
        changed.append((f"train.microbatch_tokens={half}", replace(inputs, passes=replace(passes, tokens=half))))
    return [(key, plan_training(other).peak[1]) for key, other in changed]


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.1f}"
