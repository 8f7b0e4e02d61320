"""Writing a step's first gradients and adding the others: as clearing and adding, and nothing of older steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bailing_mtp.config import OptimConfig
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.main_grads import begin_gradients
from bailing_mtp.training.state import build_state
from bailing_mtp.training.step import accumulate_gradients, train_step
from bailing_mtp.training.update import clip_and_step, finish_gradients
from tests.distributed import worlds
from tests.mtp import models

FP32 = dataclasses.replace(worlds.FP32, expert_bias_rate=0.0)
BF16 = dataclasses.replace(FP32, dtype=torch.bfloat16, router_dtype=torch.bfloat16)
BATCHES = [models.pack((19, 6, 4), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with worlds.layout(tp=1, ep=1) as found:
        yield found


@pytest.mark.parametrize(
    "settings", [FP32, BF16, dataclasses.replace(BF16, recompute="full")], ids=["fp32", "bf16", "recompute"]
)
@pytest.mark.parametrize("overlapped", [False, True])
def test_first_written_is_cleared_and_added(context: ParallelContext, settings: ModelSettings, overlapped: bool):
    """Three microbatches after a step with others; the buffers held something else before."""
    ddp = worlds.SMALL_BUCKETS if overlapped else models.PLAIN_DDP
    state = build_state(worlds.fixture_model("moe", context, settings), context, worlds.OPTIM, 10, ddp)
    objective = models.objective(depth=2)
    for chunk in state.chunks:
        for parameter in chunk.module.parameters():
            parameter.main_grad.fill_(math.nan)
    accumulate_gradients(state, BATCHES, objective)
    ours = models.main_grads(state)
    finish_gradients(state)
    counted = [objective.count(batch) for batch in BATCHES]
    counts = {name: float(sum(count[name] for count in counted)) for name in counted[0]}
    models.clear_gradients(state)
    for batch in BATCHES:
        with state.trunk.no_sync(), state.mtp.no_sync():
            objective(state, batch, counts).total.backward()
    theirs = models.main_grads(state)
    assert all(torch.equal(ours[name], grad) for name, grad in theirs.items()) and len(theirs) > 20
    assert any(grad.any() for grad in theirs.values())


def test_what_no_pass_reaches_is_zero(context: ParallelContext):
    class TrunkAlone(type(models.objective())):
        def _mtp_hidden(self, *arguments: object) -> tuple[Tensor, ...]:
            return tuple(x.detach() for x in super()._mtp_hidden(*arguments))

    state = models.fixture_state(context)
    accumulate_gradients(state, [BATCHES[0]], models.objective())
    assert any(p.main_grad.any() for p in state.mtp_module.parameters())
    accumulate_gradients(state, [BATCHES[1]], TrunkAlone(models.objective().mtp, chunk_tokens=16))
    assert not any(p.main_grad.any() for p in state.mtp_module.parameters())
    assert all(p.main_grad.any() for p in state.trunk_module.parameters() if p.dim() == 2)


@pytest.mark.parametrize("clip_norm", [None, 1e-2, 1e3])
def test_norms_and_clipping_by_group(context: ParallelContext, clip_norm: float | None):
    """The trunk's and the layer's norms are those of all their gradients, and each is scaled down by its own."""
    state = models.fixture_state(context)
    accumulate_gradients(state, BATCHES, models.objective())
    finish_gradients(state)
    before = models.main_grads(state)
    norms = clip_and_step(state, clip_norm)
    assert set(norms) == {"trunk", "mtp"}
    for group, norm in norms.items():
        mine = {name: grad for name, grad in before.items() if name.startswith(group)}
        assert norm == pytest.approx(math.sqrt(sum(float(x.double().square().sum()) for x in mine.values())), rel=1e-5)
        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        after = {name: grad for name, grad in models.main_grads(state).items() if name.startswith(group)}
        assert (factor < 1.0) == (clip_norm == 1e-2)
        for name, grad in mine.items():
            torch.testing.assert_close(after[name], grad * factor, atol=0, rtol=1e-6)


def test_a_step_is_the_same_after_any_history(context: ParallelContext):
    """A refused or finished step leaves nothing behind in the buffers."""
    found = []
    for history in ([], BATCHES[:2]):
        state = build_state(
            worlds.fixture_model("moe", context), context, OptimConfig(lr=1e-30), 10, models.PLAIN_DDP
        )
        for batch in history:
            train_step(state, [batch], models.objective())
        result = train_step(state, [BATCHES[2]], models.objective())
        found.append((result.metrics["train/grad_norm"], result.metrics["mtp/grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_fused_weight_gradients_find_a_cleared_buffer(context: ParallelContext, monkeypatch: pytest.MonkeyPatch):
    """Where megatron-core's linears add to the buffer themselves, it is cleared and added to."""
    state = models.fixture_state(context)
    accumulate_gradients(state, [BATCHES[0]], models.objective())
    once = models.main_grads(state)
    for chunk in state.chunks:
        monkeypatch.setattr(chunk.config, "gradient_accumulation_fusion", True)
    begin_gradients(state.chunks)
    assert not any(p.main_grad.any() for chunk in state.chunks for p in chunk.module.parameters())
    objective = models.objective()
    for chunk in state.chunks:
        monkeypatch.setattr(chunk.config, "gradient_accumulation_fusion", False)
    objective(state, BATCHES[0], objective.count(BATCHES[0])).total.backward()
    assert all(torch.equal(grad, once[name]) for name, grad in models.main_grads(state).items())
