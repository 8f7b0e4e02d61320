"""Speed on this machine's GPUs: python -m recipes.benchmark what=kernels|decode

Prints a table and writes <run_dir>/benchmark.json. A shape is timed only where its kernels equal their torch twins;
where one does not, the rest is measured and the exit code is 1.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bailing_mtp.config import BenchmarkConfig, UserError

from .common import run
from .ranks import Ranks

# torch and Triton take seconds to import; mistakes in the config are reported before.
if TYPE_CHECKING:
    import torch

    from .bench_timing import Timer

FILE = "benchmark.json"


def main(config: BenchmarkConfig) -> None:
    if config.what == "kernels" and Ranks.from_environment().world_size > 1:
        raise UserError("what: kernels runs in one process; start it without torchrun")
    import torch

    with torch.no_grad():
        if config.what == "decode":
            decode(config)
        else:
            kernels(config)


def about(config: BenchmarkConfig, device: "torch.device", **shape: Any) -> dict[str, Any]:
    """What the figures were taken with."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "model": config.model.name,
        "dtype": config.model.dtype,
        "copy_tb_per_s": config.copy_tb_per_s,
        **shape,
    }


def kernels(config: BenchmarkConfig) -> None:
    import torch

    from .bench_timing import GraphTimer

    device = torch.device("cuda", torch.cuda.current_device())
    stated = about(config, device, context_tokens=config.context_tokens)
    print("\n".join(f"  {name}: {value}" for name, value in stated.items()), flush=True)
    measure(config, device, GraphTimer(device, config.replays), stated)


def decode(config: BenchmarkConfig) -> None:
    """Rollouts: prints each figure as it comes; rank 0 writes the JSON file and the chart."""
    from bailing_mtp.contracts.architecture import Architecture

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
    from .session import DTYPES, join_ranks, leave_ranks

    arch = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    context = join_ranks(config, arch)
    stated = about(config, context.device, tp=context.tp, ep=context.ep, replicas=context.dp)

    def show(line: str) -> None:
        if context.is_writer:
            print(line, flush=True)

    show("\n".join(f"  {name}: {value}" for name, value in stated.items()) + "\n" + DECODE_HEADING)
    draw = Draw(context.device, DTYPES[config.model.dtype], config.seed)
    results = measure_decode(config, arch, draw, context, lambda x: show(decode_line(x)))
    figures = [x for x in results if isinstance(x, DecodeFigure)]
    failed = [f"{x.kernel} rows={x.rows} k={x.drafts}" for x in results if isinstance(x, DecodeFailure)]
    if context.is_writer:
        target = Path(config.run_dir) / FILE
        write_decode(target, stated, results)
        if figures:
            draw_ratios(figures, target.parent / "charts" / "break_even.png")
        print(f"benchmark: {len(figures)} shapes, written to {target}")
    leave_ranks()
    if failed:
        raise UserError(f"what: decode: {len(failed)} shapes differ from their torch twins: {', '.join(failed)}")


def measure(config: BenchmarkConfig, device: "torch.device", timer: "Timer", stated: dict[str, Any]) -> None:
    """Kernels, then passes: prints each figure as it comes, and writes <run_dir>/benchmark.json after both.

    Raises UserError in the end where a kernel differs from its twin.
    """
    import torch

    from bailing_mtp.contracts.architecture import Architecture
    from bailing_mtp.kernels.triton import decode as kernel_set

    from .bench_case import Draw, Workload
    from .bench_figures import KERNEL_HEADING, PASS_HEADING, KernelFailure, kernel_line, pass_line, write_figures
    from .bench_floors import Floors
    from .bench_kernels import kernel_cases, measure_kernels
    from .bench_passes import measure_passes
    from .bench_weights import random_view
    from .session import DTYPES

    arch = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    dtype, shapes, target = DTYPES[config.model.dtype], (config.rows, config.fed_tokens), Path(config.run_dir) / FILE
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


if __name__ == "__main__":
    run(main, BenchmarkConfig, "benchmark")
