"""A loss or a gradient that is not finite stops the run, named, with every weight as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import train_step
from bailing_mtp.training.update import TrainingDiverged
from tests.distributed import worlds
from tests.mtp import models


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    with worlds.layout(tp=1, ep=1) as context:
        yield models.fixture_state(context)


def _batches() -> list[TokenBatch]:
    first, second = models.pack((20, 9, 3), (False, False, True)), models.pack((17, 6), seed=4)
    names = (("a:1", "a:2", "padding"), ("b:1", "b:2"))
    return [
        TokenBatch(x.input_ids_T, x.loss_mask_T, x.layout, document_ids=ids)
        for x, ids in zip((first, second), names, strict=True)
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poisoned_loss(state: TrainState, value: float):
    before, step = models.weights(state), state.step
    with pytest.raises(TrainingDiverged) as caught:
        train_step(state, _batches(), models.Poisoned(models.objective(), "b:1", value))
    message = str(caught.value)
    assert f"step {step + 1}: " in message and "train/loss is not finite" in message
    assert "documents: b:1, b:2;" in message and "a:1" not in message
    _unchanged(state, before, step)


@pytest.mark.parametrize(
    ("group", "name"), [("trunk", "decoder.layers.1.self_attention.out_proj.weight"), ("mtp", "eh_proj.weight")]
)
def test_poisoned_gradient(state: TrainState, group: str, name: str):
    module = state.trunk_module if group == "trunk" else state.mtp_module
    hook = module.get_parameter(name).register_hook(lambda grad: grad * float("nan"))
    before, step = models.weights(state), state.step
    with pytest.raises(TrainingDiverged) as caught:
        train_step(state, _batches(), models.objective())
    hook.remove()
    message = str(caught.value)
    assert f"step {step + 1}: " in message and f"parameter group {group} is not finite" in message
    assert name in message and "documents: a:1, a:2, b:1, b:2;" in message
    _unchanged(state, before, step)


def _unchanged(state: TrainState, before: dict[str, torch.Tensor], step: int) -> None:
    after = models.weights(state)
    changed = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    assert not changed and state.step == step and any("expert_bias" in name for name in before)
