"""Sharded checkpoints on several ranks: continuing is exact, any layout reads any other, failures end together."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    ParallelConfig,
    PretrainConfig,
    TrainConfig,
)
from bailing_mtp.errors import UserError
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.evaluate import evaluate
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.optimizer_state import optimizer_shards, optimizer_steps, rank_states
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.weights.sharded.chunks import ChunkWriter
from bailing_mtp.weights.sharded.reader import open_sharded
from bailing_mtp.weights.sharded.save import complete_checkpoints
from bailing_mtp.weights.sharded.sections import Block
from recipes.checkpoints import RunCheckpoints
from recipes.resume import continue_run
from recipes.session import find_source, make_model, require_mtp
from recipes.sources import Source
from tests.distributed import worlds

Reference = worlds.Reference


class Position:
    """Counts the steps drawn; the batches are the same every step."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class HeldOut(Position):
    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self._mine = worlds.microbatches(2)[context.dp_rank :: context.dp]

    def next_step(self) -> list[Any]:
        return self._mine


class Run:
    """A small run of the golden model, as the recipe drives it."""

    def __init__(
        self,
        run_dir: Path,
        context: ParallelContext,
        mtp: bool = True,
        dtype: str = "fp32",
        save_every: int = 3,
        optim: OptimConfig = worlds.OPTIM,
    ) -> None:
        self.config = PretrainConfig(
            run_dir=str(run_dir),
            model=ModelConfig(dtype=dtype),
            parallel=ParallelConfig(tp=context.tp, ep=context.ep),
            checkpoint=CheckpointConfig(load=str(worlds.FIXTURES / "moe"), save_every=save_every, keep=1),
            data=DataConfig(path="none", seq_tokens=128),
            train=TrainConfig(steps=6, microbatch_tokens=128),
            optim=optim,
            mtp=MtpConfig(loss_scale=0.3 if mtp else None),
        )
        self.context = context
        self.objective = PretrainObjective(self.config.mtp, chunk_tokens=96)
        source = find_source(self.config, resumes=True)
        self.source: Source = require_mtp(source, self.config, self.config.mtp.loss_scale)
        built = make_model(self.config, self.source, context, with_mtp=mtp, expert_bias_rate=1e-3)
        self.state: TrainState = build_state(built, context, self.config.optim, 6, worlds.SMALL_BUCKETS)
        self.data = Position()
        if self.source.resumes:
            continue_run(self.source, self.state, self.data)
        self.checkpoints = RunCheckpoints(self.config, self.source, self.state, self.data, steps=6)

    def train(self, until: int, save: bool = True) -> list[dict[str, float]]:
        metrics = []
        mine = worlds.microbatches(2)[self.context.dp_rank :: self.context.dp]
        while self.state.step < until:
            self.data.drawn += 1
            metrics.append(train_step(self.state, mine, self.objective).metrics)
            if save:
                self.checkpoints.after_step()
        return metrics

    def finish_save(self) -> None:
        """Wait for a save that is under way, if there is one."""
        self.checkpoints._finished(self.checkpoints._saver.poll(block=True))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training moves on this rank."""
        found = {}
        for index, chunk in enumerate(self.state.chunks):
            named = [*chunk.module.named_parameters(), *chunk.module.named_buffers()]
            found |= {f"{index}.{n}": t.detach().clone() for n, t in named if "tokens_per_expert" not in n}
        for index, shard in enumerate(optimizer_shards(self.state.optimizer)):
            found |= {f"{index}.{name}": flat.clone() for name, flat in shard.states.items()}
        for index, state in enumerate(rank_states(self.state.optimizer)):
            found[f"rank {index}.{state.name}"] = state.values.clone()
        return found

    def loss(self) -> float:
        return evaluate(self.state, HeldOut(self.context), self.objective, 1)["valid/lm_loss"]


def resume(
    reference: Reference | None,
    scratch: Path,
    tp: int,
    ep: int,
    mtp: bool = True,
    dtype: str = "fp32",
    saved: int = 2,
    optim: OptimConfig = worlds.OPTIM,
) -> None:
    """Saved after some steps and continued to as many again equals all of them without a stop, bit for bit."""
    run_dir = scratch / f"resume_tp{tp}_ep{ep}_{mtp}_{dtype}_{optim.name}"
    with worlds.layout(tp, ep) as context:
        straight = Run(run_dir, context, mtp, dtype, saved, optim)
        straight.train(saved)
        rest = straight.train(2 * saved - 1)
        straight.finish_save()
        assert [path.name for path in complete_checkpoints(run_dir / "checkpoints")] == [f"step_{saved}"]
        rest += straight.train(2 * saved, save=False)
        torch.manual_seed(99)
        again = Run(run_dir, context, mtp, dtype, saved, optim)
        assert again.source.resumes and again.state.step == saved and again.data.drawn == saved
        assert again.state.scheduler.num_steps == optimizer_steps(again.state.optimizer) == saved
        assert again.train(2 * saved, save=False) == rest
        expected, found = straight.tensors(), again.tensors()
        assert found.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, different


def reshard(reference: Reference, scratch: Path, tolerance: float = 1e-6) -> None:
    """A checkpoint of tp=2 ep=2 continues in every other layout: the same loss, the same next step."""
    run_dir = scratch / "reshard"
    with worlds.layout(tp=2, ep=2) as context:
        straight = Run(run_dir, context, save_every=1)
        straight.train(1)
        straight.finish_save()
        loss = straight.loss()
        straight.train(2, save=False)
        weights, moments = _gathered(straight)
    for tp, ep in ((2, 1), (1, 2), (1, 1)):
        with worlds.layout(tp, ep) as context:
            other = Run(run_dir, context, save_every=1)
            assert abs(other.loss() - loss) <= tolerance, (tp, ep, other.loss(), loss)
            other.train(2, save=False)
            for expected, found in zip((weights, moments), _gathered(other), strict=True):
                assert found.keys() == expected.keys()
                worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
                assert worst <= tolerance, (tp, ep, worst)


def _gathered(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole weights and first moments of a run, through a checkpoint of its present state."""
    directory = Path(f"{run.config.run_dir}_tp{run.context.tp}_ep{run.context.ep}")
    with mock.patch.object(run.checkpoints._saver, "_root", directory):
        run.checkpoints._start(run.state.step)
        run.checkpoints._saver.poll(block=True)
    checkpoint = open_sharded(directory / f"step_{run.state.step}")
    whole = {}
    for key, chunks in checkpoint.index.items():
        rows, *cols = chunks[0].shape
        whole[key] = checkpoint.read(key, Block(0, rows, 0, cols[0] if cols else 1))
    moments = {key: tensor for key, tensor in whole.items() if key.startswith("optimizer.exp_avg.")}
    assert moments
    return {key: tensor for key, tensor in whole.items() if not key.startswith("optimizer.")}, moments


