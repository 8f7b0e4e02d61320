"""What a benchmark of rollouts is made of, on ranks that share a vocabulary or its experts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.kernels.reference import decode
from bailing_mtp.rollout.engine import RolloutEngine
from recipes.bench_case import Draw
from recipes.bench_forced import ForcedDrafter
from recipes.bench_step_bytes import touched_experts
from recipes.bench_weights import random_view
from tests.benchmark.sizes import smallest
from tests.distributed import worlds


def forced_drafts(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Drafts are kept or rejected as told, whichever rank holds them."""
    with worlds.layout(tp, ep) as context:
        view = random_view(smallest(), Draw(context.device, torch.float32, 0), tp, ep)
        drafter = ForcedDrafter(context.device)
        engine = RolloutEngine(lambda: view, context, RolloutConfig(speculative_tokens=2), drafter=drafter)
        drafter.force("all")
        engine.generate(_prompts(4))
        assert engine.stats.accepted == [engine.stats.reached[0]] * 2 and engine.stats.row_steps == 4 * 12 // 3
        drafter.force("none")
        engine.generate(_prompts(4))
        # Rejection leaves a draft the chance that the target gives it, one in 500 here.
        assert sum(engine.stats.accepted) <= 2 and engine.stats.row_steps >= 4 * 12 - 4


def touched_shares(reference: worlds.Reference, scratch: Path) -> None:
    """Each of two replicas counts the experts that it holds, for the rows of both."""
    with worlds.layout(tp=1, ep=2) as context:
        view = random_view(smallest(), Draw(context.device, torch.float32, 0), ep=2)
        counts = touched_experts(view, context, _prompts(8), 0, decode, "torch").trunk
    arch = view.arch
    assert all(0 < count <= arch.num_experts // 2 for count in counts)
    total = torch.tensor(counts, dtype=torch.float32)
    dist.all_reduce(total)
    assert bool((total >= arch.experts_per_token).all()) and float(total.mean()) > arch.num_experts / 2


def _prompts(n: int) -> list[Prompt]:
    sampling = SamplingParams(max_new_tokens=13, ignore_eos=True)
    return [Prompt(prompt_ids=(3 + index, 5, 8), index=index, sampling=sampling) for index in range(n)]
