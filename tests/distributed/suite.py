"""All multi-process cases of one world size in one launch: importing megatron-core costs seconds per process.

    torchrun --nproc-per-node N -m tests.distributed.suite <reference.pt> <scratch directory>

Prints one line per finished case; the first failure ends the launch with its traceback.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bailing_mtp.parallel.context import init_distributed
from tests.distributed.cases import CASES

DONE = "case done:"


def main(reference_file: Path, scratch: Path) -> None:
    torch.set_num_threads(1)
    init_distributed("cpu", timeout_s=60.0)
    reference = torch.load(reference_file, weights_only=False)
    world_size = dist.get_world_size()
    for name, case in CASES[world_size].items():
        started_s = time.monotonic()
        case(reference, scratch)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{DONE} {name} {time.monotonic() - started_s:.1f}s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
