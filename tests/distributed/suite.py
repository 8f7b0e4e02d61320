"""All multi-process cases of one world size in one launch: importing megatron-core costs seconds per process.

    torchrun --nproc-per-node N -m tests.distributed.suite <reference.pt> <scratch directory> [<beginnings of names>]

Prints one line per finished case; the first failure ends the launch with its traceback, a case that hangs with the
stacks of its ranks. Where there are GPUs the cases are those of tests.gpu.cases_two.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bailing_mtp.parallel.context import init_distributed
from tests.distributed.cases import CASES
from tests.distributed.worlds import TIMEOUT_S

DONE = "case done:"
CASE_LIMIT_S = float(os.environ.get("CASE_LIMIT_S", "300"))


def main(reference_file: Path, scratch: Path, wanted: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    cases = CASES
    if torch.cuda.is_available():
        from tests.gpu.cases_two import CASES as cases

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_distributed("cuda" if torch.cuda.is_available() else "cpu", timeout_s=TIMEOUT_S)
    reference = torch.load(reference_file, weights_only=False, map_location="cpu")
    world_size = dist.get_world_size()
    for name, case in cases[world_size].items():
        if wanted and not name.startswith(wanted):
            continue
        started_s = time.monotonic()
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        case(reference, scratch)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{DONE} {name} {time.monotonic() - started_s:.1f}s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), Path(sys.argv[2]), tuple(sys.argv[3:]))
