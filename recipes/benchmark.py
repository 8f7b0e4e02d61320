"""Speed on this machine's GPUs: python -m recipes.benchmark what=kernels|decode|adaptive|train|grpo

Prints a table and writes <run_dir>/benchmark.json. A shape is timed only where its kernels equal their torch twins;
where one does not, the rest is measured and the exit code is 1.
"""

from functools import partial
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
    if config.what == "kernels" and Ranks.from_environment().world_size > 1:
        raise UserError(f"what: {config.what} runs in one process; start it without torchrun")
    verbs = {"kernels": kernels, "decode": decode, "adaptive": adaptive, "train": train, "grpo": grpo}
    verbs[config.what](config)


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
    from .bench_train_run import run_train

    run_train(config, partial(about, config), Path(config.run_dir) / FILE)


def grpo(config: BenchmarkConfig) -> None:
    from .bench_policy_run import run_policy

    shape = {"rows": config.rollout.max_running, "prompts": config.prompts, "samples": config.samples}
    stated = partial(about, config, new_tokens=config.new_tokens, **shape)
    run_policy(config, stated, Path(config.run_dir) / FILE)


def decode(config: BenchmarkConfig) -> None:
    from .bench_decode_run import run_decode

    run_decode(config, about, Path(config.run_dir) / FILE)


def adaptive(config: BenchmarkConfig) -> None:
    from .bench_decode_run import run_adaptive

    run_adaptive(config, about, Path(config.run_dir) / FILE)


if __name__ == "__main__":
    run(main, BenchmarkConfig, "benchmark")
