"""Speed on this machine's GPUs: python -m recipes.benchmark what=kernels|decode|train|grpo

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

FILE = "benchmark.json"


def main(config: BenchmarkConfig) -> None:
    if config.what != "decode" and Ranks.from_environment().world_size > 1:
        raise UserError(f"what: {config.what} runs in one process; start it without torchrun")
    {"kernels": kernels, "decode": decode, "train": train, "grpo": grpo}[config.what](config)


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

    from .bench_kernels_run import run_kernels
    from .bench_timing import GraphTimer

    device = torch.device("cuda", torch.cuda.current_device())
    stated = about(config, device, context_tokens=config.context_tokens)
    print("\n".join(f"  {name}: {value}" for name, value in stated.items()), flush=True)
    with torch.no_grad():
        run_kernels(config, device, GraphTimer(device, config.replays), stated, Path(config.run_dir) / FILE)


def train(config: BenchmarkConfig) -> None:
    import torch

    from .bench_train_run import run_train

    stated = about(config, torch.device("cuda", torch.cuda.current_device()))
    print("\n".join(f"  {name}: {value}" for name, value in stated.items()), flush=True)
    run_train(config, stated, Path(config.run_dir) / FILE)


def grpo(config: BenchmarkConfig) -> None:
    import torch

    from .bench_policy_run import run_policy

    shape = {"rows": config.rollout.max_running, "prompts": config.prompts, "samples": config.samples}
    stated = about(config, torch.device("cuda", torch.cuda.current_device()), new_tokens=config.new_tokens, **shape)
    print("\n".join(f"  {name}: {value}" for name, value in stated.items()), flush=True)
    run_policy(config, stated, Path(config.run_dir) / FILE)


def decode(config: BenchmarkConfig) -> None:
    """Rollouts: prints each figure as it comes; rank 0 writes the JSON file and the chart."""
    import torch

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
    target, so_far = Path(config.run_dir) / FILE, []

    def keep(result: "DecodeFigure | DecodeFailure") -> None:
        show(decode_line(result))
        so_far.append(result)
        if context.is_writer:
            write_decode(target, stated, so_far)

    with torch.no_grad():
        results = measure_decode(config, arch, draw, context, keep)
    figures = [x for x in results if isinstance(x, DecodeFigure)]
    failed = [f"{x.kernel} rows={x.rows} k={x.drafts}" for x in results if isinstance(x, DecodeFailure)]
    if context.is_writer:
        if figures:
            draw_ratios(figures, target.parent / "charts" / "break_even.png")
        print(f"benchmark: {len(figures)} shapes, written to {target}")
    leave_ranks()
    if failed:
        raise UserError(f"what: decode: {len(failed)} shapes differ from their torch twins: {', '.join(failed)}")


if __name__ == "__main__":
    run(main, BenchmarkConfig, "benchmark")
