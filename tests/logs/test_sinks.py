"""Metrics reach metrics.jsonl and an offline Weights & Biases run, under the same names and one id."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bailing_mtp.config import PretrainConfig, build_config
from bailing_mtp.errors import UserError
from bailing_mtp.training.metrics import read_metrics
from recipes.sinks import FAMILIES, Sinks, git_state, run_id
from tests.logs.wandb_file import read_offline_run

ROOT = Path(__file__).resolve().parents[2]


def config(run_dir: Path, wandb: str) -> PretrainConfig:
    return build_config(
        PretrainConfig,
        {
            "run_dir": str(run_dir),
            "model": {"architecture": {"vocab_size": 8}},
            "data": {"path": "text.jsonl"},
            "train": {"steps": 9},
            "log": {"wandb": wandb, "project": "mine"},
        },
    )


@pytest.mark.timeout(120)
def test_offline_run_reads_back_and_continues_under_its_id(tmp_path: Path):
    first = Sinks(config(tmp_path / "run", "offline"), "pretrain")
    for step in (2, 4, 6):
        first.write(step, {"train/lm_loss": 10.0 - step, "mtp/loss_depth1": float(step)})
    first.close()
    second = Sinks(config(tmp_path / "run", "offline"), "pretrain", first_step=4)
    shares = {"rollout/accept_share1": 0.25, "rollout/accept_share2": 0.75}
    second.write(6, {"train/lm_loss": 5.5, "valid/lm_loss": 5.75, **shares})
    second.close()

    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [2, 4, 6]
    found = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    files = sorted(found, key=lambda file: file.parent.name)
    runs = [read_offline_run(file) for file in files]
    assert len(runs) == 2 and all(run.is_complete for run in runs)
    assert {run.run_id for run in runs} == {run_id(tmp_path / "run")}
    logged = [(row["train/step"], row["train/lm_loss"]) for run in runs for row in run.history]
    assert logged == [(2, 8.0), (4, 6.0), (6, 4.0), (6, 5.5)]
    # The step that was lost and made again is one step, not a further one.
    assert [row["_step"] for run in runs for row in run.history] == [2, 4, 6, 6]
    assert runs[0].history[1]["mtp/loss_depth1"] == 4.0 and runs[1].history[0]["valid/lm_loss"] == 5.75
    histogram = {"_type": "histogram", "values": [0.25, 0.75], "bins": [0.5, 1.5, 2.5]}
    written = {name.rpartition("/")[2]: value for name, value in runs[1].history[0].items() if "accept_lengths" in name}
    assert written == histogram and not any("accept_lengths" in name for name in runs[0].history[0])
    assert runs[0].step_axes == {"train/step": "", **{f"{family}/*": "train/step" for family in FAMILIES}}
    saved = runs[0].config
    assert runs[0].project == "mine" and saved["verb"] == "pretrain" and saved["train"]["steps"] == 9
    assert saved["git"] == git_state()
    assert f"wandb sync {tmp_path / 'run' / 'wandb'}/offline-run-*-{run_id(tmp_path / 'run')}" in second.where()[1]


def test_disabled_imports_nothing(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from tests.logs.test_sinks import config; "
        "from recipes.sinks import Sinks; sys.modules.pop('wandb', None); before = set(sys.modules); "
        f"s = Sinks(config(Path({str(tmp_path)!r}), 'disabled'), 'pretrain'); "
        "s.write(1, {'train/lm_loss': 1.0}); s.close(); print(s.where()); "
        "assert not [m for m in set(sys.modules) - before if m.startswith('wandb')]"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout == f"['metrics: {tmp_path}/metrics.jsonl']\n"
    assert not (tmp_path / "wandb").exists()


def test_a_run_goes_on_when_wandbs_process_is_gone(tmp_path: Path):
    """In a process of its own: wandb never gets over it."""
    program = (
        "import psutil, sys; from pathlib import Path; sys.path.insert(0, '.'); "
        "from tests.logs.test_sinks import config; from recipes.sinks import Sinks; "
        f"s = Sinks(config(Path({str(tmp_path)!r}), 'offline'), 'pretrain'); s.write(1, {{'train/lm_loss': 2.0}}); "
        "gone = psutil.Process().children(); [child.kill() for child in gone]; psutil.wait_procs(gone, 10); "
        "s.write(2, {'train/lm_loss': 1.0}); s.write(3, {'train/lm_loss': 0.5}); s.close(); print('closed')"
    )
    # Not with the wandb process of these tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0 and run.stdout == "closed\n", run.stderr
    assert run.stderr.count("warning: wandb: its process is gone") == 1
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_online_without_a_key_says_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"log\.wandb: 'online' cannot start .*allowed: offline, disabled"):
        Sinks(config(tmp_path / "run", "online"), "pretrain")


def test_run_id_follows_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert run_id("a/b") == run_id(tmp_path / "a" / ".." / "a" / "b") != run_id("a/c")


def test_git_state_sees_the_commit_and_changes(tmp_path: Path):
    assert git_state(tmp_path) == {}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "empty"], check=True)
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "new").write_text("")
    assert git_state(tmp_path) == {**clean, "dirty": True}
