"""The run of what=grpo: the updates of the grpo recipe on random weights, once for every number of drafts."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.samples import RolloutGroup
from bailing_mtp.model.build import count_parameters
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.stats import RolloutStats

from .backlog import Backlog
from .bench_figures import write_json
from .bench_policy import WeightsSample, as_text, policy_config, random_policy, random_prompts
from .judge import Judge
from .policy import Policy
from .rollouts import Rollouts
from .session import join_ranks, leave_ranks
from .update import Update, update

SECONDS = ("rollout", "switch", "reward", "train")


def run_policy(config: BenchmarkConfig, about: Callable[[torch.device], dict[str, Any]], target: Path) -> None:
    """Measure, print a line for every phase as it ends, and keep `target` complete after each update. about: what is
    said of a GPU."""
    started_s = time.monotonic()
    arch = Architecture.from_hf(config.model.architecture, "model.architecture", strict=True)
    context = join_ranks(config, arch)
    stated = about(context.device) | {"tp": context.tp, "ep": context.ep, "dp": context.dp}

    def tell(line: str) -> None:
        if context.is_writer:
            print(f"  {line}", flush=True)

    for name, value in stated.items():
        tell(f"{name}: {value}")
    most = policy_config(config, max(config.drafts))
    policy = random_policy(most, arch, context)
    n_parameters = count_parameters(*policy.built.modules)
    tell(f"model: {n_parameters:,} random parameters on this rank, {time.monotonic() - started_s:.1f} s from the start")
    prompts, weights = random_prompts(most, arch, config.prompt_tokens[0]), WeightsSample(policy)
    figures: list[dict[str, Any]] = []
    with Judge(most.rl, context, as_text) as judge:
        for drafts in config.drafts:
            arm = policy_config(config, drafts)
            records = arm.rl.routing_replay
            engine = RolloutEngine(policy.publish, context, arm.rollout, tell=tell, records_routes=records)
            backlog, watcher = Backlog(prompts, arm.rl), Watcher(drafts, tell)
            for number in range(1, config.steps + 1):
                done = update(arm, policy, engine, backlog, judge, watcher)
                figures.append(figure_of(done, policy, drafts, number, weights))
                tell(training_line(figures[-1]))
                if context.is_writer:
                    write_json(target, {**stated, "parameters": n_parameters, "figures": figures})
            engine.release()
    for line in summary(figures):
        tell(line)
    tell(f"{len(figures)} updates in {time.monotonic() - started_s:.0f} s, written to {target}")
    leave_ranks()


class Watcher:
    """Prints what a rollout did before training on it begins."""

    def __init__(self, drafts: int, tell: Callable[[str], None]) -> None:
        self._drafts, self._tell = drafts, tell

    def rolling(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def watch(self, engine: RolloutEngine, rollouts: Rollouts) -> Callable[[RolloutStats], None]:
        def note(stats: RolloutStats) -> None:
            rollouts.memory_bytes = max(rollouts.memory_bytes, engine.memory_bytes)

        return note

    def compare(self, rollouts: Rollouts, groups: Sequence[RolloutGroup]) -> None:
        found = rollouts.metrics()
        self._tell(
            f"k={self._drafts}: rollout {found['time/rollout_s']:.1f} s ({found['rollout/tokens_per_second']:,.0f} "
            f"tokens/s, accept length {found['rollout/accept_length']:.3f}, memory {found['memory/rollout_gb']:.1f} "
            f"GiB), switch {found['time/switch_s']:.1f} s, rewards {found['time/reward_s']:.1f} s"
        )


def figure_of(done: Update, policy: Policy, drafts: int, number: int, weights: WeightsSample) -> dict[str, Any]:
    """One update in numbers."""
    (result,) = done.results
    found, metrics = done.rollouts.metrics(), result.metrics
    tokens, train_s = result.counts["tokens"], found["time/train_s"]
    return {
        "drafts": drafts, "update": number, "accept_length": found["rollout/accept_length"],
        "rollout_tokens_per_s": found["rollout/tokens_per_second"], "samples": found["rollout/samples_trained"],
        **{f"{name}_s": found[f"time/{name}_s"] for name in SECONDS}, "trained_tokens": tokens,
        "train_tokens_per_s": tokens / max(train_s, 1e-9), "microbatches": len(done.minibatches[0]),
        "loss": metrics["train/loss"], "grad_norm": metrics["train/grad_norm"],
        "logprob_gap": metrics["rollout/logprob_gap"], "weights_changed": weights.changed(),
        "rollout_gib": found["memory/rollout_gb"], **{name: x for name, x in policy.memory.metrics().items()},
    }  # fmt: skip


def training_line(x: dict[str, Any]) -> str:
    parts = [
        f"k={x['drafts']}: training {x['train_s']:.1f} s ({x['train_tokens_per_s']:,.0f} tokens/s, {x['samples']:.0f} "
        f"samples in {x['microbatches']} microbatches)",
        f"loss {x['loss']:.4f}, grad norm {x['grad_norm']:.4f}, logprob gap {x['logprob_gap']:.5f}",
        f"{x['weights_changed']:.1%} of sampled weights changed",
    ]
    if "memory/planned_gb" in x:
        parts.append(f"peak {x['memory/peak_gb']:.1f} GiB, planned {x['memory/planned_gb']:.1f}")
    return ", ".join(parts)


def summary(figures: list[dict[str, Any]]) -> list[str]:
    """The last update of every arm, when everything is compiled and captured."""
    last = {x["drafts"]: x for x in figures}
    lines = [f"{'k':>3} {'accept':>7} {'tokens/s':>9} " + " ".join(f"{name + ' s':>10}" for name in SECONDS)]
    for drafts, x in last.items():
        seconds = " ".join(f"{x[name + '_s']:>10.1f}" for name in SECONDS)
        lines.append(f"{drafts:>3} {x['accept_length']:>7.3f} {x['rollout_tokens_per_s']:>9,.0f} {seconds}")
    return lines
