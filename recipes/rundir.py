"""One directory per run, chosen once for all ranks and all starts of a job, and never another run's."""

import os
import time
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from bailing_mtp.config import ConfigError, RunConfig

from .ranks import Ranks

RESOLVED = "config.resolved.yaml"
JOB = ".job"
"""Holds RUN_JOB of the launch that made the directory."""
METRICS = "metrics.jsonl"
WANDB = "wandb"
DATA = "data"
"""Holds token shards, which are used again only where they are of the same documents."""


def default_run_dir(verb: str, ranks: Ranks) -> str:
    """RUN_DIR as the launch scripts set it, else outputs/<verb>/<timestamp>.

    Ranks of one host share their launcher, whose start names the directory: each rank's own clock would give
    several. Ranks of several hosts share nothing yet and get no default.
    """
    given = os.environ.get("RUN_DIR")
    if given:
        return given
    if ranks.world_size == 1:
        started_s = time.time()
    elif ranks.world_size == ranks.local_world_size:
        started_s = psutil.Process(os.getppid()).create_time()
    else:
        return "???"
    return f"outputs/{verb}/{time.strftime('%Y-%m-%d_%H-%M-%S', time.localtime(started_s))}"


def require_run_dir(plain: dict[str, object], ranks: Ranks) -> None:
    """Refuse a launch on several hosts that was told no run directory."""
    if "run_dir" not in plain:
        raise ConfigError(
            f"run_dir: {ranks.world_size} ranks, {ranks.local_world_size} of them on this host, must agree on "
            "one directory; give run_dir=<dir>, or set RUN_DIR to the same directory on every host"
        )


def check_run_dir(config: RunConfig) -> list[str]:
    """Refuse a run_dir that holds another run, unless this one continues it or starts it again (returns a line then).

    Reads only; rank 0 only.

    Starting again is for a job that a scheduler restarts: the launcher says so (RUN_RESTARTS > 0, and the RUN_JOB
    that made the directory), the config is the same to the last key, and there is no checkpoint that could be lost.
    """
    run_dir = Path(config.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir: {config.run_dir!r} is a file; name a directory")
    if not (run_dir / RESOLVED).exists() and not (run_dir / METRICS).exists():
        return []
    has_checkpoint = any(run_dir.glob("checkpoints/step_*"))
    if config.checkpoint.resume == "auto" and has_checkpoint:
        return []
    if not has_checkpoint and _is_restart(config):
        return ["starts again at step 0: the job's last start ended before its first checkpoint"]
    raise ConfigError(
        f"run_dir: {config.run_dir!r} already holds a run; name another directory, or continue it with "
        "checkpoint.resume=auto, which needs a checkpoint under its checkpoints/"
    )


def open_run_dir(config: RunConfig) -> list[str]:
    """Make run_dir and write the config in force, once; rank 0 only.

    A run that continues keeps the file of its first start; returns a line for each key that differs from it.
    """
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    target = run_dir / RESOLVED
    values = config.model_dump(mode="json")
    if target.exists():
        return _changes(config)
    job = os.environ.get("RUN_JOB")
    if job:
        (run_dir / JOB).write_text(job + "\n", encoding="utf-8")
    partial = target.with_suffix(".partial")
    partial.write_text(OmegaConf.to_yaml(OmegaConf.create(values)), encoding="utf-8")
    partial.rename(target)
    return []


def withdraw_run_dir(config: RunConfig) -> None:
    """Take back what open_run_dir wrote, where nothing else came of the start: a mistake that was found later does not
    claim the directory that the corrected command names again. Rank 0 only."""
    run_dir = Path(config.run_dir)
    metrics = run_dir / METRICS
    if not run_dir.is_dir() or (metrics.is_file() and metrics.stat().st_size):
        return
    if {path.name for path in run_dir.iterdir()} <= {RESOLVED, JOB, DATA, METRICS, WANDB}:
        for name in (RESOLVED, JOB, METRICS):
            (run_dir / name).unlink(missing_ok=True)
        if (run_dir / DATA).is_dir() and not any((run_dir / DATA).iterdir()):
            (run_dir / DATA).rmdir()


def note_in_resolved(config: RunConfig, note: str) -> None:
    """Append a comment to the resolved config: a fact of the run's start that no key says. Rank 0 only."""
    with (Path(config.run_dir) / RESOLVED).open("a", encoding="utf-8") as stream:
        stream.write(f"# {note}\n")


def _is_restart(config: RunConfig) -> bool:
    """Whether the launcher starts again the very job that made run_dir, with the same config."""
    run_dir, job = Path(config.run_dir), os.environ.get("RUN_JOB")
    if not job or int(os.environ.get("RUN_RESTARTS", "0")) < 1:
        return False
    if not (run_dir / JOB).is_file() or not (run_dir / RESOLVED).is_file():
        return False
    return (run_dir / JOB).read_text(encoding="utf-8").strip() == job and not _changes(config)


def _changes(config: RunConfig) -> list[str]:
    """A line for each key that differs from the config of the first start."""
    first = OmegaConf.to_container(OmegaConf.load(Path(config.run_dir) / RESOLVED))
    return _differences(first, config.model_dump(mode="json"))


def _differences(old: object, new: object, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in {**old, **new}:
            lines += _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return lines
    return [] if old == new else [f"{path}: {old} at first start, now {new}"]