def full_disk(reference: Reference, scratch: Path) -> None:
    """One rank cannot write: all ranks end with its message, and the earlier checkpoint is untouched."""
    run_dir = scratch / "full_disk"
    with worlds.layout(tp=1, ep=2) as context:
        run = Run(run_dir, context, save_every=1)
        run.train(1)
        run.finish_save()
        with _no_space(on=dist.get_rank() == 1), pytest.raises(UserError) as caught:
            run.train(6)
        message = str(caught.value)
        assert "step_2: could not be written" in message and "step_1 is untouched" in message
        assert "rank 1: " in message and "No space left on device" in message and "rank 0: " not in message
        dist.barrier()
        assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["latest", "step_1"]
        again = Run(run_dir, context, save_every=1)
        assert again.state.step == 1


@contextmanager
def _no_space(on: bool) -> Iterator[None]:
    put = ChunkWriter.put

    def fails(self: ChunkWriter, *arguments: Any) -> None:
        if len(self.chunks) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, *arguments)

    if not on:
        yield
        return
    with mock.patch.object(ChunkWriter, "put", fails):
        yield


CASES: dict[str, Callable[[Reference, Path], None]] = {
    "resume_tp2_ep2": functools.partial(resume, tp=2, ep=2, saved=3),
    "resume_tp1_ep2_bf16": functools.partial(resume, tp=1, ep=2, dtype="bf16"),
    "resume_tp2_ep2_adamw8bit": functools.partial(resume, tp=2, ep=2, dtype="bf16", optim=worlds.EIGHT_BITS),
    "resume_tp2_ep1_without_mtp": functools.partial(resume, tp=2, ep=1, mtp=False),
    "reshard": reshard,
    "full_disk": full_disk,
}
