"""How a run ends on a user's mistake: exit code 1 and one message, whatever the number of ranks."""

import errno
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from bailing_mtp.config import UserError

from .ranks import Ranks

OF_FILES = (UserError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""A user's mistakes whatever they name; any other OSError is one if it names a file, or tells of the disk."""
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Full or read-only: writing to an open file names none."""
ROOT = Path(__file__).resolve().parents[1]
# The launcher ends the other ranks within about a second of the first exit.
FIRST_RANK_PRINTS_WITHIN_S = 10.0


@contextmanager
def user_errors(ranks: Ranks, patience_s: float = FIRST_RANK_PRINTS_WITHIN_S) -> Iterator[None]:
    """Turn a UserError, or a file that cannot be read or written, into one message and exit code 1.

    A mistake in the config meets all ranks alike, so the first rank prints it at once and the launcher then
    ends the others while they wait. A rank that outlives `patience_s` failed alone, and says so itself.
    Any other exception keeps its traceback, which ends with the rank and its host.
    """

    def name_rank(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and ranks.world_size > 1:
            error.add_note(f"on {ranks}{_phase(trace)}")

    try:
        with ExitStack() as stack:
            stack.push(name_rank)
            yield
    except (UserError, OSError) as error:
        if not isinstance(error, OF_FILES) and error.filename is None and error.errno not in OF_THE_DISK:
            raise
        if not ranks.is_first:
            time.sleep(patience_s)
        print(_message(error, ranks), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _phase(trace: TracebackType | None) -> str:
    """Where the run was: the innermost function of this project, such as one that waited for the other ranks."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(trace)]
    # Beside what the environment holds, which often lies inside the checkout.
    own = [code for code in codes if _is_own(Path(code.co_filename))]
    return f", in {own[-1].co_name} of {Path(own[-1].co_filename).relative_to(ROOT)}" if own else ""


def _is_own(file: Path) -> bool:
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts


def fail_together(error: UserError | None) -> None:
    """Raise the same UserError on every rank if any rank brings one. Collective: every rank must call it.

    Without a process group this is the local `raise`. Ranks with equal messages are named together.
    """
    # torch is slow to import, and most mistakes are found before it is needed.
    import torch.distributed as dist

    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    mine = None if error is None else (str(error), str(Ranks.from_environment()))
    everyone: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    by_message: dict[str, list[str]] = {}
    for message, who in filter(None, everyone):
        by_message.setdefault(message, []).append(who)
    if not by_message:
        return
    if len(by_message) == 1 and None not in everyone:
        raise UserError(next(iter(by_message)))
    raise UserError("\n".join(f"{', '.join(who)}: {message}" for message, who in by_message.items()))


def _message(error: UserError | OSError, ranks: Ranks) -> str:
    # An OSError of this project's own carries a whole message; the system's carries a file and a reason.
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    where = "" if ranks.is_first else f"{ranks}: "
    return f"error: {where}" + text.replace("\n", "\n  ")
