"""The recipe at tiny sizes under Triton's interpreter, with a clock made up; then its checks on broken kernels.

Started by test_recipe.py in a process of its own: interpretation is decided before the first kernel is defined.
Its argument is the run directory; the last line that it prints is JSON.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from bailing_mtp.kernels.triton import decode
from recipes.bench_case import Draw, Workload
from recipes.bench_floors import Floors
from recipes.bench_kernels import kernel_cases
from recipes.bench_kernels_run import run_kernels
from tests.benchmark.sizes import SMALLEST, config_of, smallest


def scaled(x: object) -> object:
    """The same result, 2 % too large where it is a number."""
    if isinstance(x, tuple):
        return tuple(scaled(item) for item in x)
    return x * 1.02 if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def wrong(name: str) -> object:
    """The kernel of this name with results that are a little off; what it writes in place is taken back."""
    kernel = getattr(decode, name)

    def run(*arguments: object) -> object:
        if name == "write_latents":
            return None
        return scaled(kernel(*arguments))

    return run


def errors(kernels: object, n: int, S: int) -> list[list[object]]:
    """[kernel, error, tolerance] of every case."""
    arch, draw = smallest(), Draw(torch.device("cpu"), torch.float32, 0)
    load = Workload(arch, Floors(arch, draw.dtype.itemsize), kernels, context_tokens=20)
    calls = [(case.kernel, case.make(draw)) for case in kernel_cases(load, (n,), (S,))]
    return [[kernel, call.error(), call.tolerance] for kernel, call in calls]


def three_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    assert calls
    return 3e-6


if __name__ == "__main__":
    sizes = [f"model.architecture.{key}={value}" for key, value in SMALLEST.items()]
    config = config_of(
        "what=kernels", "model=tiny", "rows=[3]", "fed_tokens=[1,3]", "context_tokens=20", *sizes,
        f"run_dir={sys.argv[1]}",
    )  # fmt: skip
    broken = SimpleNamespace(**{name: wrong(name) for name in decode.__all__})
    with torch.no_grad():
        target = Path(config.run_dir) / "benchmark.json"
        run_kernels(config, torch.device("cpu"), three_microseconds, {"device": "none"}, target)
        print(json.dumps(errors(broken, 3, 1)))
