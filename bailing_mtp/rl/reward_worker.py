"""One reward process: python -m bailing_mtp.rl.reward_worker <reward>. Started by the pool, never by hand.

Frames on stdin and stdout are a 4-byte little-endian length and so many bytes. In: a pickled sample. Out: JSON,
first {"ready": true} or {"refused": message}, then {"reward": r} or {"error": message} for each sample.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, BinaryIO

from bailing_mtp.errors import UserError
from bailing_mtp.rl.rewards import Reward, checked, resolve

LENGTH_BYTES = 4
_WATCH_S = 1.0
# What a reward may raise and the process goes on; anything else ends it, and counts as a crash.
_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, NameError,
    OSError, RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    n_bytes = int.from_bytes(head, "little")
    body = stream.read(n_bytes)
    return body if len(body) == n_bytes else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    stream.flush()


def main(name: str) -> None:
    # What a reward prints must not get between the frames.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A scheduler's signals reach every process of a job; what they mean is the trainer's business. Not ignored but
    # handled, since programs that a reward starts would inherit the first.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _go_on)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        reward = resolve(name)
    except UserError as error:
        _reply(replies, {"refused": str(error)})
        return
    _reply(replies, {"ready": True})
    while (body := read_frame(sys.stdin.buffer)) is not None:
        _reply(replies, _judge(reward, pickle.loads(body)))


def _go_on(number: int, frame: FrameType | None) -> None:
    """The pool ends this process, by SIGKILL."""


def _judge(reward: Reward, sample: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"reward": checked(reward, sample)}
    except _FAILURES as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"}


def _reply(stream: BinaryIO, value: dict[str, Any]) -> None:
    write_frame(stream, json.dumps(value).encode())


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
