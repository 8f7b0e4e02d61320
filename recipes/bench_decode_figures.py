"""What a benchmark of whole rollouts finds, as lines of a table, as JSON and as a chart."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .bench_figures import write_json
from .panels import COLOURS


@dataclass(frozen=True)
class DecodeFigure:
    """A rollout of the engine at one shape; times are medians over its steps."""

    rows: int
    """Running on each replica."""
    drafts: int
    temperature: float
    prompt_tokens: int
    routing: str
    acceptance: str
    step_ms: float
    """From the end of a step to the end of the next."""
    slow_step_ms: float
    """What nine of ten steps stay under."""
    host_gap: float
    """Share of step_ms in which the GPU waits for the host."""
    accept_length: float
    tokens_per_second: float
    """Of all replicas."""
    speed_up: float
    """Of tokens per second, over the plain step of the same rows."""
    break_even: float
    """Step over plain step: the accept length from which speculation pays."""
    expected_break_even: float
    """The same ratio of the floors."""
    floor_ms: float
    ratio: float
    """step_ms / floor_ms."""
    experts_touched: float
    """Distinct experts of a trunk layer's verify pass, on average."""
    padded_rows: int
    row_mb: float
    """Memory of one row without its latents, 10^6 bytes."""
    memory_gb: float
    """All of the rollout's memory, GiB."""
    free_gb: float
    """What is left of the device, GiB."""


@dataclass(frozen=True)
class DecodeFailure:
    """A shape at which a kernel does not compute what its twin does; it gets no time."""

    rows: int
    drafts: int
    kernel: str
    error: float
    allowed: float


DECODE_HEADING = (
    f"{'rows':>5} {'k':>2} {'T':>4} {'prompt':>6} {'routing':>8} {'kept':>5} {'tokens/s':>9} {'accept':>7} "
    f"{'speed-up':>9} {'step ms':>8} {'90 %':>8} {'floor ms':>9} {'ratio':>6} "
    f"{'break-even':>11} {'gap':>6} {'experts':>8} {'GiB':>6} {'free':>6}"
)


def decode_line(x: DecodeFigure | DecodeFailure) -> str:
    """One line under DECODE_HEADING."""
    if isinstance(x, DecodeFailure):
        return (
            f"{x.rows:>5} {x.drafts:>2} no figure: {x.kernel} differs from its torch twin: relative error "
            f"{x.error:.1e}, allowed {x.allowed:.1e}"
        )
    return (
        f"{x.rows:>5} {x.drafts:>2} {x.temperature:>4.1f} {x.prompt_tokens:>6} {x.routing:>8} {x.acceptance:>5} "
        f"{x.tokens_per_second:>9.0f} {x.accept_length:>7.2f} {x.speed_up:>9.2f} {x.step_ms:>8.3f} "
        f"{x.slow_step_ms:>8.3f} {x.floor_ms:>9.3f} {x.ratio:>6.2f} "
        f"{x.break_even:>11.2f} {x.host_gap:>6.1%} {x.experts_touched:>8.1f} "
        f"{x.memory_gb:>6.2f} {x.free_gb:>6.1f}"
    )


def write_decode(path: Path, about: Mapping[str, Any], results: Sequence[DecodeFigure | DecodeFailure]) -> None:
    """Write the JSON file of what=decode. Appears whole or not at all."""
    failed = [asdict(x) for x in results if isinstance(x, DecodeFailure)]
    for failure in failed:
        failure["error"] = failure["error"] if math.isfinite(failure["error"]) else None
    figures = [asdict(x) for x in results if isinstance(x, DecodeFigure)]
    write_json(path, {**about, "decode": figures, "failed": failed})



def draw_ratios(figures: Sequence[DecodeFigure], target: Path) -> None:
    """Chart of the cost of a speculative step in plain steps, against rows: what an accept length must exceed."""
    first = figures[0]
    chosen = [
        x
        for x in figures
        if (x.temperature, x.prompt_tokens, x.routing) == (first.temperature, first.prompt_tokens, first.routing)
    ]
    figure = Figure(figsize=(7.2, 3.7), layout="constrained")
    axes = figure.add_subplot()
    for colour, k in zip(COLOURS, sorted({x.drafts for x in chosen if x.drafts}), strict=False):
        of_k = {x.rows: x for x in chosen if x.drafts == k}
        axes.plot(list(of_k), [x.break_even for x in of_k.values()], "-o", color=colour, label=f"k={k}")
        expected = [x.expected_break_even for x in of_k.values()]
        axes.plot(list(of_k), expected, ":", color=colour, label=f"k={k}, bytes alone")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({x.rows for x in chosen}), labels=[str(n) for n in sorted({x.rows for x in chosen})])
    axes.set_xlabel("rows")
    axes.set_ylabel("step / plain step")
    axes.set_title("Accept length from which speculation pays", loc="left", fontsize=11)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(target)
