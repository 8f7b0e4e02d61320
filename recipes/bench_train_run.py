"""The run of what=train: parts and kernels of one step first, then a line for every arm, then the JSON file."""

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.model.build import count_parameters
from bailing_mtp.parallel.context import build_context
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import train_step

from .bench_figures import write_json
from .bench_train import Arm, Figure, arms, cut_to_memory, make_state, measure_arm, pack, passes, timed
from .bench_train_parts import head_seconds, kernel_table, part_seconds
from .kernel_settings import prepare_kernels
from .session import leave_ranks

HEADING = (
    f"{'mtp':<18} {'recompute':<10} {'tokens':>6} {'step ms':>8} {'fwd+bwd':>8} {'tokens/s':>9} {'TFLOP/s':>8} "
    f"{'MFU':>6} {'peak GiB':>8} {'loss':>7}"
)


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
    figures: list[dict[str, Any]] = []
    detail: dict[str, Any] = {}
    state, built_for = None, None
    for arm in arms(config.tokens):
        wanted = (arm.mtp.loss_scale is None, arm.recompute)
        if wanted != built_for:
            state = None  # freed before the next one is made
            gc.collect()
            torch.cuda.empty_cache()
            state, built_for = make_state(config, arch, context, arm), wanted
        if not detail:
            detail = one_step(config, state, arch, arm)
            print(HEADING, flush=True)
        figure = measured(config, state, arch, arm)
        if figure is None:
            # What the failed step left behind goes with its state.
            state, built_for = None, None
        figures.append(figure or {"mtp": arm.name, "recompute": arm.recompute, "tokens": arm.tokens})
        write_json(target, {**about, **detail, "figures": figures})
    print(f"benchmark: {len(figures)} arms, written to {target}")
    leave_ranks()


def measured(config: BenchmarkConfig, state: TrainState, arch: Architecture, arm: Arm) -> dict[str, Any] | None:
    """A figure; None where the arm does not fit into memory."""
    try:
        figure = measure_arm(config, state, arch, arm)
    except torch.cuda.OutOfMemoryError:
        print(f"{arm.name:<18} {arm.recompute:<10} {arm.tokens:>6} out of memory", flush=True)
        return None
    print(line(figure), flush=True)
    return asdict(figure)


def line(x: Figure) -> str:
    """One line under HEADING."""
    mfu = "" if x.mfu is None else f"{x.mfu:.1%}"
    return (
        f"{x.mtp:<18} {x.recompute:<10} {x.tokens:>6} {x.step_ms:>8.1f} {x.forward_backward_ms:>8.1f} "
        f"{x.tokens_per_second:>9.0f} {x.model_tflops_per_s:>8.1f} {mfu:>6} {x.peak_gib:>8.1f} {x.loss:>7.3f}"
    )


def one_step(config: BenchmarkConfig, state: TrainState, arch: Architecture, arm: Arm) -> dict[str, Any]:
    """Parts and kernels of a step of this arm, printed."""
    batch, objective = pack(arch, arm.tokens, arm.trained_share), PretrainObjective(arm.mtp)
    started_s = time.monotonic()
    train_step(state, [batch], objective)
    torch.cuda.synchronize()
    print(f"  first step, with compilation: {time.monotonic() - started_s:.1f} s", flush=True)

    def both_passes() -> None:
        passes(state, batch, objective)

    def step() -> None:
        train_step(state, [batch], objective)

    step_s, passes_s = timed(config, step), timed(config, both_passes)
    parts = part_seconds(state, both_passes)
    parts["heads"] = head_seconds(state, batch, lambda run: timed(config, run))
    parts["rest of the passes"] = passes_s - sum(parts.values())
    parts["optimizer"] = step_s - passes_s
    print(f"parts of a step of {arm.tokens} tokens, ms ({count_parameters(*_modules(state)):,} parameters):")
    for part, seconds in parts.items():
        print(f"  {part:<20} {seconds * 1e3:>8.1f}  {seconds / step_s:>6.1%}", flush=True)
    kernels = kernel_table(step)
    print("kernels of a step, ms:")
    for row in kernels:
        print(f"  {row['ms']:>8.2f} {row['calls']:>6}  {row['kernel'][:100]}", flush=True)
    return {"parts_ms": {part: seconds * 1e3 for part, seconds in parts.items()}, "kernels": kernels}


def _modules(state: TrainState) -> list[torch.nn.Module]:
    return [chunk.module for chunk in state.chunks]
