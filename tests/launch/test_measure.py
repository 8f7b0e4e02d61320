"""launch/measure.sh with a stand-in for Python, and the table that it ends with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_launch import ROOT, program, script

OVERRIDES = ("model.dtype=bf16", "parallel.tp=2", "sampling.temperature=0.7", "sampling.top_k=5")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that writes down how it was called."""
    return str(program(tmp_path / "python", 'echo "$*" >>calls'))


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_the_same_prompts_without_and_with_drafts_then_the_prediction(tmp_path: Path, python: str):
    result = script(
        "measure.sh", "model", "prompts.jsonl", *OVERRIDES, cwd=tmp_path, PYTHON=python, MEASURE_DIR="new", NPROC="2"
    )
    assert result.returncode == 0, result.stderr
    doctor, plain, drafted, score, summary = calls(tmp_path)
    assert "--nproc-per-node 1 -m recipes.doctor checkpoint.load=model" in doctor
    for drafts, call in ((0, plain), (2, drafted)):
        files = f"prompts=prompts.jsonl output=new/k{drafts}/samples.jsonl run_dir=new/k{drafts}"
        settings = f"model.dtype=fp32 rollout.speculative_tokens={drafts} {' '.join(OVERRIDES)}"
        assert call.endswith(f"--nproc-per-node 2 -m recipes.generate checkpoint.load=model {files} {settings}")
    files = "input=new/k2/samples.jsonl report=acceptance run_dir=new/score"
    kept = "model.dtype=fp32 model.dtype=bf16 parallel.tp=2 temperature=0.7"
    assert score.endswith(f"-m recipes.score checkpoint.load=model {files} {kept}")
    assert summary == f"{ROOT}/launch/measure_summary.py new model"


def test_on_a_gpu_kernels_are_compiled_before_the_clock_runs(tmp_path: Path, python: str):
    given = {"PYTHON": python, "MEASURE_DIR": "new", "CUDA_VISIBLE_DEVICES": "0"}
    result = script("measure.sh", "model", "p.jsonl", cwd=tmp_path, **given)
    assert result.returncode == 0, result.stderr
    generated = [call.partition("run_dir=")[2] for call in calls(tmp_path) if "recipes.generate" in call]
    assert generated == [
        f"new/{name} rollout=speculative rollout.speculative_tokens={k}{short}"
        for k in (0, 2)
        for name, short in ((f"warm_k{k}", " sampling.max_new_tokens=8"), (f"k{k}", ""))
    ]
    assert "model.kda=fla model.experts=grouped model.kernels=triton" in calls(tmp_path)[-2]


def test_a_checkpoint_that_would_not_train_ends_it(tmp_path: Path):
    python = str(program(tmp_path / "python", "echo >>calls; exit 1"))
    assert script("measure.sh", "model", "p.jsonl", cwd=tmp_path, PYTHON=python, NPROC="1").returncode == 1
    assert len(calls(tmp_path)) == 1
    (tmp_path / "old").mkdir()
    for arguments, expected in ((("model",), "usage: launch/measure.sh"), (("model", "p.jsonl"), "old: is there")):
        result = script("measure.sh", *arguments, cwd=tmp_path, PYTHON=python, NPROC="1", MEASURE_DIR="old")
        assert result.returncode == 1 and result.stderr.startswith(f"error: {expected}")


def test_the_table_sets_measured_beside_predicted(tmp_path: Path):
    same = {"samples": 320, "tokens": 1000, "occupancy": 0.5}
    plain = same | {"tokens_per_second": 500.0, "accept_length": 1.0, "steps": 40, "seconds": 2.0, "accept_depth": []}
    drafted = plain | {"tokens_per_second": 800.0, "accept_length": 2.25, "steps": 18, "accept_depth": [0.8, None]}
    predicted = {"accept_length_k2": 2.5, "alpha_1_k2": 0.85, "alpha_2_k2": None}
    files = {
        "k0/samples.jsonl.stats.json": plain,
        "k2/samples.jsonl.stats.json": drafted,
        "score/acceptance.json": {name: {"value": value} for name, value in predicted.items()},
    }
    for name, values in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(values))
    command = [sys.executable, str(ROOT / "launch" / "measure_summary.py"), str(tmp_path), "model"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shown = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        f"== measured: model, everything in {tmp_path}", "320 samples a run plain k=2", "tokens per second 500 800",
        "decode steps 40 18", "rows of a step / its room 0.50 0.50", "drafts kept at depth 1 0.800 0.850",
        "drafts kept at depth 2 - -", "accept length 2.250 2.500", "Tokens per second with k=2 over plain: 1.60.",
    ):  # fmt: skip
        assert line in shown, line
