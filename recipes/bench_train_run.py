"""The run of what=train: parts of one step, a line for every arm, kernels of one step; the JSON file after each.

The kernels come last: once it has recorded them, the profiler can make later launches slower.
"""

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.model.build import count_parameters
from bailing_mtp.parallel.context import ParallelContext, build_context
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import train_step

from .bench_figures import write_json
from .bench_train import cut_to_memory, make_state, measure_arm, passes, timed
from .bench_train_arms import HEADING, Arm, Figure, arms, compared, line, pack, without_mtp
from .bench_train_parts import head_seconds, kernel_table, part_seconds
from .kernel_settings import prepare_kernels
from .session import leave_ranks


def run_train(config: BenchmarkConfig, about: dict[str, Any], target: Path) -> None:
    """Measure, print each figure as it comes, and keep `target` complete after each."""
    context = build_context(1, 1, config.seed, "cuda")
    prepare_kernels(config, context)
    whole = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    memory_bytes = torch.cuda.get_device_properties(context.device).total_memory
    arch = cut_to_memory(config, whole, context, memory_bytes)
    model = config.model
    about |= {
        "layers": arch.num_layers, "layers_of_the_model": whole.num_layers, "kda": model.kda, "experts": model.experts,
        "attention": model.attention, "kernels": model.kernels, "optimizer": config.optim.name,
    }  # fmt: skip
    print(f"  optimizer: {config.optim.name}")
    print(f"  layers: {arch.num_layers} of {whole.num_layers} (what weights and optimizer states leave room for)")
    print(f"  kernels: kda={model.kda} experts={model.experts} attention={model.attention} kernels={model.kernels}")
    detail: dict[str, Any] = {}
    figures: dict[Arm, Figure | None] = {}

    def write() -> None:
        rows = [asdict(x) if x is not None else _out_of_memory(arm) for arm, x in figures.items()]
        write_json(target, {**about, **detail, "figures": rows})

    states = _States(config, arch, context)
    for arm in arms(config.tokens):
        state = states.get(arm)
        if not detail:
            detail = {"parts_ms": parts_of_a_step(config, state, arch, arm)}
            print(HEADING, flush=True)
        figures[arm] = measured(config, state, arch, arm, figures.get(without_mtp(arm)))
        if figures[arm] is None:
            states.forget()
        del state
        write()
    detail["kernels"] = kernels_of_a_step(states.get(next(arms(config.tokens))), arch, next(arms(config.tokens)))
    write()
    print(f"benchmark: {len(figures)} arms, written to {target}")
    leave_ranks()


class _States:
    """One model at a time, kept for as long as arms can share it."""

    def __init__(self, config: BenchmarkConfig, arch: Architecture, context: ParallelContext) -> None:
        self._make = lambda arm: make_state(config, arch, context, arm)
        self._kept: TrainState | None = None
        self._built_for: tuple[bool, str] | None = None

    def get(self, arm: Arm) -> TrainState:
        wanted = (arm.mtp.loss_scale is None, arm.recompute)
        if self._kept is None or wanted != self._built_for:
            self.forget()  # freed before the next one is made
            self._kept, self._built_for = self._make(arm), wanted
        return self._kept

    def forget(self) -> None:
        self._kept = None
        gc.collect()
        torch.cuda.empty_cache()


def _out_of_memory(arm: Arm) -> dict[str, Any]:
    return {"mtp": arm.name, "recompute": arm.recompute, "tokens": arm.tokens}


def measured(
    config: BenchmarkConfig, state: TrainState, arch: Architecture, arm: Arm, plain: Figure | None
) -> Figure | None:
    """A figure, compared with that of the arm without an MTP loss; None where the arm does not fit into memory."""
    try:
        figure = measure_arm(config, state, arch, arm)
    except torch.cuda.OutOfMemoryError:
        print(f"{arm.name:<18} {arm.recompute:<10} {arm.tokens:>6} out of memory", flush=True)
        return None
    if arm.mtp.loss_scale is not None and plain is not None:
        figure = compared(figure, plain)
    print(line(figure), flush=True)
    return figure


def parts_of_a_step(config: BenchmarkConfig, state: TrainState, arch: Architecture, arm: Arm) -> dict[str, float]:
    """Milliseconds of the parts of a step of this arm, printed."""
    batch, objective = pack(arch, arm.tokens, arm.trained_share), PretrainObjective(arm.mtp)
    started_s = time.monotonic()
    train_step(state, [batch], objective)
    torch.cuda.synchronize()
    print(f"  first step, with compilation: {time.monotonic() - started_s:.1f} s", flush=True)

    def both_passes() -> None:
        passes(state, batch, objective)

    step_s = timed(config, lambda: train_step(state, [batch], objective))
    passes_s = timed(config, both_passes)
    parts = part_seconds(state, both_passes)
    parts["heads"] = head_seconds(state, batch, lambda run: timed(config, run))
    parts["rest of the passes"] = passes_s - sum(parts.values())
    parts["optimizer"] = step_s - passes_s
    print(f"parts of a step of {arm.tokens} tokens, ms ({count_parameters(*_modules(state)):,} parameters):")
    for part, seconds in parts.items():
        print(f"  {part:<20} {seconds * 1e3:>8.1f}  {seconds / step_s:>6.1%}", flush=True)
    return {part: seconds * 1e3 for part, seconds in parts.items()}


def kernels_of_a_step(state: TrainState, arch: Architecture, arm: Arm) -> list[dict[str, Any]]:
    """The kernels of a step of this arm that take the most time, printed."""
    batch, objective = pack(arch, arm.tokens, arm.trained_share), PretrainObjective(arm.mtp)
    train_step(state, [batch], objective)
    kernels = kernel_table(lambda: train_step(state, [batch], objective))
    print("kernels of a step, ms:")
    for row in kernels:
        print(f"  {row['ms']:>8.2f} {row['calls']:>6}  {row['kernel'][:100]}", flush=True)
    return kernels


def _modules(state: TrainState) -> list[torch.nn.Module]:
    return [chunk.module for chunk in state.chunks]
