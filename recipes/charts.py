"""PNG charts of metrics: one file per question, nothing for a question that the runs do not answer.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .panels import Panel, Run, depth_of, fill, metric_name

PANEL_INCHES = (7.2, 3.7)
DPI = 120

LOSS = Panel("Loss", "nats per token", (r"(train|valid)/lm_loss", r"(mtp/|valid/mtp_)loss_depth\d+"))
ACCEPTANCE = (
    Panel("Drafts that the trunk would accept", "share", (r"(mtp/|valid/mtp_)accept_depth\d+",), share=True),
    Panel("First choice equal to the trunk's", "share", (r"(mtp/|valid/mtp_)top1_depth\d+",), share=True),
)
ACCEPT_LENGTH = Panel(
    "Tokens per verify step",
    "tokens",
    (r"(rollout|valid)/accept_length", r"predicted/accept_length"),
    plain=1.0,
)
CHARTS: dict[str, tuple[Panel, ...]] = {
    "overview": (LOSS, *ACCEPTANCE),
    "loss": (LOSS,),
    "acceptance": ACCEPTANCE,
    "rl": (
        Panel("Reward", "per sample", (r"(reward/|valid/reward_)mean",)),
        ACCEPT_LENGTH,
        Panel("Policy loss", "per token or sample", (r"policy/loss",)),
    ),
    "accept_length": (
        ACCEPT_LENGTH,
        Panel("Drafts accepted, given those before", "share", (r"(rollout|predicted)/accept_depth\d+",), share=True),
    ),
    "throughput": (
        Panel("Training throughput", "tokens per second", (r"train/tokens_per_second",)),
        Panel("Model FLOPs utilisation", "share of peak", (r"train/mfu",)),
        Panel("Rollout throughput", "tokens per second", (r"rollout/tokens_per_second",)),
    ),
    "optimizer": (
        Panel("Gradient norm before clipping", "norm", (r"(train|mtp)/grad_norm",), log=True),
        Panel("Learning rate", "learning rate", (r"train/lr",), smooth=False),
    ),
    "reward": (Panel("Reward", "per sample", (r"(reward/|valid/reward_)(mean|solved)",)),),
    "policy": (
        Panel("Probability of what the rollout drew, rollout against trainer", "nats", (r"rollout/logprob_gap",)),
        Panel("Experts that rollout and trainer choose alike", "share", (r"rollout/route_agreement",), share=True),
        Panel("Entropy of the policy", "nats per token", (r"policy/entropy",)),
        Panel("Response", "tokens", (r"rollout/response_tokens",)),
    ),
    "preference": (
        Panel("Preference loss", "nats per pair", (r"(dpo/|valid/dpo_)loss",)),
        Panel("Pairs in the right order", "share", (r"(dpo/|valid/dpo_)accuracy",), share=True),
        Panel("Implicit rewards", "nats, times beta", (r"dpo/(chosen_reward|rejected_reward|margin)",)),
    ),
}


def write_charts(runs: Sequence[Run], target: Path) -> list[Path]:
    """Write every chart whose first panel has data to `target`, as <chart>.png; returns the files."""
    files = []
    for name, panels in CHARTS.items():
        figure = draw(runs, panels)
        if figure is not None:
            target.mkdir(parents=True, exist_ok=True)
            FigureCanvasAgg(figure).print_png(target / f"{name}.png")
            files.append(target / f"{name}.png")
    return files


def draw(runs: Sequence[Run], panels: Sequence[Panel]) -> Figure | None:
    """One figure, its panels below each other; None if no run holds a metric of the first."""
    runs = [_with_predicted(run) for run in runs]
    filled = [(panel, keys) for panel in panels for keys in _groups(panel, runs)]
    if not filled or filled[0][0] is not panels[0]:
        return None
    width, height = PANEL_INCHES
    figure = Figure((width, height * len(filled)), dpi=DPI, layout="constrained")
    all_axes = figure.subplots(len(filled), squeeze=False)[:, 0]
    for axes, (panel, keys) in zip(all_axes, filled, strict=True):
        fill(axes, panel, keys, runs)
    return figure


def _with_predicted(run: Run) -> Run:
    """Adds 1 + a1 + a1 a2 + ... where every depth has its acceptance: the accept length that they promise, unless the
    run predicts."""
    names = {key for row in run.rows for key in row}
    depths = sorted((key for key in names if re.fullmatch(r"mtp/accept_depth\d+", key)), key=depth_of)
    if not depths or "predicted/accept_length" in names:
        return run
    return Run(run.label, [{**row, "predicted/accept_length": _promised(row, depths)} for row in run.rows])


def _promised(row: dict[str, Any], depths: Sequence[str]) -> float | None:
    shares = [row.get(key) for key in depths]
    return None if None in shares else 1 + sum(accumulate(shares, lambda a, b: a * b))


def _groups(panel: Panel, runs: Sequence[Run]) -> list[list[str]]:
    """Metric names that share axes: all of a panel for one run, train and held-out of one metric for several."""
    present = {key for run in runs for row in run.rows for key in row if row[key] is not None}
    matched = [key for pattern in panel.keys for key in sorted(present, key=_order) if re.fullmatch(pattern, key)]
    if len(runs) == 1:
        return [matched] if matched else []
    names = dict.fromkeys(metric_name(key) for key in matched)
    return [[key for key in matched if metric_name(key) == name] for name in names]


def _order(key: str) -> tuple[str, int, str]:
    """Depth 10 after depth 9, training before held out, trunk before MTP."""
    section, _, rest = key.partition("/")
    rest = rest.removeprefix("mtp_")
    stem, _, depth = rest.partition("_depth")
    return stem, int(depth or 0), {"train": "0", "valid": "2"}.get(section, "1")
