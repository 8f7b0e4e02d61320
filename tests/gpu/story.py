"""The recipes one after the other, each as a program on what the one before wrote, and what has to be true of it.

Without a GPU the same story runs in fp32 on the torch kernels, in two or three minutes:
python -m tests.gpu.story <new folder>
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bailing_mtp.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
"""Of verbs that run together."""
TAIL_LINES = 40
DRAFTS = "rollout.speculative_tokens=2"


class Stage(NamedTuple):
    """Where the story runs, and what is to be expected there."""

    model: tuple[str, ...]
    """Overrides of every verb with a model."""
    rollout: tuple[str, ...]
    environment: dict[str, str]
    logprob_gap: float
    """Most that log-probabilities of a token may differ between rollout and trainer, in the mean."""
    has_gpu: bool


GPU = Stage(
    model=("model.dtype=bf16", "model.kda=fla", "model.experts=grouped", "model.kernels=triton"),
    rollout=("rollout.kernels=triton", "rollout.cuda_graphs=true"),
    environment={},
    logprob_gap=0.05,
    has_gpu=True,
)
CPU = Stage(("model.dtype=fp32",), (), {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, 1e-5, has_gpu=False)

PACKS = ("data.seq_tokens=128", "train.tokens_per_step=1024", "train.microbatch_tokens=1024")
HALF = 16
"""Steps of pretraining before it is started again to go on."""
ENTRIES = 512
"""Of the vocabulary, so that what is generated keeps to few tokens."""
PRETRAIN = (
    "model=tiny", f"model.architecture.vocab_size={ENTRIES}", f"data.vocab_size={ENTRIES}", *PACKS, "mtp=joint",
    "mtp.depth=2", "optim.lr=2e-3", "optim.schedule=constant",
)  # fmt: skip
SFT = (
    "data.chat_template=plain", *PACKS, "mtp=detached", "train.steps=2", "train.eval_every=2",
    "train.eval_steps=1", "data.valid_fraction=0.1", "optim.lr=1e-3",
)  # fmt: skip
DPO = (
    "data.chat_template=plain", *PACKS, "mtp=detached", "train.steps=3", "data.valid_fraction=0", "optim.lr=1e-4",
    "optim.schedule=constant",
)  # fmt: skip
GRPO = (
    "data.chat_template=plain", "data.seq_tokens=64", "train.microbatch_tokens=512", "train.eval_every=2",
    "train.eval_samples=2", "rl.prompts_per_rollout=8", "rl.reward=tests.grpo.rewards:digits", "rl.reward_workers=1",
    "rl.kl_coef=0.05", "rl.truncate_importance=2.0", "rl.routing_replay=true", "sampling.samples_per_prompt=4",
    "sampling.max_new_tokens=16", "optim=adamw8bit", "optim.lr=1e-3", "mtp=detached", "mtp.depth=2", DRAFTS,
)  # fmt: skip
TRAINED_KEYS = {"train/loss", "train/grad_norm", "train/tokens_per_second", "mtp/loss_depth1", "mtp/accept_depth1"}
POLICY_KEYS = TRAINED_KEYS | {
    "reward/mean", "policy/kl", "policy/ratio_gap", "rollout/accept_length", "rollout/accept_depth1",
    "rollout/accept_depth2", "rollout/logprob_gap", "rollout/route_agreement", "rollout/tokens_per_second",
    "predicted/accept_length", "memory/rollout_gb", "time/rollout_s", "time/train_s", "mtp/loss_depth2",
}  # fmt: skip
MEMORY_KEYS = {"memory/allocated_gb", "memory/reserved_gb", "memory/planned_gb", "memory/peak_gb"}


@dataclass
class Story:
    """Every verb has its folder under `folder`; what it printed lies beside that."""

    folder: Path
    stage: Stage
    seconds: dict[str, float] = field(default_factory=dict)
    """Of verbs that ran together, by their names."""

    def run(self, verbs: Mapping[str, tuple[str, ...]]) -> None:
        """Names (a verb, or <verb>_<which>) to overrides. Together on a GPU, whose verbs mostly wait for compilers;
        one after the other on a CPU. AssertionError with the end of what was printed where one fails."""
        if not self.stage.has_gpu and len(verbs) > 1:
            for name, overrides in verbs.items():
                self.run({name: overrides})
            return
        started_s = time.monotonic()
        running = {name: self._start(name, overrides) for name, overrides in verbs.items()}
        try:
            for name, process in running.items():
                left_s = max(0.0, started_s + LIMIT_S - time.monotonic())
                try:
                    code = process.wait(timeout=left_s)
                except subprocess.TimeoutExpired as expired:
                    raise AssertionError(f"{name}: still running after {LIMIT_S} s\n{self.tail(name)}") from expired
                assert code == 0, f"{name}: exit code {code}\n{self.tail(name)}"
        finally:
            for process in running.values():
                process.kill()
                process.wait()
        self.seconds[" and ".join(verbs)] = time.monotonic() - started_s

    def _start(self, name: str, overrides: tuple[str, ...]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"recipes.{name.partition('_')[0]}", *overrides]
        with self._printed(name).open("wb") as file:
            environment = os.environ | self.stage.environment
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def _printed(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def printed(self, name: str) -> str:
        return self._printed(name).read_text()

    def tail(self, name: str) -> str:
        """The end of what a verb printed."""
        return "\n".join(self.printed(name).splitlines()[-TAIL_LINES:])

    def trains(self, verb: str) -> tuple[str, ...]:
        """Overrides of a verb that trains."""
        return (*self.stage.model, "log=quiet", f"run_dir={self.folder / verb}")

    def checkpoint(self, verb: str, step: int) -> Path:
        """That of a step, which must be the newest."""
        root = self.folder / verb / "checkpoints"
        assert (root / "latest").read_text().strip() == f"step_{step}"
        return root / f"step_{step}"

    def rows(self, verb: str, steps: list[int], keys: set[str]) -> list[dict[str, Any]]:
        """The metrics of a finished run: these steps, all of them finite, each with `keys` but one of step 0."""
        rows = read_metrics(self.folder / verb / "metrics.jsonl")
        assert [row["step"] for row in rows] == steps, verb
        for row in rows:
            not_finite = [name for name, value in row.items() if not math.isfinite(value)]
            assert not not_finite, f"{verb}, step {row['step']}: {not_finite}"
            if row["step"] == 0:
                continue
            wanted = keys | MEMORY_KEYS if self.stage.has_gpu else keys
            assert wanted <= row.keys(), f"{verb}: {wanted - row.keys()}"
            assert all(row[name] > 0 for name in row if name.startswith("memory/"))
        return rows


def tell(folder: Path, stage: Stage) -> Story:
    """Run everything and check it."""
    folder.mkdir(parents=True, exist_ok=True)
    story = Story(folder, stage)
    _write_data(folder)
    pretrain = (f"data.path={folder / 'texts.jsonl'}", *PRETRAIN, *story.trains("pretrain"))
    story.run({"pretrain": (*pretrain, f"train.steps={HALF}")})
    begun = f"checkpoint.load={story.checkpoint('pretrain', HALF)}"
    story.run(
        {
            "pretrain_on": (*pretrain, f"train.steps={2 * HALF}"),
            "sft": (begun, f"data.path={folder / 'answers.jsonl'}", *SFT, *story.trains("sft")),
        }
    )
    tuned = f"checkpoint.load={story.checkpoint('sft', 2)}"
    problems = (f"data.path={folder / 'problems.jsonl'}", f"data.valid_path={folder / 'held_out.jsonl'}")
    policy = (tuned, *problems, *GRPO, *story.trains("grpo"), *stage.rollout)
    story.run(
        {
            "dpo": (tuned, f"data.path={folder / 'pairs.jsonl'}", *DPO, *story.trains("dpo")),
            "grpo": (*policy, "train.steps=2"),
        }
    )
    story.run({"grpo_on": (*policy, "train.steps=4")})
    check_training(story)
    last = story.checkpoint("grpo", 4)
    drawn = (f"output={folder / 'samples.jsonl'}", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=24")
    prompts = f"prompts={folder / 'grpo' / 'data' / 'held_out.jsonl'}"
    run_dir = f"run_dir={folder / 'generate'}"
    story.run(
        {
            "generate": (f"checkpoint.load={last}", prompts, *drawn, *stage.model, *stage.rollout, DRAFTS, run_dir),
            "convert": (f"source={last}", f"target={folder / 'hf'}", "format=hf"),
        }
    )
    exported = f"checkpoint.load={folder / 'hf'}"
    judged = (f"input={folder / 'samples.jsonl'}", "report=acceptance", f"run_dir={folder / 'score'}")
    story.run({"score": (exported, *judged, *stage.model), "doctor": (exported,)})
    check_samples(story)
    return story


def _write_data(folder: Path) -> None:
    """Texts for pretraining, answers for sft, problems for grpo, others for its evaluations, pairs for dpo."""
    sums = [(a, b) for a in range(2, 10) for b in range(2, 6)]
    asked = [{"prompt": f"What is {a} plus {b}?\n", "answer": str(a + b)} for a, b in sums]
    products = [(a, b) for a in range(11, 61) for b in range(2, 10)]
    written = {
        "texts": [{"text": f"{a} times {b}, that is {a} plus {a * (b - 1)}, gives {a * b}. " * 2} for a, b in products],
        "answers": [{"prompt": f"What is {a} times {b}?\n", "response": f"It is {a * b}."} for a, b in products[::2]],
        "problems": asked[:-6],
        "held_out": asked[-6:],
        "pairs": [{"prompt": x["prompt"], "chosen": x["answer"], "rejected": f"not {x['answer']}"} for x in asked],
    }
    for name, records in written.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def check_training(story: Story) -> None:
    """Metrics and messages of pretrain, sft, dpo and grpo, two of which were continued."""
    steps = list(range(1, 2 * HALF + 1))
    losses = [row["train/lm_loss"] for row in story.rows("pretrain", steps, TRAINED_KEYS | {"mtp/loss_depth2"})]
    assert abs(losses[0] - math.log(ENTRIES)) < 0.3 and losses[HALF - 1] < 0.7 * losses[0]
    # Continued, not begun again.
    assert losses[HALF] < 1.2 * losses[HALF - 1] and losses[-1] < losses[HALF - 1]
    rows = story.rows("sft", [1, 2], TRAINED_KEYS | {"train/lm_loss"})
    assert {"valid/lm_loss", "valid/mtp_accept_depth1"} <= rows[-1].keys()
    rows = story.rows("dpo", [1, 2, 3], TRAINED_KEYS | {"dpo/loss", "dpo/margin"})
    # Policy and reference are the same weights, which bf16 rounds differently in packs of other sizes.
    assert abs(rows[0]["dpo/loss"] - math.log(2)) < (0.02 if story.stage.has_gpu else 1e-4)
    assert rows[-1]["dpo/loss"] < rows[0]["dpo/loss"]
    assert f"reference: log-probabilities of {2 * 32} rows" in story.printed("dpo")
    rows = story.rows("grpo", [0, 1, 2, 3, 4], POLICY_KEYS)
    assert ["valid/reward_mean" in row for row in rows] == [True, False, True, False, True]
    for row in rows[1:]:
        assert 1 <= row["rollout/accept_length"] <= 3 and 1 <= row["predicted/accept_length"] <= 3
        assert 0 <= row["rollout/logprob_gap"] < story.stage.logprob_gap, row["rollout/logprob_gap"]
        assert row["rollout/route_agreement"] > 0.9 and 0 <= row["reward/mean"] <= 1
        samples = (story.folder / "grpo" / "rollouts" / f"step_{row['step']}.jsonl").read_text().splitlines()
        assert samples and {"prompt", "response", "reward", "advantage"} <= json.loads(samples[0]).keys()
    assert rows[4]["reward/mean"] > rows[1]["reward/mean"]
    assert "step 3/4" in story.printed("grpo_on") and "step 2/4" not in story.printed("grpo_on")


def check_samples(story: Story) -> None:
    """What generate, score, convert and doctor wrote, and that they agree."""
    folder = story.folder
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    stats = json.loads((folder / "samples.jsonl.stats.json").read_text())
    assert len(samples) == 6 * 4 and all(sample["response_ids"] for sample in samples)
    assert all(sample["finish_reason"] in ("stop", "length") for sample in samples)
    assert stats["tokens"] == sum(len(sample["response_ids"]) for sample in samples)
    assert 1 <= stats["accept_length"] <= 3 and len(stats["accept_depth"]) == 2
    logprobs = [x for sample in samples for x in sample["logprobs"]]
    assert len(logprobs) == stats["tokens"] and all(math.isfinite(x) and x <= 0 for x in logprobs)
    report = json.loads((folder / "score" / "acceptance.json").read_text())
    assert report["documents"] == len(samples) and report["nll_1"]["n"] == stats["tokens"]
    # The trainer's forward on the exported weights, against what the decode kernels said of the run's own.
    gap = abs(report["nll_1"]["value"] + sum(logprobs) / len(logprobs))
    assert gap < max(story.stage.logprob_gap, 1e-4), gap
    assert 0 < report["alpha_1"]["value"] <= 1 and 1 <= report["accept_length_k2"]["value"] <= 3
    assert {"config.json", "tokenizer.json"} <= {file.name for file in (folder / "hf").iterdir()}
    assert "with the MTP layer" in story.printed("convert")
    found = dict(line.split(None, 1) for line in story.printed("doctor").splitlines() if " " in line)
    assert found["missing"] == found["unknown"] == found["unusable"] == "none", found
    assert "MTP layer     complete" in story.printed("doctor")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tests.gpu.story <new folder>")
    story = tell(Path(sys.argv[1]), CPU)
    for name, seconds in story.seconds.items():
        print(f"{name:<20} {seconds:>6.1f} s")


if __name__ == "__main__":
    main()
