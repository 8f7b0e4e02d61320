"""The runs of what=decode and what=adaptive: each figure as it comes; rank 0 prints and writes the files."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.config import BenchmarkConfig, UserError
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.parallel.context import ParallelContext

from .bench_adaptive import ADAPTIVE_HEADING, AdaptiveFigure, adaptive_line, measure_adaptive
from .bench_case import Draw
from .bench_decode import measure_decode
from .bench_decode_figures import (
    DECODE_HEADING,
    DecodeFailure,
    DecodeFigure,
    decode_line,
    draw_ratios,
    write_decode,
)
from .bench_figures import write_json
from .bench_weights import random_view
from .session import DTYPES, join_ranks, leave_ranks

About = Callable[..., dict[str, Any]]


def run_decode(config: BenchmarkConfig, about: About, target: Path) -> None:
    """Rollouts of fixed k, and the chart of what they cost beside plain ones."""
    arch, context, stated, show = _begin(config, about, DECODE_HEADING)
    so_far: list[DecodeFigure | DecodeFailure] = []

    def keep(result: DecodeFigure | DecodeFailure) -> None:
        show(decode_line(result))
        so_far.append(result)
        if context.is_writer:
            write_decode(target, stated, so_far)

    with torch.no_grad():
        measure_decode(config, arch, _draw(config, context), context, keep)
    figures = [x for x in so_far if isinstance(x, DecodeFigure)]
    failed = [f"{x.kernel} rows={x.rows} k={x.drafts}" for x in so_far if isinstance(x, DecodeFailure)]
    if context.is_writer and figures:
        draw_ratios(figures, target.parent / "charts" / "break_even.png")
    show(f"benchmark: {len(figures)} shapes, written to {target}")
    leave_ranks()
    if failed:
        raise UserError(f"what: decode: {len(failed)} shapes differ from their torch twins: {', '.join(failed)}")


def run_adaptive(config: BenchmarkConfig, about: About, target: Path) -> None:
    """Rollouts whose k the controller chooses."""
    arch, context, stated, show = _begin(config, about, ADAPTIVE_HEADING)
    so_far: list[AdaptiveFigure] = []

    def keep(figure: AdaptiveFigure) -> None:
        show(adaptive_line(figure))
        so_far.append(figure)
        if context.is_writer:
            write_json(target, {**stated, "adaptive": [asdict(x) for x in so_far]})

    with torch.no_grad():
        view = random_view(arch, _draw(config, context), context.tp, context.ep)
        measure_adaptive(config, view, context, keep)
    show(f"benchmark: {len(so_far)} rollouts, written to {target}")
    leave_ranks()


def _begin(
    config: BenchmarkConfig, about: About, heading: str
) -> tuple[Architecture, ParallelContext, dict[str, Any], Callable[[str], None]]:
    """Architecture, ranks, what the figures are taken with, and how rank 0 prints."""
    arch = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    context = join_ranks(config, arch)
    stated = about(config, context.device, tp=context.tp, ep=context.ep, replicas=context.dp)

    def show(line: str) -> None:
        if context.is_writer:
            print(line, flush=True)

    show("\n".join(f"  {name}: {value}" for name, value in stated.items()) + "\n" + heading)
    return arch, context, stated, show


def _draw(config: BenchmarkConfig, context: ParallelContext) -> Draw:
    return Draw(context.device, DTYPES[config.model.dtype], config.seed)
