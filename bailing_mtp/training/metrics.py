"""Metrics of a run: one JSON object per log point, and the rates that go into it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from bailing_mtp.errors import UserError
from bailing_mtp.log import duration


class MetricsFile:
    """Appends `{"step": n, "<key>": value, ...}` lines to metrics.jsonl; each line is complete or absent."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Values that are not finite are written as null, which JSON can hold."""
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """The lines of a metrics.jsonl in file order; a last line that a killed run left unfinished is left out.

    Raises UserError naming file and line for anything else that is not a JSON object with a step.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif number < len(lines) or line.endswith("\n"):
            raise UserError(f"{path}:{number}: is no line of metrics; allowed: a JSON object with a step")
    return rows


def truncate_after(path: Path, step: int) -> int:
    """Cut the lines of later steps, and an unfinished last line: a run that continues after `step` writes
    them again. The file is replaced as a whole or left as it was. Returns the number of lines cut.
    """
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8")
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    new_text = "".join(json.dumps(row) + "\n" for row in kept)
    if new_text != text:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(new_text, encoding="utf-8")
        partial.replace(path)
    return len(text.splitlines()) - len(kept)


class Interval(NamedTuple):
    """What was trained between two readings."""

    seconds: float
    """Pauses left out."""
    tokens: float


class Throughput:
    """Tokens and seconds between two readings, and the time left at the pace so far."""

    def __init__(self, steps: int, first_step: int = 0) -> None:
        self._steps = steps
        self._first_step = first_step
        self._start_s = self._last_s = time.monotonic()
        self._tokens = self._paused_s = 0.0

    def add(self, tokens: float) -> None:
        self._tokens += tokens

    def read(self) -> Interval:
        """Since the last reading."""
        now_s = time.monotonic()
        interval = Interval(max(1e-9, now_s - self._last_s), self._tokens)
        self._last_s, self._tokens = now_s, 0.0
        return interval

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside belongs to no interval; it still counts for the time left."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            pause_s = time.monotonic() - begin_s
            self._last_s += pause_s
            self._paused_s += pause_s

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def trained_s(self) -> float:
        """Elapsed time without pauses."""
        return max(1e-9, self.elapsed_s() - self._paused_s)

    def left(self, step: int) -> str:
        """Time left after `step` finished steps, as text."""
        done = step - self._first_step
        return duration(self.elapsed_s() / max(1, done) * (self._steps - step))
