"""The rollouts of one update: gathered until there is enough to learn from, counted, kept in part on disk."""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bailing_mtp.config import GrpoConfig, UserError
from bailing_mtp.contracts.samples import RolloutGroup
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.rl.advantages import Advantages
from bailing_mtp.rl.samples import PolicyRow, policy_rows, usable
from bailing_mtp.rollout.stats import RolloutStats

from .judge import Scores

SOLVED = 1.0
"""Reward from which a sample counts as solved."""


class _Judged(NamedTuple):
    """`rewards` of the usable samples, in order; `advantages` None where they are all equal."""

    group: RolloutGroup
    rewards: list[float]
    advantages: tuple[float, ...] | None


class Rollouts:
    """What one update learns from; the same on every rank, but for times."""

    def __init__(self, config: GrpoConfig, version: int) -> None:
        """version: of the weights before the update."""
        self._rl, self._version = config.rl, version
        self._judged: list[_Judged] = []
        self._n_failed = self._n_rollouts = 0
        self.stats = RolloutStats(config.rollout.speculative_tokens)
        """Of all rollouts together."""
        self.memory_bytes = 0
        """Most that the engine held."""
        self._seconds = dict.fromkeys(("rollout", "switch", "reward", "train"), 0.0)

    def add(self, groups: Sequence[RolloutGroup], scores: Scores, found: Advantages, stats: RolloutStats) -> None:
        """One rollout. Raises UserError when rl.max_rollouts of them taught nothing."""
        rl = self._rl
        self._judged += [_Judged(*parts) for parts in zip(groups, scores.rewards, found.groups, strict=True)]
        self._n_failed += scores.n_failed
        self._n_rollouts += 1
        self.stats = self.stats.plus(stats)
        # The clock of a rollout's statistics runs while it decodes; the rest is publishing, memory and gathering.
        self._seconds["rollout"] += stats.seconds
        self._seconds["switch"] -= stats.seconds
        if self._n_rollouts == rl.max_rollouts and len(self.rows()) < rl.minibatches:
            raise UserError(
                f"rl.max_rollouts: {rl.max_rollouts} rollouts gave {len(self.rows())} samples to learn from, and "
                f"rl.minibatches={rl.minibatches} needs at least {rl.minibatches}: a prompt whose rewards are all "
                f"equal teaches nothing (mean reward {self._mean_reward():.3g}); use easier or harder prompts, "
                "another rl.reward, or more sampling.samples_per_prompt"
            )

    @property
    def is_enough(self) -> bool:
        """Whether the update can be made: some prompt teaches, with rl.refill as many as a rollout has."""
        n_taught = sum(item.advantages is not None for item in self._judged)
        wanted = self._rl.prompts_per_rollout if self._rl.refill else 1
        is_full = n_taught >= wanted or self._n_rollouts == self._rl.max_rollouts
        return self._n_rollouts > 0 and is_full and len(self.rows()) >= self._rl.minibatches

    def rows(self) -> tuple[PolicyRow, ...]:
        """The samples that are trained: those of the first rl.prompts_per_rollout prompts that teach something."""
        taught = [item for item in self._judged if item.advantages is not None][: self._rl.prompts_per_rollout]
        found = Advantages(tuple(item.advantages for item in taught))
        return policy_rows([item.group for item in taught], found).rows

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time inside as `what`: rollout, switch, reward or train."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[what] += time.monotonic() - begin_s

    def switched(self, seconds: float) -> None:
        """Count seconds of training as those of a switch."""
        self._seconds["train"] -= seconds
        self._seconds["switch"] += seconds

    def metrics(self) -> dict[str, float]:
        """Rewards, samples, speculation, seconds."""
        summary = self.stats.summary()
        samples = [sample for item in self._judged for sample in item.group.samples]
        rewards = self._rewards()
        values: dict[str, float | None] = {
            "reward/mean": self._mean_reward(),
            "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
            "reward/solved": sum(reward >= SOLVED for reward in rewards) / max(1, len(rewards)),
            "reward/failed": self._n_failed,
            "rollout/groups_dropped": sum(item.advantages is None for item in self._judged),
            "rollout/samples_unusable": len(samples) - len(rewards),
            "rollout/samples_trained": len(self.rows()),
            "rollout/samples_cut": sum(sample.finish_reason == "length" for sample in samples) / max(1, len(samples)),
            "rollout/response_tokens": sum(len(sample.response_ids) for sample in samples) / max(1, len(samples)),
            "rollout/accept_length": summary["accept_length"],
            "rollout/tokens_per_second": summary["tokens_per_second"],
            "memory/rollout_gb": self.memory_bytes / 2**30,
        }
        values |= {f"rollout/{name}": share for name, share in self.stats.shares().items()}
        values |= {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        if self._rl.oversample > 1:
            values |= self._staleness()
        return {name: float(value) for name, value in values.items() if value is not None}

    def _staleness(self) -> dict[str, float]:
        """How far behind the weights the trained tokens are, in optimizer steps, and the share that is at all."""
        lags = [self._version - version for row in self.rows() for version in row.sample.versions]
        return {
            "rollout/stale_tokens": sum(lag > 0 for lag in lags) / max(1, len(lags)),
            "rollout/mean_version_lag": sum(lags) / max(1, len(lags)),
        }

    def keep(self, file: Path, tokenizer: Tokenizer) -> None:
        """Write the first rl.samples_kept samples as JSON lines, prompts in turn."""
        lines = [
            {
                "prompt": tokenizer.decode(group.prompt.prompt_ids),
                "response": tokenizer.decode(sample.response_ids),
                "answer": (group.prompt.record or {}).get("answer"),
                "reward": reward,
                "advantage": None if advantages is None else advantages[index],
                "finish_reason": sample.finish_reason,
                "response_tokens": len(sample.response_ids),
                "sample_index": sample.sample_index,
            }
            for group, rewards, advantages in self._judged
            for index, (sample, reward) in enumerate(zip(usable(group), rewards, strict=True))
        ]
        lines.sort(key=lambda line: line["sample_index"])
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = (json.dumps(line, ensure_ascii=False) + "\n" for line in lines[: self._rl.samples_kept])
        file.write_text("".join(kept), encoding="utf-8")

    def _rewards(self) -> list[float]:
        return [reward for item in self._judged for reward in item.rewards]

    def _mean_reward(self) -> float:
        return statistics.fmean(self._rewards() or [0.0])
