"""What GRPO does to the demo's model, with its MTP layer off, detached, joint, trained and frozen.

    launch/torchrun.sh pretrain experiment=demo run_dir=<pretrained>
    python -m docs.experiments.grpo_mtp reward <pretrained>/checkpoints/step_<n> <directory> [seed,...] [steps]
    python -m docs.experiments.grpo_mtp accept <pretrained>/checkpoints/step_<n> <directory> [seed,...] [steps]
    python -m docs.experiments.grpo_mtp table <directory>
    python -m docs.experiments.grpo_mtp chart <directory> <png file>

reward: experiment=demo_grpo on one process, on 200 held-out prompts with four samples each; arms: no MTP loss and
plain rollouts; detached; joint. accept: a larger learning rate, so that the policy moves away from its start (its KL is
measured and has no weight); arms: the layer trained along (detached), and frozen. Seeds change prompts and noise, never
the held-out prompts. The table of accept is of its rollouts, five steps each: at the start, and to steps 16 and 31.
A finished run is a line of <directory>/results.jsonl, and is not run again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TASKS = "gcd,letter_counting,syllogism"
COMMON = (
    "experiment=demo_grpo", "parallel.tp=1", "parallel.ep=1", "log=quiet", "rl.prompts_per_rollout=24",
    f"data.path=reasoning_gym:{TASKS}?documents=6000&seed=0",
    f"data.valid_path=reasoning_gym:{TASKS}?documents=201&seed=0", "train.eval_samples=4",
)  # fmt: skip
ARMS = {
    "reward": {
        "off": ("mtp.loss_scale=null", "rollout.speculative_tokens=0"),
        "detached": ("mtp=detached",),
        "joint": ("mtp=joint",),
    },
    "accept": {
        "trained": ("mtp=detached", "optim.lr=3.0e-4", "rl.kl_coef=1.0e-9"),
        "frozen": ("mtp.loss_scale=null", "optim.lr=3.0e-4", "rl.kl_coef=1.0e-9"),
    },
}
STEPS = {"reward": 40, "accept": 31}
COLOURS = {"trained": "#0072B2", "frozen": "#D55E00"}


def run_all(what: str, checkpoint: str, directory: Path, seeds: list[int], steps: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for arm, overrides in ARMS[what].items():
            run_dir = directory / f"{what}_{arm}_{seed}"
            if run_dir.exists():
                print(f"{run_dir}: is there already", flush=True)
                continue
            command = [
                sys.executable, "-m", "recipes.grpo", *COMMON, *overrides, f"checkpoint.load={checkpoint}",
                f"seed={seed}", f"train.steps={steps}", f"train.eval_every={steps}", f"run_dir={run_dir}",
            ]  # fmt: skip
            started_s = time.monotonic()
            with (directory / f"{run_dir.name}.log").open("w") as log:
                ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
            line = {"what": what, "arm": arm, "seed": seed, "rc": ended.returncode, **summary(run_dir)}
            line |= {"seconds": time.monotonic() - started_s, "load": os.getloadavg()[1]}
            with (directory / "results.jsonl").open("a") as results:
                results.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def summary(run_dir: Path) -> dict[str, Any]:
    rows = metrics(run_dir)
    evaluated = [line for line in rows if "valid/reward_mean" in line]
    if len(evaluated) < 2:
        return {}
    names = ("reward_mean", "reward_standard_error", "accept_length")
    values = {
        f"{name}_{when}": line[f"valid/{name}"]
        for name in names
        for when, line in (("before", evaluated[0]), ("after", evaluated[-1]))
    }
    return values | {"kl": rows[-1].get("policy/kl"), "steps": rows[-1]["step"]}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def print_table(directory: Path) -> None:
    """Every run; of `reward` also the mean over seeds with the standard error of that mean."""
    file = directory / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    by_arm: dict[str, list[dict[str, Any]]] = {}
    row("arm", "seed", "reward before", "after", "accept length before", "after", "seconds", "load")
    row(*["---"] * 8)
    for line in sorted(lines, key=lambda x: (x["arm"], x["seed"])):
        if line["what"] != "reward" or "reward_mean_after" not in line:
            continue
        by_arm.setdefault(line["arm"], []).append(line)
        before, after = (
            f"{line[f'reward_mean_{when}']:.3f} +- {line[f'reward_standard_error_{when}']:.3f}"
            for when in ("before", "after")
        )
        lengths = (f"{line[f'accept_length_{when}']:.3f}" for when in ("before", "after"))
        row(line["arm"], line["seed"], before, after, *lengths, f"{line['seconds']:.0f}", f"{line['load']:.0f}")
    for arm, group in by_arm.items():
        means = []
        for name in ("reward_mean_before", "reward_mean_after", "accept_length_before", "accept_length_after"):
            values = [line[name] for line in group]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            means.append(f"{statistics.fmean(values):.3f} +- {error:.3f}")
        row(arm, f"{len(group)} seeds", *means, "", "")
    print()
    row("layer", "seed", *(f"{what}, {when}" for what in NAMES.values() for when in ("start", "step 16", "step 31")))
    row(*["---"] * 11)
    for run_dir in sorted(directory.glob("accept_*_*/")):
        _, arm, seed = run_dir.name.split("_")
        rows = [line for line in metrics(run_dir) if "rollout/accept_length" in line]
        if len(rows) >= 31:
            row(arm, seed, *(f"{mean_to(rows, name, end):.3f}" for name in NAMES for end in (5, 16, 31)))


NAMES = {
    "rollout/accept_length": "accept length",
    "predicted/accept_length": "predicted",
    "policy/kl": "KL",
}


def mean_to(rows: list[dict[str, Any]], name: str, end: int) -> float:
    """Mean of the five steps that end with `end`."""
    return statistics.fmean(line[name] for line in rows if end - 5 < line["step"] <= end)


def row(*cells: Any) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def draw(directory: Path, target: Path) -> None:
    """Accept length and KL per step, one line a run of `accept`."""
    figure = Figure((7.2, 6.6), dpi=120, layout="constrained")
    length_axes, kl_axes = figure.subplots(2)
    for arm, colour in COLOURS.items():
        for number, run_dir in enumerate(sorted(directory.glob(f"accept_{arm}_*/"))):
            rows = [line for line in metrics(run_dir) if "rollout/accept_length" in line and line["step"] <= 31]
            steps = [line["step"] for line in rows]
            label = f"MTP layer {arm}" if number == 0 else None
            lengths = smooth([line["rollout/accept_length"] for line in rows])
            predicted = smooth([line["predicted/accept_length"] for line in rows])
            length_axes.plot(steps, lengths, color=colour, label=label and f"{label}, measured")
            length_axes.plot(steps, predicted, ":", color=colour, label=label and f"{label}, predicted")
            kl_axes.plot(steps, smooth([line["policy/kl"] for line in rows]), color=colour, label=label)
    length_axes.axhline(1.0, color="0.4", linewidth=1, linestyle="--", label="plain = 1.0")
    length_axes.set_title("Tokens per verify step, k=2 (running mean of 5 steps)", loc="left", fontsize=11)
    kl_axes.axhline(0.1, color="0.4", linewidth=1, linestyle="--")
    kl_axes.set_title("KL of the policy from its start", loc="left", fontsize=11)
    length_axes.set_ylabel("tokens")
    length_axes.set_ylim(bottom=0.6)
    kl_axes.set_ylabel("nats per token")
    for axes in (length_axes, kl_axes):
        axes.set_xlabel("optimizer step")
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left" if axes is length_axes else "upper left")
    FigureCanvasAgg(figure).print_png(target)


def smooth(values: list[float]) -> list[float]:
    windows = [values[max(0, i - 2) : i + 3] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def main(arguments: list[str]) -> None:
    what = arguments[0]
    if what == "table":
        print_table(Path(arguments[1]))
    elif what == "chart":
        draw(Path(arguments[1]), Path(arguments[2]))
    else:
        seeds = [int(seed) for seed in arguments[3].split(",")] if len(arguments) > 3 else [1, 2, 3]
        steps = int(arguments[4]) if len(arguments) > 4 else STEPS[what]
        run_all(what, arguments[1], Path(arguments[2]), seeds, steps)


if __name__ == "__main__":
    main(sys.argv[1:])
