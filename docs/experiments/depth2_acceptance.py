"""Does training two MTP depths lift the acceptance of the second draft?

    python -m docs.experiments.depth2_acceptance [seed,seed,...] [steps]

Task: a document opens with one of 8 rules and goes on by that rule's own random permutation of 48 tokens; one
token in twenty is random instead. The trunk has to keep the rule in mind, and so has a draft chain, whose second
pass sees the layer's own output in place of the trunk's state. Both arms train on the same tokens, one with
depth 1, one with depth 2 (soft targets, joint), and both are evaluated to depth 2 on the same held-out documents.
Prints a line per run, all held out: the trunk's loss and, per depth, acceptance and top-1 agreement. The results
stand in docs/measurements.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bailing_mtp.config import MtpConfig, OptimConfig, PretrainConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.model.build import build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext, build_context
from bailing_mtp.training.evaluate import evaluate
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from recipes.compose import compose

RULES, SYMBOLS, NOISE = 8, 48, 0.05
DOCUMENT_TOKENS, DOCUMENTS = 32, 32
"""Tokens of a document, and documents of a step."""

SIZES = {
    "vocab_size": RULES + SYMBOLS, "hidden_size": 64, "num_hidden_layers": 3, "layer_group_size": 2,
    "head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "rotary_dim": 16, "intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
"""What differs from model=tiny."""


@dataclass
class Documents:
    """Endless steps of one pack each; rewindable, as `evaluate` asks."""

    tables: Tensor
    seed: int
    step: int = 0

    def next_step(self) -> list[TokenBatch]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        self.step += 1
        rule = torch.randint(RULES, (DOCUMENTS,), generator=generator)
        ids = [rule, torch.randint(SYMBOLS, (DOCUMENTS,), generator=generator)]
        for _ in range(DOCUMENT_TOKENS - 2):
            lost = torch.rand(DOCUMENTS, generator=generator) < NOISE
            anything = torch.randint(SYMBOLS, (DOCUMENTS,), generator=generator)
            ids.append(torch.where(lost, anything, self.tables[rule, ids[-1]]))
        ids_T = (torch.stack(ids, dim=1) + torch.tensor([0] + [RULES] * (DOCUMENT_TOKENS - 1))).flatten()
        layout = PackedLayout.build((DOCUMENT_TOKENS,) * DOCUMENTS)
        return [TokenBatch(ids_T, torch.ones_like(ids_T, dtype=torch.bool), layout)]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]


def fresh_state(context: ParallelContext, seed: int, steps: int) -> TrainState:
    overrides = [f"model.architecture.{key}={value}" for key, value in SIZES.items()]
    plain = compose(PretrainConfig, "pretrain", ["model=tiny", *overrides])
    arch = Architecture.from_hf(plain["model"]["architecture"], "model.architecture", strict=True)
    settings = ModelSettings(torch.float32, torch.float32, expert_bias_rate=1e-3)
    built = build_model(arch, settings, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed)
    optim = OptimConfig(lr=4e-3, schedule="wsd", warmup_steps=20)
    return build_state(built, context, optim, steps)


def run(context: ParallelContext, depth: int, seed: int, steps: int) -> dict[str, float]:
    """Train one arm; its metrics on held-out documents, to depth 2, and the seconds it took."""
    generator = torch.Generator().manual_seed(seed)
    tables = torch.stack([torch.randperm(SYMBOLS, generator=generator) for _ in range(RULES)])
    state = fresh_state(context, seed, steps)
    mtp = MtpConfig(loss_scale=0.3, objective="soft", depth=depth, depth_decay=1.0)
    documents, objective = Documents(tables, 2 * seed), PretrainObjective(mtp)
    started_s = time.monotonic()
    for _ in range(steps):
        train_step(state, documents.next_step(), objective)
    held_out = Documents(tables, 2 * seed + 1)
    valid = evaluate(state, held_out, PretrainObjective(mtp, depths=2), n_steps=8)
    return valid | {"seconds": time.monotonic() - started_s}


def main(seeds: list[int], steps: int) -> None:
    torch.set_num_threads(1)
    context = build_context(tp=1, ep=1, seed=0, device_type="cpu")
    found: dict[int, list[float]] = {1: [], 2: []}
    for seed in seeds:
        for depth, accepted in found.items():
            metrics = run(context, depth, seed, steps)
            names = [f"mtp_{name}_depth{d}" for d in (1, 2) for name in ("accept", "top1")]
            shown = "  ".join(f"{name} {metrics['valid/' + name]:.3f}" for name in ("lm_loss", *names))
            print(f"seed {seed}  trained to depth {depth}  {shown}  {metrics['seconds']:.0f} s", flush=True)
            accepted.append(metrics["valid/mtp_accept_depth2"])
    means = {depth: sum(values) / len(values) for depth, values in found.items()}
    print(f"mean mtp_accept_depth2  depth 1: {means[1]:.3f}  depth 2: {means[2]:.3f}  {means[2] - means[1]:+.3f}")


if __name__ == "__main__":
    seeds_text, steps_text = [*sys.argv[1:], *("1,2,3", "150")[len(sys.argv) - 1 :]]
    main([int(seed) for seed in seeds_text.split(",")], int(steps_text))
