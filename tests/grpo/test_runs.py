"""The verb in this process: files, metrics, prediction beside measurement, a run stopped and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bailing_mtp.config import GrpoConfig, build_config
from bailing_mtp.data.tokenizer import train_tokenizer
from bailing_mtp.parallel.context import destroy_context
from bailing_mtp.training.metrics import read_metrics
from recipes import grpo, session
from recipes.common import prepare
from recipes.compose import compose
from recipes.policy import find_policy
from recipes.ranks import Ranks

ALONE = Ranks(rank=0, world_size=1, host="here")
SMALL = (
    "model=tiny", "model.architecture.vocab_size=300", "model.architecture.hidden_size=64",
    "model.architecture.num_hidden_layers=2", "model.architecture.layer_group_size=2", "log=quiet",
    "data.path=reasoning_gym:chain_sum?documents=12", "data.chat_template=plain", "data.seq_tokens=128",
    "train.microbatch_tokens=256", "sampling.max_new_tokens=10", "sampling.samples_per_prompt=4",
    "rl.prompts_per_rollout=4", "rl.reward_workers=1", "rl.reward=tests.grpo.rewards:digits", "optim.lr=1e-3",
    "rollout.speculative_tokens=2",
)  # fmt: skip
TIMES = ("time/", "_per_second", "memory/")


ALL_OF_IT = (
    "train.steps=4", "rl.minibatches=2", "rl.kl_coef=0.1", "rl.truncate_importance=2.0", "checkpoint.save_every=2",
    "sampling.temperature=0.7", "mtp=detached", "rl.routing_replay=true",
)  # fmt: skip
"""Two optimizer steps a rollout, KL to the start, importance weights, replayed experts, the MTP layer trained along."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Question: what is 1 + 1? Answer: 2"] * 9, 300).save(directory)
    return directory


@pytest.fixture(scope="module")
def whole(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("grpo") / "whole"
    run(tokenizer, run_dir, *ALL_OF_IT)
    return run_dir


def arguments_of(tokenizer: Path, run_dir: Path, *arguments: str) -> list[str]:
    return [*SMALL, f"data.tokenizer={tokenizer}", f"run_dir={run_dir}", *arguments]


def run(tokenizer: Path, run_dir: Path, *arguments: str) -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "leave_ranks", destroy_context)
        try:
            grpo.main(prepare(GrpoConfig, "grpo", arguments_of(tokenizer, run_dir, *arguments), ALONE))
        finally:
            destroy_context()
    return read_metrics(run_dir / "metrics.jsonl")


def test_a_run_leaves_everything(whole: Path):
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4]
    names = (
        "reward/mean", "reward/solved", "rollout/accept_length", "rollout/accept_depth1", "rollout/accept_depth2",
        "rollout/tokens_per_second", "rollout/logprob_gap", "predicted/accept_length", "predicted/accept_depth2",
        "time/rollout_s", "time/reward_s", "time/train_s", "time/switch_s", "memory/rollout_gb", "mtp/loss_depth1",
        "train/tokens_per_second", "policy/entropy",
    )  # fmt: skip
    for row in rows:
        assert set(names) <= row.keys()
        assert row["rollout/logprob_gap"] < 1e-5 and row["policy/ratio_gap"] < 1e-5
        assert row["rollout/route_agreement"] == 1
        assert row["memory/rollout_gb"] > 0 and row["time/switch_s"] > 0
        # About 60 drafts a depth.
        assert row["predicted/accept_depth1"] == pytest.approx(row["rollout/accept_depth1"], abs=0.25)
    assert rows[1]["policy/kl"] > rows[0]["policy/kl"] > 0
    assert {"reward", "accept_length", "acceptance", "policy"} <= {file.stem for file in (whole / "charts").iterdir()}
    lines = (whole / "rollouts" / "step_4.jsonl").read_text().splitlines()
    assert len(lines) == 16 and json.loads(lines[0])["prompt"].endswith("Answer:")


def test_a_stopped_run_continues_exactly(tokenizer: Path, whole: Path, tmp_path: Path):
    """With other memory for rollouts."""
    parts = tmp_path / "parts"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step_4")
    rows = run(tokenizer, parts, *ALL_OF_IT, "rollout.keep_memory=true", "rollout.max_running=16")
    assert [row["step"] for row in rows] == [2, 4]
    expected = read_metrics(whole / "metrics.jsonl")[1]
    kept = [name for name in expected if not any(part in name for part in TIMES)]
    assert len(kept) > 20 and {name: rows[1][name] for name in kept} == {name: expected[name] for name in kept}


def test_a_frozen_layer_drafts_and_stays_in_the_checkpoint(tokenizer: Path, tmp_path: Path):
    arguments = ("train.steps=1", "rl=gspo", "sampling.top_p=0.9", "rl.refill=true")
    (row,) = run(tokenizer, tmp_path / "run", *arguments)
    assert row["rollout/accept_depth1"] > 0 and row["policy/ratio_gap"] < 1e-5
    # What was sampled is cut by top-p, which a prediction from logits does not know.
    assert "mtp/loss_depth1" not in row and "predicted/accept_length" not in row
    again = build_config(
        GrpoConfig, compose(GrpoConfig, "grpo", arguments_of(tokenizer, tmp_path / "run", *arguments))
    )
    assert find_policy(again).holds_mtp
