"""The generate verb as a program: files, numbers, refusals, and what a killed run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "bailing_v3" / "moe"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
PROMPTS = [
    {"prompt_ids": [5, 6, 7]},
    {"prompt_ids": [8, 9], "sampling": {"temperature": 0, "max_new_tokens": 5}},
    {"prompt_ids": list(range(30, 60)), "sampling": {"samples_per_prompt": 3, "top_k": 50}},
]
KEYS = ["prompt_index", "sample_index", "prompt_ids", "response_ids", "text", "logprobs", "processed_logprobs"]
KEYS += ["kept_logmass", "finish_reason"]


def command(tmp_path: Path, *arguments: str, ranks: int = 1) -> list[str]:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    given = [f"run_dir={tmp_path}/run", f"checkpoint.load={FIXTURE}", f"prompts={tmp_path}/p.jsonl"]
    given += [f"output={tmp_path}/out.jsonl", "model.dtype=fp32", "sampling.max_new_tokens=8"]
    return [*launcher, "recipes.generate", *given, *arguments]


def generate(tmp_path: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return subprocess.run(
        command(tmp_path, *arguments, ranks=ranks), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_files_of_one_rank_and_of_two_replicas(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = generate(tmp_path / "one", "rollout.speculative_tokens=2")
    assert alone.returncode == 0, alone.stderr
    samples = read(tmp_path / "one" / "out.jsonl")
    assert [(s["prompt_index"], s["sample_index"]) for s in samples] == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert all(list(s) == KEYS for s in samples)
    assert [len(s["response_ids"]) for s in samples] == [8, 5, 8, 8, 8]
    assert samples[1]["kept_logmass"] is None and samples[0]["kept_logmass"] == pytest.approx([0.0] * 8)
    assert all(s["text"] is None and s["finish_reason"] == "length" for s in samples)
    stats = json.loads((tmp_path / "one" / "out.jsonl.stats.json").read_text())
    assert stats["tokens"] == 37 and stats["samples"] == 5 and len(stats["accept_depth"]) == 2
    assert 1 <= stats["accept_length"] <= 3 and stats["steps_by_drafts"][:2] == [0, 0]
    assert "generate: 5 samples, 37 tokens" in alone.stdout and "samples 5/5" in alone.stderr
    assert {p.name for p in (tmp_path / "one").iterdir()} == {"run", "p.jsonl", "out.jsonl", "out.jsonl.stats.json"}
    both = generate(tmp_path / "two", "rollout.speculative_tokens=2", "parallel.ep=2", ranks=2)
    assert both.returncode == 0, both.stderr
    again = read(tmp_path / "two" / "out.jsonl")
    assert [s["response_ids"] for s in again] == [s["response_ids"] for s in samples]
    assert not list((tmp_path / "two").glob("*.partial*"))
    report = [sys.executable, "-m", "recipes.score", "report=acceptance", f"checkpoint.load={FIXTURE}"]
    report += [f"run_dir={tmp_path}/score", f"input={tmp_path}/one/out.jsonl", "model.dtype=fp32"]
    told = subprocess.run(report, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert told.returncode == 0, told.stderr
    assert "acceptance at temperature 1, 5 documents, ln V 6.2383" in told.stdout and "alpha_2 given 1" in told.stdout
    written = json.loads((tmp_path / "score" / "acceptance.json").read_text())
    # A response of n tokens has n - 1 sites with a token two ahead, and n - k with one for each of k drafts.
    assert written["alpha_1"]["n"] == 7 * 4 + 4 and written["accept_length_k3"]["n"] == 5 * 4 + 2
    logprobs = [-x for s in samples for x in s["logprobs"]]
    assert written["nll_1"]["value"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-4)


@pytest.mark.slow
def test_a_mistake_ends_the_run_and_leaves_the_output(tmp_path: Path):
    (tmp_path / "out.jsonl").write_text("kept")
    result = generate(tmp_path, "rollout.context_tokens=12")
    message = "p.jsonl:3: 30 prompt tokens and sampling.max_new_tokens=8 exceed rollout.context_tokens=12"
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == f"error: {tmp_path}/{message}", result.stderr
    # Nothing was loaded for it.
    assert "parameters on this rank" not in result.stdout
    assert (tmp_path / "out.jsonl").read_text() == "kept" and not list(tmp_path.glob("*.partial*"))


@pytest.mark.slow
def test_a_killed_run_leaves_the_samples_that_had_ended(tmp_path: Path):
    prompts = [{"prompt_ids": [1, 2]}, {"prompt_ids": [3], "sampling": {"max_new_tokens": 1900}}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    process = subprocess.Popen(command(tmp_path), cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    partial, deadline_s = tmp_path / "out.jsonl.partial", time.monotonic() + 150
    while not (partial.exists() and partial.read_text()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (sample,) = read(partial)
    assert sample["prompt_index"] == 0 and len(sample["response_ids"]) == 8
    assert not (tmp_path / "out.jsonl").exists()
