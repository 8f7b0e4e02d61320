"""Kernels and passes of a decode step on one GPU: python -m recipes.benchmark what=kernels"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.config import BenchmarkConfig, UserError
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.kernels.triton import decode as kernel_set

from .bench_case import Draw, Workload
from .bench_figures import KERNEL_HEADING, PASS_HEADING, KernelFailure, kernel_line, pass_line, write_figures
from .bench_floors import Floors
from .bench_kernels import kernel_cases, measure_kernels
from .bench_passes import measure_passes
from .bench_timing import Timer
from .bench_weights import random_view
from .session import DTYPES


def run_kernels(
    config: BenchmarkConfig, device: torch.device, timer: Timer, stated: Mapping[str, Any], target: Path
) -> None:
    """Kernels, then passes: prints each figure as it comes, and writes the JSON file `target` after both.

    Raises UserError in the end where a kernel differs from its twin.
    """
    arch = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    dtype, shapes = DTYPES[config.model.dtype], (config.rows, config.fed_tokens)
    draw = Draw(device, dtype, config.seed)
    load = Workload(arch, Floors(arch, dtype.itemsize), kernel_set, config.context_tokens)
    print(KERNEL_HEADING, flush=True)
    cases = kernel_cases(load, *shapes)
    figures = measure_kernels(cases, draw, timer, config.copy_tb_per_s, lambda x: print(kernel_line(x), flush=True))
    # The passes need the most memory: what is measured by then is kept if they fail.
    write_figures(target, stated, figures, [])
    torch.cuda.empty_cache()
    print(PASS_HEADING, flush=True)
    view = random_view(arch, draw)
    passes = measure_passes(
        view, kernel_set, draw, timer, *shapes, config.context_tokens, lambda x: print(pass_line(x), flush=True)
    )
    write_figures(target, stated, figures, passes)
    print(f"benchmark: {len(figures)} kernel shapes, {len(passes)} passes, written to {target}")
    failed = [f"{x.kernel} rows={x.rows} S={x.fed_tokens}" for x in figures if isinstance(x, KernelFailure)]
    if failed:
        raise UserError(f"what: kernels: {len(failed)} shapes differ from their torch twins: {', '.join(failed)}")
