"""Where a run's metrics go: <run_dir>/metrics.jsonl always, Weights & Biases as log.wandb says. Rank 0 only."""

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bailing_mtp.config import RunConfig
from bailing_mtp.errors import UserError
from bailing_mtp.training.metrics import MetricsFile, truncate_after

ROOT = Path(__file__).resolve().parents[1]
STEP = "train/step"
# Every family of metrics is drawn over the optimizer step, never over the number of log calls.
FAMILIES = ("train", "mtp", "valid", "dpo", "policy", "rollout", "predicted", "reward", "time", "memory")
GIT_PATIENCE_S = 10


class Sinks:
    """Writes one log point to every place; `where` says at the end what lies where."""

    def __init__(self, config: RunConfig, verb: str, first_step: int = 0) -> None:
        """`first_step`: finished steps of a run that continues; later lines of its file are cut."""
        self.metrics_path = Path(config.run_dir) / "metrics.jsonl"
        truncate_after(self.metrics_path, first_step)
        self._file = MetricsFile(self.metrics_path)
        self._wandb = None if config.log.wandb == "disabled" else _WandbRun(config, verb)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(step, values)
        if self._wandb is not None:
            self._wandb.write(step, values)

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.close()

    def where(self) -> list[str]:
        """One line for each place."""
        lines = [f"metrics: {self.metrics_path}"]
        if self._wandb is not None:
            lines.append(self._wandb.where())
        return lines


def run_id(run_dir: str | Path) -> str:
    """The same for the same directory, so that a run that continues keeps its id."""
    return hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:16]


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """Commit of this code and whether files differ from it; nothing where it is no git checkout."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=GIT_PATIENCE_S
    ).stdout.strip()


def _histograms(values: dict[str, float]) -> dict[str, Any]:
    """The accept lengths of a rollout, from the share of its steps that kept 1, 2, ... tokens."""
    import wandb

    names = (f"rollout/accept_share{n}" for n in itertools.count(1))
    shares = [values[name] for name in itertools.takewhile(values.__contains__, names)]
    edges = [n + 0.5 for n in range(len(shares) + 1)]
    return {"rollout/accept_lengths": wandb.Histogram(np_histogram=(shares, edges))} if shares else {}


class _WandbRun:
    def __init__(self, config: RunConfig, verb: str) -> None:
        # Imported here: it takes a second, and log.wandb=disabled needs no wandb at all.
        import wandb

        self._run_dir = Path(config.run_dir)
        self._is_lost = False
        self._is_offline = config.log.wandb == "offline"
        try:
            self._run = wandb.init(
                project=config.log.project,
                name=self._run_dir.name,
                id=run_id(config.run_dir),
                dir=str(self._run_dir),
                job_type=verb,
                mode=config.log.wandb,
                resume="allow",
                config={**config.model_dump(mode="json"), "verb": verb, "git": git_state()},
                settings=wandb.Settings(x_disable_stats=True, console="off", silent=True),
            )
        except wandb.Error as error:
            raise UserError(
                f"log.wandb: {config.log.wandb!r} cannot start ({error}); allowed: offline, disabled, "
                "or online with WANDB_API_KEY set"
            ) from error
        self._run.define_metric(STEP)
        for family in FAMILIES:
            self._run.define_metric(f"{family}/*", step_metric=STEP)

    def write(self, step: int, values: dict[str, float]) -> None:
        # Its own count of steps follows the optimizer's, so that a step which a crashed run repeats is the same step.
        row = {STEP: step, **values, **_histograms(values)}
        self._unless_lost(lambda: self._run.log(row, step=step, commit=True))

    def close(self) -> None:
        self._unless_lost(self._run.finish)

    def _unless_lost(self, call: Callable[[], None]) -> None:
        """A scheduler's SIGTERM ends wandb's own process too; the run still has a step and a checkpoint to finish."""
        if self._is_lost:
            return
        try:
            call()
        except ConnectionError:
            self._is_lost = True
            print("warning: wandb: its process is gone; metrics.jsonl has everything", file=sys.stderr, flush=True)

    def where(self) -> str:
        if self._is_offline:
            pattern = self._run_dir / "wandb" / f"offline-run-*-{self._run.id}*"
            return f"wandb: offline; send it with: wandb sync {pattern}"
        return f"wandb: {self._run.url}"
