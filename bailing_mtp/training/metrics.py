"""Metrics of a run: one JSON object per log point, and the rates that go into it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TextIO

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


class Throughput:
    """Tokens per second between two readings, and the time left at that pace."""

    def __init__(self, steps: int, first_step: int = 0) -> None:
        self._steps = steps
        self._first_step = first_step
        self._start_s = self._last_s = time.monotonic()
        self._tokens = 0.0

    def add(self, tokens: float) -> None:
        self._tokens += tokens

    def read(self) -> float:
        """Tokens per second since the last reading."""
        now_s = time.monotonic()
        rate = self._tokens / max(1e-9, now_s - self._last_s)
        self._last_s, self._tokens = now_s, 0.0
        return rate

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def left(self, step: int) -> str:
        """Time left after `step` finished steps, as text."""
        done = step - self._first_step
        return duration(self.elapsed_s() / max(1, done) * (self._steps - step))
