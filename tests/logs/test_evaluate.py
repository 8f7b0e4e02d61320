"""Evaluation gives training's numbers, changes nothing, and sees the same documents each time."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.training.evaluate import evaluate, valid_name
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import train_step
from tests.distributed import worlds


class Held:
    """Held-out batches, one a step, rewindable like a loader."""

    def __init__(self, batches: list[TokenBatch]) -> None:
        self.batches, self.next = batches, 0

    def next_step(self) -> list[TokenBatch]:
        self.next += 1
        return [self.batches[self.next - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    with worlds.layout(tp=1, ep=1) as context:
        yield build_state(worlds.fixture_model("moe", context), context, worlds.OPTIM, steps=10)


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and counter of the model, copied."""
    tensors = {}
    for index, chunk in enumerate(state.chunks):
        named = [*chunk.named_parameters(), *chunk.named_buffers()]
        tensors |= {f"{index}.{name}": tensor.detach().clone() for name, tensor in named}
    return tensors


def test_changes_nothing_and_repeats_itself(state: TrainState):
    before, rng = everything(state), torch.get_rng_state()
    held = Held(worlds.microbatches(3))
    first = evaluate(state, held, worlds.OBJECTIVE, n_steps=3)
    assert held.next == 0 and evaluate(state, held, worlds.OBJECTIVE, n_steps=3) == first
    after = everything(state)
    assert before.keys() == after.keys() and any("local_tokens_per_expert" in name for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(module.training for chunk in state.chunks for module in chunk.modules())


def test_is_the_mean_over_all_sites_not_over_steps(state: TrainState):
    batches = [*worlds.microbatches(2), *worlds.microbatches(1, lengths=(5, 9))]
    together = evaluate(state, Held(batches), worlds.OBJECTIVE, n_steps=3)
    for name in ("train/lm_loss", "mtp/loss_depth1"):
        count_name = worlds.OBJECTIVE.denominators()[name]
        counts = [worlds.OBJECTIVE.count(batch)[count_name] for batch in batches]
        means = [
            evaluate(state, Held([batch]), worlds.OBJECTIVE, n_steps=1)[valid_name(name)] for batch in batches
        ]
        mean = sum(n * value for n, value in zip(counts, means, strict=True)) / sum(counts)
        assert together[valid_name(name)] == pytest.approx(mean, rel=1e-6)
        assert together[valid_name(name)] != pytest.approx(sum(means) / 3, rel=1e-4)


def test_equals_what_a_training_step_reports_before_its_update(state: TrainState):
    batches = worlds.microbatches(2)
    valid = evaluate(state, Held(batches), worlds.OBJECTIVE, n_steps=2)
    trained = train_step(state, batches, worlds.OBJECTIVE).metrics
    assert valid and all(name.startswith("valid/") for name in valid)
    for name in ("train/lm_loss", "mtp/loss_depth1"):
        assert valid[valid_name(name)] == pytest.approx(trained[name], rel=1e-5)
    assert evaluate(state, Held(batches), worlds.OBJECTIVE, n_steps=2)["valid/lm_loss"] != valid["valid/lm_loss"]


def test_a_metric_without_a_site_is_left_out(state: TrainState):
    valid = evaluate(state, Held(worlds.microbatches(1, lengths=(2, 2))), worlds.OBJECTIVE, n_steps=1)
    assert "valid/lm_loss" in valid and not any("depth1" in name for name in valid)


def test_names():
    assert valid_name("train/lm_loss") == "valid/lm_loss"
    assert valid_name("mtp/accept_depth2") == "valid/mtp_accept_depth2"
