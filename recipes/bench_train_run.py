"""The run of what=train: parts of one step, a line for every arm, kernels of one step; the JSON file after each.

The kernels come last: once it has recorded them, the profiler can make later launches slower.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.model.build import count_parameters
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import train_step

from .bench_figures import write_json
from .bench_train import States, measure_arm, passes, timed
from .bench_train_arms import HEADING, Arm, Figure, arms, compared, line, pack, without_mtp
from .bench_train_parts import head_seconds, kernel_table, part_seconds
from .bench_train_size import cut_to_memory
from .session import join_ranks, leave_ranks

Show = Callable[[str], None]


def run_train(config: BenchmarkConfig, about: Callable[[torch.device], dict[str, Any]], target: Path) -> None:
    """Measure, print each figure as it comes, and keep `target` complete after each. about: what is said of a GPU."""
    whole = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    context = join_ranks(config, whole)
    memory_bytes = torch.cuda.get_device_properties(context.device).total_memory
    arch = cut_to_memory(config, whole, context, memory_bytes)
    model = config.model
    stated = about(context.device) | {
        "tp": context.tp, "ep": context.ep, "dp": context.dp, "layers": arch.num_layers,
        "layers_of_the_model": whole.num_layers, "kda": model.kda, "experts": model.experts,
        "attention": model.attention, "kernels": model.kernels, "optimizer": config.optim.name,
    }  # fmt: skip

    def show(line: str) -> None:
        if context.is_writer:
            print(line, flush=True)

    show("\n".join(f"  {name}: {value}" for name, value in stated.items()))
    detail: dict[str, Any] = {}
    figures: dict[Arm, Figure | None] = {}

    def write() -> None:
        rows = [asdict(x) if x is not None else _out_of_memory(arm) for arm, x in figures.items()]
        if context.is_writer:
            write_json(target, {**stated, **detail, "figures": rows})

    states = States(config, arch, context)
    for arm in itertools.islice(arms(config.tokens), config.lines):
        state = states.get(arm)
        if not detail:
            detail = {"parts_ms": parts_of_a_step(config, state, arch, arm, show)}
            show(HEADING)
        figures[arm] = measured(config, state, arch, arm, figures.get(without_mtp(arm)), show)
        if figures[arm] is None:
            states.forget()
        del state
        write()
    first = next(arms(config.tokens))
    detail["kernels"] = kernels_of_a_step(states.get(first), arch, first, show)
    write()
    show(f"benchmark: {len(figures)} arms, written to {target}")
    leave_ranks()


def _out_of_memory(arm: Arm) -> dict[str, Any]:
    return {"mtp": arm.name, "recompute": arm.recompute, "tokens": arm.tokens}


def measured(
    config: BenchmarkConfig, state: TrainState, arch: Architecture, arm: Arm, plain: Figure | None, show: Show
) -> Figure | None:
    """A figure, compared with that of the arm without an MTP loss; None where the arm does not fit into memory. Of
    several ranks the others would wait for one that does not: it ends them all."""
    try:
        figure = measure_arm(config, state, arch, arm)
    except torch.cuda.OutOfMemoryError:
        if state.context.world_size > 1:
            raise
        show(f"{arm.name:<18} {arm.recompute:<10} {arm.tokens:>6} out of memory")
        return None
    if arm.mtp.loss_scale is not None and plain is not None:
        figure = compared(figure, plain)
    show(line(figure))
    return figure


def parts_of_a_step(
    config: BenchmarkConfig, state: TrainState, arch: Architecture, arm: Arm, show: Show
) -> dict[str, float]:
    """Milliseconds of the parts of a step of this arm, printed."""
    batch, objective = pack(arch, arm.tokens, arm.trained_share), PretrainObjective(arm.mtp)
    started_s = time.monotonic()
    train_step(state, [batch], objective)
    torch.cuda.synchronize()
    show(f"  first step, with compilation: {time.monotonic() - started_s:.1f} s")

    def both_passes() -> None:
        passes(state, batch, objective)

    step_s = timed(config, lambda: train_step(state, [batch], objective))
    passes_s = timed(config, both_passes)
    parts = part_seconds(state, both_passes)
    parts["heads"] = head_seconds(state, batch, lambda run: timed(config, run))
    parts["rest of the passes"] = passes_s - sum(parts.values())
    parts["optimizer"] = step_s - passes_s
    show(f"parts of a step of {arm.tokens} tokens, ms ({count_parameters(*_modules(state)):,} parameters):")
    for part, seconds in parts.items():
        show(f"  {part:<20} {seconds * 1e3:>8.1f}  {seconds / step_s:>6.1%}")
    return {part: seconds * 1e3 for part, seconds in parts.items()}


def kernels_of_a_step(state: TrainState, arch: Architecture, arm: Arm, show: Show) -> list[dict[str, Any]]:
    """The kernels of a step of this arm that take the most time, printed."""
    batch, objective = pack(arch, arm.tokens, arm.trained_share), PretrainObjective(arm.mtp)
    train_step(state, [batch], objective)
    kernels = kernel_table(lambda: train_step(state, [batch], objective))
    show("kernels of a step, ms:")
    for row in kernels:
        show(f"  {row['ms']:>8.2f} {row['calls']:>6}  {row['kernel'][:100]}")
    return kernels


def _modules(state: TrainState) -> list[torch.nn.Module]:
    return [chunk.module for chunk in state.chunks]
