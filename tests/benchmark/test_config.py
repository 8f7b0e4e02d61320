"""What the benchmark accepts, and how it refuses the rest before anything is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bailing_mtp.config import BenchmarkConfig, ConfigError, check_backends
from recipes import common
from recipes.bench_policy import policy_config
from recipes.ranks import Ranks
from tests.benchmark.sizes import config_of

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_the_real_model_at_seven_batch_sizes():
    config = config_of("what=kernels")
    assert config.model.name == "ling3_tiny" and config.model.dtype == "bf16"
    assert (config.rows, config.fed_tokens, config.replays) == ((1, 4, 8, 16, 32, 64, 256), (1, 3), 12)
    assert config_of("what=kernels", "rows=[2,5]", "fed_tokens=[4]").rows == (2, 5)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "what: is required"),
        (["what=memory"], "what: 'memory' is not allowed; use one of kernels, decode, adaptive, train, grpo"),
        (["what=kernels", "rows=[]"], "rows: [] is not allowed"),
        (["what=kernels", "rows=[4,0]"], "rows.1: 0 is not allowed; must be above 0"),
        (["what=kernels", "copy_tb_per_s=0"], "copy_tb_per_s: 0 is not allowed"),
        (["what=kernels", "context_tokens=2"], "context_tokens: 2 must be at least 3, the most of fed_tokens"),
        (["what=kernels", "parallel.tp=2"], "parallel.tp: 2 is not allowed; what=kernels runs on one GPU"),
        (["what=kernels", "checkpoint.load=hf"], "checkpoint.load: is not read by what=kernels"),
        (["what=decode", "optim=adamw8bit"], "optim.name: 'adamw8bit' is not used by what=decode; allowed here: adamw"),
        (["what=train", "optim.offload=cpu"], "optim.offload: 'cpu' is not measured by what=train; allowed here: none"),
        (["what=decode", "drafts=[1,2]"], "drafts: [1, 2] must begin with 0, plain decoding"),
        (["what=adaptive", "drafts=[0]"], "drafts: [0] leaves the controller nothing to choose"),
        (["what=grpo", "microbatch_tokens=383"], "microbatch_tokens: 383 cannot hold a prompt of prompt_tokens="),
        (["what=grpo", "optim.warmup_steps=16"], "optim.warmup_steps: 16, with optim.decay_steps=null, ends"),
        (["what=grpo", "rollout.speculative_tokens=2", "rollout.adaptive=true"], "rollout.adaptive: true needs"),
        (["what=grpo", "drafts=[]"], "drafts: [] is not allowed; must be a list that is not empty"),
        (["what=decode", "drafts=[0,-1]"], "drafts.1: -1 is not allowed"),
        (["what=decode", "routing=[random]"], "routing.0: 'random' is not allowed"),
        (["what=kernels", "model=checkpoint"], "model.architecture: null needs"),
    ],
)
def test_mistakes_are_named(arguments: list[str], line: str):
    with pytest.raises(ConfigError) as caught:
        config_of(*arguments)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(line)


def test_what_grpo_takes_is_a_run_of_grpo():
    config = config_of(
        "what=grpo", "drafts=[2]", "rollout.adaptive=true", "microbatch_tokens=384", "optim.warmup_steps=3"
    )
    run = policy_config(config, 2)
    assert (run.rollout.adaptive, run.train.microbatch_tokens, run.train.steps) == (True, 384, 4)


def test_a_gpu_is_all_that_kernels_needs():
    check_backends(config_of("what=kernels"), has_gpu=True, installed=lambda module: False)


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(common, "_has_gpu", lambda: False)
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match="^what: 'kernels' needs a CUDA device and there is none here$"):
        common.prepare(BenchmarkConfig, "benchmark", ["what=kernels", f"run_dir={run_dir}"], Ranks(0, 1, "here"))
    assert not run_dir.exists()


def test_the_command_ends_with_one_line(tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-m", "recipes.benchmark", "what=kernels", f"run_dir={tmp_path / 'run'}"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr == "error: what: 'kernels' needs a CUDA device and there is none here\n"
