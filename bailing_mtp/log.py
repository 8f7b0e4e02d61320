"""Log lines of the library, and the one live progress line of a run."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

logger = logging.getLogger("bailing_mtp")


class ProgressLine:
    """One live line: rewritten in place on a terminal, printed now and then elsewhere.

    Only the rank that may print gives a stream; others pass None and the calls do nothing.
    """

    def __init__(self, stream: TextIO | None = sys.stderr, every_s: float = 5.0) -> None:
        self._stream = stream
        self._every_s = every_s
        self._printed_s = float("-inf")
        self._width = 0

    def show(self, text: str, final: bool = False) -> None:
        """Show `text`; `final` always prints and ends the line."""
        if self._stream is None:
            return
        now_s = time.monotonic()
        if self._stream.isatty():
            padded = text.ljust(self._width)
            self._width = len(text)
            self._stream.write(f"\r{padded}" + ("\n" if final else ""))
        elif final or now_s - self._printed_s >= self._every_s:
            self._printed_s = now_s
            self._stream.write(text + "\n")
        self._stream.flush()

    def end(self) -> None:
        """What is printed next begins a line of its own."""
        if self._stream is not None and self._stream.isatty() and self._width:
            self._stream.write("\n")


def duration(seconds: float) -> str:
    """Seconds as a short text: 42s, 3m05s, 2h10m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
