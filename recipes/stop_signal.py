"""Stopping on request: a signal to any rank ends the run on all ranks after the step in progress, with a checkpoint.

SLURM's warning before the time limit or a preemption, `kill` and Ctrl-C all end here. A second Ctrl-C ends the process
at once; other signals may come again, since schedulers and launchers repeat theirs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from bailing_mtp.parallel.context import ParallelContext

EXIT_STOPPED = 75
"""Exit code of a run that was stopped and can go on (EX_TEMPFAIL of sysexits.h); launch/elastic.py knows it."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """Listens while the steps run: `with StopSignal(context) as stop`. In the main thread."""

    def __init__(self, context: ParallelContext, release: Callable[[], None] = lambda: None) -> None:
        """release: gives back what must not outlive the process groups, such as captured collectives."""
        self._context, self._release = context, release
        self._received = self._agreed = 0
        self._previous: dict[int, Any] = {}
        self._leaves = False

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # A signal that is repeated must not cut the end of a run that is leaving.
            signal.signal(number, signal.SIG_IGN if self._leaves else handler)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. Collective: every rank calls it once a step, and all hear the same."""
        # Not written back to what was received: a signal may arrive at any line.
        self._agreed = self._received
        if self._context.world_size > 1:
            asked = torch.tensor([self._agreed], device=self._context.device)
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            self._agreed = int(asked.item())
        return self._agreed > 0

    def leave(self, step: int, steps: int) -> NoReturn:
        """Say why, wait for all ranks, end with EXIT_STOPPED. Collective; the checkpoint is already written."""
        self._leaves = True
        if self._context.is_writer:
            name = signal.Signals(self._agreed).name
            print(f"stopped by {name} after step {step}/{steps}; the same run_dir goes on from there", flush=True)
        # The first exit can get the others killed, and the writing rank may still have files to end.
        self._context.barrier()
        self._release()
        if dist.is_initialized():
            dist.destroy_process_group()
        raise SystemExit(EXIT_STOPPED)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT == self._received:
            signal.default_int_handler(number, frame)
        self._received = number
