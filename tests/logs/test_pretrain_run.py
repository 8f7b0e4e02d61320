"""A whole small run as a user starts it: what it prints, and what lies in its directory afterwards."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bailing_mtp.training.metrics import read_metrics
from tests.logs.wandb_file import read_offline_run

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = (
    "experiment=demo", "parallel.tp=1", "parallel.ep=1", "data.path=reasoning_gym:chain_sum?documents=300",
    "data.seq_tokens=64", "data.vocab_size=300", "model.architecture.vocab_size=300", "train.steps=3",
    "train.tokens_per_step=256", "train.microbatch_tokens=128", "train.eval_every=2", "train.eval_steps=2",
    "mtp.depth=2", "train.eval_depth=3",
)  # fmt: skip
LINES = (
    r"tokenise: .*", r"step \d/3  lm \d\.\d+  mtp \d\.\d+ \d\.\d+  accept .*  [\d,]+ tokens/s  \w+ left",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    run_dir = tmp_path_factory.mktemp("pretrain") / "run"
    command = [sys.executable, "-m", "recipes.pretrain", *ARGUMENTS, f"run_dir={run_dir}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return run_dir, run


def test_the_screen_is_the_runs_own(finished: tuple[Path, subprocess.CompletedProcess[str]]):
    run_dir, run = finished
    foreign = [line for line in run.stderr.splitlines() if not any(re.fullmatch(own, line) for own in LINES)]
    assert not foreign
    out = run.stdout
    rows = read_metrics(run_dir / "metrics.jsonl")
    first, last = rows[0]["train/lm_loss"], rows[-1]["train/lm_loss"]
    assert re.search(rf"\n  train/lm_loss +{first:.4g} -> {last:.4g}\n", out)
    assert f"charts: {run_dir}/charts/{{overview,loss," in out and f"metrics: {run_dir}/metrics.jsonl" in out
    assert f"wandb sync {run_dir}/wandb/offline-run-*-" in out


def test_metrics_have_their_fixed_names(finished: tuple[Path, subprocess.CompletedProcess[str]]):
    rows = read_metrics(finished[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    always = {"train/loss", "train/lm_loss", "train/grad_norm", "train/lr", "train/tokens_per_second"}
    always |= {f"mtp/{name}_depth{depth}" for name in ("loss", "accept", "top1") for depth in (1, 2)}
    held = {"valid/lm_loss"}
    held |= {f"valid/mtp_{name}_depth{depth}" for name in ("loss", "accept", "top1") for depth in (1, 2, 3)}
    assert all(always <= row.keys() for row in rows)
    assert [held <= row.keys() for row in rows] == [False, True, True]
    assert not held & rows[0].keys() and "train/mfu" not in rows[0]
    speed = [row["train/model_tflops_per_second"] / row["train/tokens_per_second"] for row in rows]
    assert all(1e-6 < value < 1e-3 for value in speed)


def test_charts_and_wandb_hold_the_run(finished: tuple[Path, subprocess.CompletedProcess[str]]):
    run_dir, rows = finished[0], read_metrics(finished[0] / "metrics.jsonl")
    names = {file.stem for file in (run_dir / "charts").glob("*.png")}
    assert {"loss", "acceptance", "accept_length", "throughput", "optimizer"} <= names
    (file,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    history = read_offline_run(file).history
    assert [row["train/step"] for row in history] == [1, 2, 3]
    for logged, row in zip(history, rows, strict=True):
        assert {key: logged[key] for key in row if key != "step"} == {k: v for k, v in row.items() if k != "step"}
