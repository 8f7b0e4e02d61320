"""Write a random Ling-3.0-tiny checkpoint in the Hugging Face layout, and time reading it back on one GPU.

    python -m docs.experiments.load_ling3_tiny write <directory>     # 16.4 GB
    python -m docs.experiments.load_ling3_tiny load <directory>

Prints seconds, GiB and the process's peak host memory. The results stand in docs/measurements.md.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import torch

from bailing_mtp.config import PretrainConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.model.build import build_model, count_parameters
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext, build_context
from bailing_mtp.weights.export import export_hf
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.load import load_hf, read_architecture
from bailing_mtp.weights.names import Shard
from recipes.compose import compose

BF16 = ModelSettings(torch.bfloat16, torch.bfloat16)


def peak_host_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def write(context: ParallelContext, directory: Path) -> None:
    plain = compose(PretrainConfig, "pretrain", ["model=ling3_tiny"])
    arch = Architecture.from_hf(plain["model"]["architecture"], "model.architecture", strict=True)
    built = build_model(arch, BF16, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed=0)
    started_s = time.monotonic()
    export_hf(directory, arch, Shard(), built.trunk, built.mtp)
    print(f"{count_parameters(*built.modules):,} parameters written in {time.monotonic() - started_s:.1f} s")


def load(context: ParallelContext, directory: Path) -> None:
    arch = read_architecture(directory)
    built = build_model(arch, BF16, context, with_mtp=True)
    print(f"peak host memory before reading: {peak_host_gib():.2f} GiB")
    for attempt in ("first", "again"):
        started_s = time.monotonic()
        report = load_hf(directory, arch, Shard(), built.trunk, built.mtp)
        torch.cuda.synchronize()
        seconds, read_gib = time.monotonic() - started_s, report.read_bytes / 2**30
        print(f"{attempt}: {read_gib:.2f} GiB in {seconds:.1f} s, peak host memory {peak_host_gib():.2f} GiB")


if __name__ == "__main__":
    {"write": write, "load": load}[sys.argv[1]](build_context(1, 1, 0, "cuda"), Path(sys.argv[2]))
