"""The MTP objective on two ranks: what one process computes, a trunk that feels nothing, and a stop together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.training.update import TrainingDiverged
from tests.distributed import worlds
from tests.mtp import models

NAN = float("nan")


def chain_gradients(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Two joint soft depths, microbatches of very different site counts: gradients and router counts; then the
    metrics of a step with overlapped reduction, gradient norms among them."""
    with worlds.layout(tp, ep) as context:
        worlds.chain_state(reference, worlds.fixture_model("moe", context), context)
        mine = worlds.uneven_microbatches()[context.dp_rank :: context.dp]
        metrics = train_step(_state(context), mine, worlds.CHAIN).metrics
        assert metrics == pytest.approx(reference.chain_metrics, rel=1e-4, abs=1e-5)


def detached_trunk(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """Five clipped steps with and without a detached soft depth-2 loss: the trunk's weights are bit-equal."""
    with worlds.layout(tp, ep) as context:
        found = []
        for loss_scale in (None, 5.0):
            state = _state(context)
            state.clip_norm = 0.05
            objective = models.objective(24, objective="soft", detach=True, depth=2, loss_scale=loss_scale)
            for _ in range(5):
                metrics = train_step(state, _mine(context), objective).metrics
            assert metrics["train/grad_norm"] > state.clip_norm
            found.append(models.weights(state))
        off, on = found
        changed = [name for name in off if not torch.equal(off[name], on[name])]
        assert changed and all(name.startswith("mtp.") for name in changed), changed[:3]


def stop_together(reference: worlds.Reference, scratch: Path, tp: int, ep: int) -> None:
    """One rank's loss or gradient is not finite: all ranks raise the same words, and no weight has moved."""
    with worlds.layout(tp, ep) as context:
        state = _state(context)
        is_hurt = context.rank == context.world_size - 1
        loss = models.Poisoned(worlds.OBJECTIVE, f"rank{context.dp_rank}:0" if is_hurt or tp > 1 else "none", NAN)
        message = _stopped(state, context, loss)
        assert "train/loss is not finite" in message and f"documents: rank{context.dp - 1}:0, " in message
        assert context.dp == 1 or "rank0" not in message
        if is_hurt:
            state.mtp_module.eh_proj.weight.register_hook(lambda grad: grad * NAN)
        message = _stopped(state, context, worlds.OBJECTIVE)
        assert "parameter group mtp is not finite (eh_proj.weight" in message
        assert all(f"rank{rank}:0" in message for rank in range(context.dp))


def _stopped(state: TrainState, context: ParallelContext, objective: Objective) -> str:
    before = models.weights(state)
    with pytest.raises(TrainingDiverged) as caught:
        train_step(state, _mine(context), objective)
    after = models.weights(state)
    changed = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    assert not changed and state.step == 0, changed
    messages: list[str] = [""] * context.world_size
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1 and messages[0].startswith("step 1: "), messages
    return messages[0]


def _state(context: ParallelContext) -> TrainState:
    return build_state(worlds.fixture_model("moe", context), context, worlds.OPTIM, 10, worlds.SMALL_BUCKETS)


def _mine(context: ParallelContext) -> list[TokenBatch]:
    batches = worlds.microbatches(2 * context.dp, lengths=(19, 30, 8))[context.dp_rank :: context.dp]
    ids = [f"rank{context.dp_rank}:{index}" for index in range(len(batches) * 3)]
    return [replace(x, document_ids=tuple(ids[3 * n : 3 * n + 3])) for n, x in enumerate(batches)]
