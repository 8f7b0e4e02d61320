"""Asked to stop: one process, several ranks under the launcher, and what the launcher makes of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import elastic
from recipes.stop_signal import EXIT_STOPPED, SIGNALS, StopSignal
from tests.distributed.worlds import layout

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = (sys.executable, str(ROOT / "launch" / "elastic.py"), "--standalone", "--nproc-per-node", "2")
PATIENCE_S = 60.0
# Two ranks that step until one of them is asked: rank 1 ends last, as one does that still has files to close.
RANK = """
import os, sys, time, signal
import torch, torch.distributed as dist
from types import SimpleNamespace
from recipes.stop_signal import StopSignal
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} is {os.getpid()}", flush=True)
context = SimpleNamespace(world_size=2, device=torch.device("cpu"), is_writer=rank == 0, barrier=dist.barrier)
if sys.argv[1] == "busy":
    time.sleep(100)
if sys.argv[1] == "fails" and rank == 1:
    time.sleep(1)
    raise ValueError("a programmer's error")
with StopSignal(context) as stop:
    for step in range(1, 10000):
        if rank == 0 and step == 3:
            print("steps", flush=True)
        time.sleep(0.01)
        if stop.agreed():
            time.sleep(rank)
            print(f"rank {rank} saved", flush=True)
            stop.leave(step, 10000)
"""


def test_the_launcher_knows_the_exit_code():
    assert elastic.STOPPED == EXIT_STOPPED and elastic.SIGNALS == SIGNALS


@pytest.mark.parametrize("number", SIGNALS)
def test_any_signal_is_heard_and_the_handlers_are_put_back(number: signal.Signals):
    before = [signal.getsignal(each) for each in SIGNALS]
    with layout(tp=1, ep=1) as context, StopSignal(context) as stop:
        assert not stop.agreed()
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert stop.agreed()
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_second_interrupt_ends_at_once():
    with layout(tp=1, ep=1) as context, StopSignal(context), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


class Launched:
    """RANK on two ranks under the launcher."""

    def __init__(self, tmp_path: Path, mode: str, **environment: str) -> None:
        (tmp_path / "rank.py").write_text(RANK)
        self.log = tmp_path / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*LAUNCHER, str(tmp_path / "rank.py"), mode], stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            )  # fmt: skip

    def until(self, text: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.log.read_text().count(text) < (2 if text.startswith("rank") else 1):
            assert time.monotonic() < deadline_s and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        try:
            code = self.process.wait(timeout=PATIENCE_S)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return code, self.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_the_launcher_asks_its_ranks_and_waits_for_them(tmp_path: Path, number: signal.Signals):
    launched = Launched(tmp_path, "steps", STOP_MARK=str(tmp_path / "mark") if number == signal.SIGUSR1 else "")
    launched.until("steps")
    for _ in range(1 if number == signal.SIGINT else 3):
        launched.process.send_signal(number)
        time.sleep(0.2)
    code, text = launched.end()
    assert text.count(" saved") == 2 and "stopped by SIGTERM after step" in text and "Traceback" not in text
    # On several nodes the mark tells it, and the exit code is that of success.
    assert code == (0 if number == signal.SIGUSR1 else EXIT_STOPPED)
    assert (tmp_path / "mark").exists() == (number == signal.SIGUSR1)


def test_before_the_first_step_there_is_nothing_to_wait_for(tmp_path: Path):
    """Nor a mark: SLURM ends the other nodes' launchers like this when one node fails."""
    launched = Launched(tmp_path, "busy", STOP_MARK=str(tmp_path / "mark"))
    launched.until("rank")
    launched.process.send_signal(signal.SIGUSR1)
    code, text = launched.end()
    assert code == 128 + signal.SIGUSR1 and text.endswith("ended by SIGUSR1 before the first step\n")
    assert not (tmp_path / "mark").exists()


def test_a_failure_stays_a_failure(tmp_path: Path):
    code, text = Launched(tmp_path, "fails").end()
    assert code == 1 and "ValueError: a programmer's error" in text
