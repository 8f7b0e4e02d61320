"""One pair of axes of a chart: which colours, which lines, what the legend says.

One run: its metrics together, one colour each. Several runs: one metric, one colour a run. Held-out values are
dashed, with a mark at each evaluation.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

# Okabe and Ito's palette, without its yellow: told apart with any colour vision, and on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
SMOOTH_FROM_POINTS = 40
"""Noisy series of at least this many points are drawn faint, with a running mean over them."""


class Run(NamedTuple):
    """One run's metrics.jsonl, and its name in the legend."""

    label: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `keys`: regular expressions of metric names, in legend order."""

    title: str
    unit: str
    keys: tuple[str, ...]
    smooth: bool = True
    log: bool = False
    share: bool = False
    """Runs from 0 to 1."""
    plain: float | None = None
    """A level to compare with."""


def fill(axes: Axes, panel: Panel, keys: Sequence[str], runs: Sequence[Run]) -> None:
    names = list(dict.fromkeys(metric_name(key) for key in keys))
    for index, run in enumerate(runs):
        for key in keys:
            colour = COLOURS[(index if len(runs) > 1 else names.index(metric_name(key))) % len(COLOURS)]
            label = run.label if len(runs) > 1 else metric_name(key)
            _line(axes, run, key, label, colour, panel.smooth)
    if panel.plain is not None:
        axes.axhline(panel.plain, color="0.4", linewidth=1, linestyle=":", label=f"plain = {panel.plain:.1f}")
    axes.set_title(panel.title if len(runs) == 1 else _with_metric(panel.title, names[0]), loc="left", fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(panel.unit)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if any(line.get_alpha() for line in axes.lines):
        axes.set_title("faint: every log point; bold: running mean", loc="right", fontsize=8, color="0.4")
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if panel.share:
        axes.set_ylim(0, 1)
    if len(runs) > 1 or names != [panel.unit]:
        axes.legend(frameon=False, fontsize=9)


def _with_metric(title: str, metric: str) -> str:
    return title if metric.lower() in title.lower() else f"{title}: {metric}"


def _line(axes: Axes, run: Run, key: str, label: str, colour: str, smooth: bool) -> None:
    held = [index for index, row in enumerate(run.rows) if row.get(key) is not None]
    if not held:
        return
    if key.startswith("valid/"):
        steps, values = zip(*((run.rows[index]["step"], run.rows[index][key]) for index in held), strict=True)
        axes.plot(steps, values, "--o", color=colour, markersize=3.5, linewidth=1.2, label=f"{label}, held out")
        return
    rows = run.rows[held[0] : held[-1] + 1]
    steps = [row["step"] for row in rows]
    # A log point that measured nothing breaks the line.
    values = [math.nan if row.get(key) is None else row[key] for row in rows]
    if smooth and len(held) >= SMOOTH_FROM_POINTS:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        values = _running_mean(values)
    alone = _without_neighbours(values)
    axes.plot(steps, values, color=colour, linewidth=1.6, label=label, marker="o", markersize=3.5, markevery=alone)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean over the 5 % of the points around each; it starts at the first point, ends with what there is, and has the
    gaps of `values`."""
    half = max(1, len(values) // 40)
    means = []
    for i, value in enumerate(values):
        around = values[max(0, i - half) : i + min(i, half) + 1]
        known = [x for x in around if not math.isnan(x)]
        means.append(value if math.isnan(value) else sum(known) / len(known))
    return means


def _without_neighbours(values: Sequence[float]) -> list[int]:
    """Points between gaps, which no line shows."""
    is_gap = [True, *map(math.isnan, values), True]
    return [i for i in range(len(values)) if is_gap[i] and not is_gap[i + 1] and is_gap[i + 2]]


def metric_name(key: str) -> str:
    """What a metric is called in a legend, the same for training and held-out values."""
    text = re.sub("^(mtp|dpo|reward)_", "", key.partition("/")[2])
    if key.startswith(("rollout/accept_depth", "predicted/accept_depth")):
        return f"{'measured' if key.startswith('rollout/') else 'predicted'}, depth {depth_of(key)}"
    if key.startswith("predicted/"):
        return "predicted from acceptance"
    if re.fullmatch(r"\w+_depth\d+", text):
        return f"MTP depth {depth_of(text)}"
    known = {"lm_loss": "language model", "accept_length": "measured", "lr": "learning rate"}
    if text == "grad_norm":
        return "MTP layer" if key.startswith("mtp/") else "trunk"
    return known.get(text, text.replace("_", " "))


def depth_of(key: str) -> int:
    return int(key.rpartition("depth")[2])
