"""Rollout programs on several ranks against one process: prefill, steps, the MTP layer, logits."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.contracts.clock import WeightsClock
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.compute import ExpertLayout
from bailing_mtp.rollout.memory import MemoryPlan, RolloutMemory
from bailing_mtp.rollout.prefill import PrefillPlan
from bailing_mtp.rollout.program import Program
from bailing_mtp.weights.view import publish
from tests.distributed import worlds
from tests.rollout.blocks import assign_blocks

DRAFTS, SLOTS, CONTEXT_TOKENS, BLOCK_TOKENS = 2, 3, 24, 4
PROMPT_TOKENS = (9, 5)


def rollout_program(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Every call of a rollout gives what one rank alone computes; replicas have different rows."""
    replica = dist.get_rank() // tp
    with worlds.layout(1, 1) as alone:
        expected = _run(alone, seed=replica)
    with worlds.layout(tp, ep) as context:
        assert context.dp_rank == replica
        for name, values in _run(context, seed=replica).items():
            difference = float((values - expected[name]).abs().max())
            assert difference <= 1e-4, f"rank {context.rank}: {name} differs by {difference}"


def _run(context: ParallelContext, seed: int) -> dict[str, Tensor]:
    """Two prompts, one prefilled in two chunks; two steps with different accept counts; a draft chain."""
    built = worlds.fixture_model("moe", context)
    for module in built.modules:
        module.eval()
    arch, shard = built.trunk.arch, worlds.shard_of(context)
    plan = MemoryPlan.build(arch, shard, DRAFTS, SLOTS, 0, CONTEXT_TOKENS, BLOCK_TOKENS, torch.float32)
    memory = RolloutMemory(plan, context.device)
    rollout = Program(publish(built.trunk, built.mtp, shard, WeightsClock()), memory, context)
    for slot in range(2):
        assign_blocks(memory, slot, 0, list(range(slot * plan.max_blocks, (slot + 1) * plan.max_blocks)))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, arch.vocab_size, (2, CONTEXT_TOKENS), generator=generator)
    found = _prefill(rollout, tokens)
    slots_n = torch.tensor([1, 0, memory.scratch_slot])
    rows = torch.cat((tokens[[1, 0]], tokens[:1]))
    found |= _steps(rollout, rows, slots_n, [PROMPT_TOKENS[1], PROMPT_TOKENS[0], 0])
    return {name: _whole(values, context) if "logits" in name else values for name, values in found.items()}


def _prefill(rollout: Program, tokens: Tensor) -> dict[str, Tensor]:
    first, second = PROMPT_TOKENS
    hidden = []
    for parts in ([(0, 0, 4)], [(1, 0, second), (0, 4, first - 4)]):
        plan = PrefillPlan.build(parts, rollout.context.device)
        ids = torch.cat([tokens[slot, start : start + n] for slot, start, n in parts])
        after = torch.cat([tokens[slot, start + 1 : start + n + 1] for slot, start, n in parts])
        hidden.append(rollout.prefill(plan, ids))
        rollout.mtp_prefill(plan, after, hidden[-1], torch.ones(plan.n_tokens, dtype=torch.bool))
    hidden_TH = torch.cat(hidden)
    return {"prefill hidden": hidden_TH, "prefill logits": rollout.logits(hidden_TH)}


def _steps(rollout: Program, rows: Tensor, slots_n: Tensor, position: list[int]) -> dict[str, Tensor]:
    found = {}
    for turn, committed in enumerate(([1, 3, 2], [2, 1, 2])):
        fed = torch.stack([ids[p : p + DRAFTS + 1] for ids, p in zip(rows, position, strict=True)])
        after = torch.stack([ids[p + 1 : p + DRAFTS + 2] for ids, p in zip(rows, position, strict=True)])
        hidden = rollout.verify(fed, slots_n)
        refreshed = rollout.mtp_refresh(after, hidden, slots_n)
        rollout.memory.commit(slots_n, torch.tensor(committed))
        position = [p + n for p, n in zip(position, committed[:2], strict=False)] + [0]
        m_nH = refreshed[torch.arange(3), torch.tensor(committed) - 1]
        chained = rollout.mtp_step(fed[:, 1], m_nH, 1, slots_n)
        # The padded row has no sequence; its values mean nothing.
        found |= {
            f"verify {turn}": hidden[:2],
            f"verify logits {turn}": rollout.logits(hidden)[:2],
            f"refresh {turn}": refreshed[:2],
            f"chain {turn}": chained[:2],
        }
    return found


def _whole(logits: Tensor, context: ParallelContext) -> Tensor:
    shards = [torch.empty_like(logits) for _ in range(context.tp)]
    dist.all_gather(shards, logits.contiguous(), group=context.tp_group)
    return torch.cat(shards, dim=-1)


def expert_shares(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Over the ranks that sum a row's experts, each channel of each expert is computed exactly once."""
    with worlds.layout(tp, ep) as context:
        layout, width, n_experts = ExpertLayout.of(context), 10, 4 * ep
        group = context.ep_group if ep > tp else context.tp_group
        n_local = n_experts // ep
        done = torch.zeros(n_experts, width)
        start, stop = layout.width_slice(width)
        done[context.ep_rank * n_local : (context.ep_rank + 1) * n_local, start:stop] = 1
        dist.all_reduce(done, group=group)
        assert bool((done == 1).all()), done
