"""What a benchmark finds, as lines of a table and as JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KernelFigure:
    """Time of one kernel at one shape."""

    kernel: str
    rows: int
    fed_tokens: int
    us: float
    """Per call."""
    floor_bytes: int
    floor_us: float
    ratio: float
    """us / floor_us."""
    error: float
    """Relative, against the torch twin."""


@dataclass(frozen=True)
class KernelFailure:
    """A shape at which the kernel does not compute what its twin does; it gets no time."""

    kernel: str
    rows: int
    fed_tokens: int
    error: float
    allowed: float


@dataclass(frozen=True)
class PassFigure:
    """Time of one pass of a decode step, or of the passes of a step together (without sampling)."""

    name: str
    rows: int
    fed_tokens: int
    ms: float


KERNEL_HEADING = f"{'kernel':<20} {'rows':>5} {'S':>2} {'us':>9} {'floor us':>9} {'ratio':>7} {'error':>8}"
PASS_HEADING = f"{'pass':<20} {'rows':>5} {'S':>2} {'ms':>9}"


def kernel_line(result: KernelFigure | KernelFailure) -> str:
    """One line under KERNEL_HEADING."""
    shape = f"{result.kernel:<20} {result.rows:>5} {result.fed_tokens:>2}"
    if isinstance(result, KernelFailure):
        return f"{shape} differs from its torch twin: relative error {result.error:.1e}, allowed {result.allowed:.1e}"
    return f"{shape} {result.us:>9.2f} {result.floor_us:>9.2f} {result.ratio:>7.2f} {result.error:>8.1e}"


def pass_line(figure: PassFigure) -> str:
    """One line under PASS_HEADING."""
    return f"{figure.name:<20} {figure.rows:>5} {figure.fed_tokens:>2} {figure.ms:>9.3f}"


def write_figures(
    path: Path,
    about: Mapping[str, Any],
    kernels: Sequence[KernelFigure | KernelFailure],
    passes: Sequence[PassFigure],
) -> None:
    """Write the JSON file: what was measured, where, and every figure."""
    failed = [asdict(result) for result in kernels if isinstance(result, KernelFailure)]
    for failure in failed:
        # JSON has no number for it.
        failure["error"] = failure["error"] if math.isfinite(failure["error"]) else None
    content = {
        **about,
        "kernels": [asdict(result) for result in kernels if isinstance(result, KernelFigure)],
        "failed": failed,
        "passes": [asdict(figure) for figure in passes],
    }
    write_json(path, content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Appears whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.rename(path)
