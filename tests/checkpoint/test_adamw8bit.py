"""Checkpoints of 8-bit states: exact continuation, and no other optimizer's states or layout in their place."""

from pathlib import Path

import pytest

from bailing_mtp.config import ConfigError, OptimConfig
from bailing_mtp.errors import UserError
from bailing_mtp.training import adamw8bit
from bailing_mtp.training.optimizer_state import rank_states
from bailing_mtp.weights.sharded.reader import open_sharded
from bailing_mtp.weights.stored import CheckpointError
from recipes.resume import continue_run, module_table
from tests.distributed import worlds
from tests.distributed.cases_checkpoint import Run, resume


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that fill several pieces, and a checkpoint of several parts of each."""
    monkeypatch.setattr(adamw8bit, "PIECE_ELEMENTS", 2**14)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_run_that_stops_and_continues_is_the_same_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    resume(None, tmp_path, tp=1, ep=1, dtype=dtype, saved=1, optim=worlds.EIGHT_BITS)


@pytest.mark.parametrize(("first", "then"), [(worlds.OPTIM, worlds.EIGHT_BITS), (worlds.EIGHT_BITS, worlds.OPTIM)])
def test_another_optimizer_does_not_continue(tmp_path: Path, first: OptimConfig, then: OptimConfig) -> None:
    with worlds.layout(tp=1, ep=1) as context:
        run = Run(tmp_path / "run", context, save_every=1, optim=first)
        run.train(1)
        run.finish_save()
        line = f"optim.name: was '{first.name}' when .*step_1 was written, now '{then.name}'"
        with pytest.raises(ConfigError, match=line):
            Run(tmp_path / "run", context, save_every=1, optim=then)
        other = Run(tmp_path / "other", context, optim=then)
        again = Run(tmp_path / "run", context, save_every=1, optim=first)
        with pytest.raises(UserError, match=r"^\S*step_1: holds no optimizer state optimizer\..* more"):
            continue_run(again.source, other.state, other.data)


def test_another_layout_does_not_continue(tmp_path: Path) -> None:
    with worlds.layout(tp=1, ep=1) as context:
        run = Run(tmp_path / "run", context, dtype="bf16", save_every=1, optim=worlds.EIGHT_BITS)
        run.train(1)
        run.finish_save()
        table, states = module_table(run.state, run.source), rank_states(run.state.optimizer)
        checkpoint = open_sharded(tmp_path / "run" / "checkpoints" / "step_1")
        table.fill_rank_states(states, 0, 1, checkpoint)
        layout = r"^\S*step_1: its 8-bit .* in the layout that wrote them \(parallel.tp=1 parallel.ep=1 on 1 ranks\)"
        with pytest.raises(CheckpointError, match=layout):
            table.fill_rank_states(states, 0, 2, checkpoint)
