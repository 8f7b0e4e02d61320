"""What several gloo ranks must do exactly as one process does. Run by tests.distributed.suite under torchrun.

A case takes (reference, scratch directory) and raises AssertionError; every rank runs it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.state import DdpOptions, build_state
from bailing_mtp.training.step import train_step
from tests.distributed import cases_checkpoint, cases_exchange, cases_rl, worlds
from tests.distributed.cases_benchmark import forced_drafts, touched_shares
from tests.distributed.cases_engine import (
    engine,
    engine_adaptive,
    engine_disagreement,
    engine_graph_groups,
    engine_oversampled,
    engine_peer,
    engine_reduced,
    engine_refusal,
)
from tests.distributed.cases_evaluate import evaluation
from tests.distributed.cases_mtp import chain_gradients, detached_trunk, stop_together
from tests.distributed.cases_rollout import expert_shares, rollout_program
from tests.distributed.cases_vocab import check_vocab_parallel
from tests.distributed.cases_weights import check_export
from tests.distributed.golden import check_golden

Case = Callable[[worlds.Reference, Path], None]


def golden(
    reference: worlds.Reference, scratch: Path, tp: int, ep: int, settings: ModelSettings = worlds.FP32
) -> None:
    with worlds.layout(tp, ep) as context:
        for kind in ("dense", "moe") if ep == 1 else ("moe",):
            check_golden(kind, context, settings)


def gradients(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    with worlds.layout(tp, ep) as context:
        built = worlds.fixture_model("moe", context)
        state = build_state(built, context, worlds.OPTIM, 10, DdpOptions(overlap_grad_reduce=False))
        worlds.gradients(state, _mine(context))
        worst = worlds.largest_difference(built, context, reference.grads, "grad")
        assert worst[0] <= 1e-4, f"gradient of {worst[1]} differs by {worst[0]}"


def three_steps(
    reference: worlds.Reference, scratch: Path, tp: int, ep: int, settings: ModelSettings = worlds.FP32
) -> None:
    with worlds.layout(tp, ep) as context:
        built = worlds.fixture_model("moe", context, settings)
        state = build_state(built, context, worlds.OPTIM, 10, worlds.SMALL_BUCKETS)
        metrics = worlds.three_steps(state, _mine(context))
        for ours, theirs in zip(metrics, reference.metrics, strict=True):
            assert ours.keys() == theirs.keys()
            torch.testing.assert_close(
                torch.tensor(list(ours.values())), torch.tensor(list(theirs.values())), atol=1e-4, rtol=1e-4
            )
        worst = worlds.largest_difference(built, context, reference.weights, "weight")
        assert worst[0] <= 1e-4, f"{worst[1]} differs by {worst[0]} after three steps"
        _check_replicas(built.modules, context)


def eight_bits(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """8-bit states where tensor-parallel ranks hold experts of their own: norms as ever, replicas bit-equal."""
    with worlds.layout(tp, ep) as context:
        built = worlds.fixture_model("moe", context)
        state = build_state(built, context, worlds.EIGHT_BITS, 10, worlds.SMALL_BUCKETS)
        ours, theirs = worlds.three_steps(state, _mine(context))[0], reference.metrics[0]
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(
            torch.tensor(list(ours.values())), torch.tensor(list(theirs.values())), atol=1e-4, rtol=1e-4
        )
        _check_replicas(built.modules, context)
        bf16 = dataclasses.replace(worlds.FP32, dtype=torch.bfloat16, router_dtype=torch.bfloat16)
        built = worlds.fixture_model("moe", context, bf16)
        worlds.three_steps(build_state(built, context, worlds.EIGHT_BITS, 10, worlds.SMALL_BUCKETS), _mine(context))
        _check_replicas(built.modules, context)


def _mine(context: ParallelContext) -> list[TokenBatch]:
    return worlds.microbatches()[context.dp_rank :: context.dp]


def _check_replicas(modules: tuple[torch.nn.Module, ...], context: ParallelContext) -> None:
    """What several ranks hold in common is bit-equal: replicated tensors over TP, everything over DP."""
    for module in modules:
        named = [*module.named_parameters(), *((n, b) for n, b in module.named_buffers() if "expert_bias" in n)]
        for name, tensor in named:
            expert = not getattr(tensor, "allreduce", True)
            groups = [context.groups.expt_dp] if expert else [context.groups.dp]
            if not expert and not getattr(tensor, "tensor_model_parallel", False):
                groups.append(context.tp_group)
            for group in groups:
                copies = [torch.empty_like(tensor) for _ in range(group.size())]
                dist.all_gather(copies, tensor.detach(), group=group)
                assert all(torch.equal(copy, copies[0]) for copy in copies), f"replicas of {name} differ"


def idle_expert_rank(
    reference: worlds.Reference, scratch: Path, settings: ModelSettings = worlds.FP32
) -> None:
    """All tokens go to the first rank's experts; the other rank's still take part in every reduction."""
    with worlds.layout(tp=1, ep=2) as context:
        built = worlds.fixture_model("moe", context, settings)
        n_local = built.trunk.arch.num_experts // 2
        for module in built.modules:
            for name, buffer in module.named_buffers():
                if name.endswith("expert_bias"):
                    buffer[n_local:] = -100.0
        state = build_state(built, context, worlds.OPTIM, 10, worlds.SMALL_BUCKETS)
        before = built.mtp.block.mlp.experts.gate_up.detach().clone()
        result = train_step(state, _mine(context), worlds.OBJECTIVE)
        assert all(torch.isfinite(torch.tensor(value)) for value in result.metrics.values())
        changed = not torch.equal(built.mtp.block.mlp.experts.gate_up, before)
        # Without tokens only weight decay moves an expert (decay * lr), with tokens Adam moves it by about lr.
        moved = float((built.mtp.block.mlp.experts.gate_up - before).abs().max())
        assert changed and (moved > 5e-4) == (context.ep_rank == 0), f"rank {context.rank}: moved by {moved}"


def no_mtp_sites(reference: worlds.Reference, scratch: Path) -> None:
    """One rank has documents of two tokens only: no MTP site there, zero loss, no NaN, no hang."""
    with worlds.layout(tp=1, ep=2) as context:
        built = worlds.fixture_model("moe", context)
        state = build_state(built, context, worlds.OPTIM, 10, worlds.SMALL_BUCKETS)
        short = worlds.microbatches(1, lengths=(2,) * 20)
        batches = short if context.dp_rank == 0 else worlds.microbatches(1)
        result = train_step(state, batches, worlds.OBJECTIVE)
        assert result.counts["sites_depth1"] == int(worlds.microbatches(1)[0].shift(1).valid_T.sum())
        result = train_step(state, short, worlds.OBJECTIVE)
        assert result.counts["sites_depth1"] == 0 and "mtp/loss_depth1" not in result.metrics
        assert all(torch.isfinite(p).all() for module in built.modules for p in module.parameters())


def vocab_parallel(reference: worlds.Reference, scratch: Path) -> None:
    with worlds.layout(tp=2, ep=1) as context:
        check_vocab_parallel(context.tp_group, context.tp_rank, context.tp)


def export(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    with worlds.layout(tp, ep) as context:
        check_export(context.tp_group, context.ep_group, worlds.shard_of(context), scratch / f"tp{tp}_ep{ep}")


def _layouts(case: Callable[..., None], *sizes: tuple[int, int]) -> dict[str, Case]:
    return {f"{case.__name__}_tp{tp}_ep{ep}": functools.partial(case, tp=tp, ep=ep) for tp, ep in sizes}


CASES: dict[int, dict[str, Case]] = {
    2: {
        **_layouts(golden, (2, 1), (1, 2), (2, 2)),
        **_layouts(gradients, (2, 1), (1, 2), (2, 2)),
        **_layouts(three_steps, (2, 1), (1, 2), (2, 2)),
        **_layouts(export, (2, 1), (1, 2), (2, 2)),
        **_layouts(evaluation, (2, 1), (1, 2)),
        **_layouts(rollout_program, (2, 1), (2, 2), (1, 2)),
        **_layouts(engine, (2, 1), (2, 2), (1, 2)),
        **_layouts(engine_oversampled, (1, 1), (1, 2), (2, 1)),
        **_layouts(engine_adaptive, (2, 1), (1, 2)),
        **_layouts(engine_reduced, (2, 1), (2, 2)),
        **_layouts(forced_drafts, (2, 2), (1, 2)),
        "touched_shares": touched_shares,
        **_layouts(engine_peer, (2, 2)),
        **_layouts(engine_graph_groups, (2, 1), (1, 2)),
        "engine_disagreement": engine_disagreement,
        "engine_refusal": engine_refusal,
        **_layouts(chain_gradients, (2, 1), (1, 1), (1, 2)),
        **_layouts(detached_trunk, (1, 1), (1, 2)),
        **_layouts(stop_together, (1, 1), (2, 1)),
        **_layouts(eight_bits, (2, 2)),
        **_layouts(cases_exchange.grouped, (1, 2), (2, 2)),
        "golden_grouped": functools.partial(golden, tp=2, ep=2, settings=worlds.GROUPED),
        "three_steps_grouped": functools.partial(three_steps, tp=2, ep=2, settings=worlds.GROUPED),
        "replay_grouped": functools.partial(cases_rl.replay, tp=1, ep=2, settings=worlds.GROUPED),
        "exchanged": cases_exchange.exchanged,
        "a_row_for_each_rank": cases_exchange.a_row_for_each_rank,
        "idle_expert_rank_grouped": functools.partial(idle_expert_rank, settings=worlds.GROUPED),
        "kept_bytes": cases_exchange.kept_bytes,
        "idle_expert_rank": idle_expert_rank,
        "no_mtp_sites": no_mtp_sites,
        "vocab_parallel": vocab_parallel,
        **cases_checkpoint.CASES,
        **_layouts(cases_rl.dpo, (1, 1), (2, 1), (1, 2)),
        **_layouts(cases_rl.policy, (1, 1), (2, 1)),
        **_layouts(cases_rl.detached, (1, 1)),
        **_layouts(cases_rl.grpo, (2, 2), (1, 2)),
        **_layouts(cases_rl.replay, (2, 2), (1, 2)),
    },
    4: {
        **_layouts(gradients, (2, 2)),
        **_layouts(three_steps, (2, 2)),
        **_layouts(cases_exchange.grouped, (1, 4), (2, 2)),
        "exchanged": cases_exchange.exchanged,
        "a_row_for_each_rank": cases_exchange.a_row_for_each_rank,
        **_layouts(export, (2, 4)),
        **_layouts(rollout_program, (2, 4), (2, 2)),
        **_layouts(engine, (2, 4)),
        **_layouts(engine_oversampled, (1, 2), (2, 4)),
        **_layouts(expert_shares, (2, 4), (4, 2), (4, 1), (1, 4)),
    },
}
