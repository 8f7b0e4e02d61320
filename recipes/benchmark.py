"""Speed on one GPU, with random weights: python -m recipes.benchmark what=kernels (of a decode step) or what=train

Prints a table and writes <run_dir>/benchmark.json. A kernel is timed only where it equals its torch twin; where
one does not, the rest is measured and the exit code is 1.
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
    if Ranks.from_environment().world_size > 1:
        raise UserError(f"what: {config.what} runs in one process; start it without torchrun")
    import torch
    import triton

    from .bench_timing import GraphTimer

    device = torch.device("cuda", torch.cuda.current_device())
    about = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "model": config.model.name,
        "dtype": config.model.dtype,
        "context_tokens": config.context_tokens,
        "copy_tb_per_s": config.copy_tb_per_s,
    }
    print("\n".join(f"  {name}: {value}" for name, value in about.items()), flush=True)
    if config.what == "train":
        from .bench_train_run import run_train

        run_train(config, about, Path(config.run_dir) / FILE)
        return
    with torch.no_grad():
        measure(config, device, GraphTimer(device, config.replays), about)


def measure(config: BenchmarkConfig, device: "torch.device", timer: "Timer", about: dict[str, Any]) -> None:
    """Kernels, then passes: prints each figure as it comes, and writes <run_dir>/benchmark.json after both.

    Raises UserError in the end where a kernel differs from its twin.
    """
    import torch

    from bailing_mtp.contracts.architecture import Architecture
    from bailing_mtp.kernels.triton import decode

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
    load = Workload(arch, Floors(arch, dtype.itemsize), decode, config.context_tokens)
    print(KERNEL_HEADING, flush=True)
    cases = kernel_cases(load, *shapes)
    kernels = measure_kernels(cases, draw, timer, config.copy_tb_per_s, lambda x: print(kernel_line(x), flush=True))
    # The passes need the most memory: what is measured by then is kept if they fail.
    write_figures(target, about, kernels, [])
    torch.cuda.empty_cache()
    print(PASS_HEADING, flush=True)
    view = random_view(arch, draw)
    passes = measure_passes(
        view, decode, draw, timer, *shapes, config.context_tokens, lambda x: print(pass_line(x), flush=True)
    )
    write_figures(target, about, kernels, passes)
    print(f"benchmark: {len(kernels)} kernel shapes, {len(passes)} passes, written to {target}")
    failed = [f"{x.kernel} rows={x.rows} S={x.fed_tokens}" for x in kernels if isinstance(x, KernelFailure)]
    if failed:
        raise UserError(f"what: kernels: {len(failed)} shapes differ from their torch twins: {', '.join(failed)}")


if __name__ == "__main__":
    run(main, BenchmarkConfig, "benchmark")
