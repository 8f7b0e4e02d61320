"""torchrun without its own traceback, and with its own way to stop.

A rank that fails has already said why; only a rank that was killed could not speak, so its end is reported here.

Asked to stop (SIGTERM, SIGINT, SIGUSR1), torchrun would end the ranks within 30 s or, on SIGUSR1, die at once and leave
them. Here the ranks are asked instead, and have the time that they need to finish a step and a checkpoint.
"""

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

STOPPED = 75
"""The exit code of ranks that stopped when asked (EXIT_STOPPED of recipes/stop_signal.py)."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Relay:
    """Passes a request to stop on to the ranks."""

    def __init__(self) -> None:
        self.asked = 0
        for number in SIGNALS:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        ranks = psutil.Process().children()
        again = number == signal.SIGINT == self.asked
        self.asked = number
        if not ranks or again:
            # Nothing can be lost, or the user insists: torchrun's own way, which ends the ranks.
            raise SignalException("asked to stop", signal.Signals(number))
        for rank in ranks:
            # Before its first step a rank has nothing to save and dies of it.
            rank.send_signal(signal.SIGTERM)


def launch(arguments: list[str]) -> int:
    """Launch as torchrun does; returns the exit code of the rank that failed first, 0 if none did.

    STOPPED (75) is the ranks' own word that they stopped with a checkpoint. Ranks that a signal ended before their
    first step give 128 + its number.
    """
    # The launcher's own lines only repeat that a rank ended, and that it ended the others.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    relay = Relay()
    try:
        # The signals that torchrun keeps; its default has SIGTERM and SIGINT too.
        main(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        if relay.asked and failure.exitcode == -signal.SIGTERM:
            print(f"ended by {signal.Signals(relay.asked).name} before the first step", file=sys.stderr)
            return 128 + relay.asked
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {rank} ({socket.gethostname()}) was ended by {name}", file=sys.stderr)
        return 1
    return 0


def told(code: int, mark: str | None) -> int:
    """The exit code to end with. Where STOP_MARK names a file, a stop is told by that file and 0 instead.

    For launchers on several nodes, which never end at the same moment: SLURM takes the first other exit code for a
    failure and kills what still runs.
    """
    if code != STOPPED or not mark:
        return code
    try:
        Path(mark).touch()
    except OSError:
        return code
    return 0


if __name__ == "__main__":
    exit_code = told(launch(sys.argv[1:]), os.environ.get("STOP_MARK"))
    # A signal that is repeated must not change what is told.
    for repeated in SIGNALS:
        signal.signal(repeated, signal.SIG_IGN)
    sys.exit(exit_code)
