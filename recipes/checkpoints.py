"""A run's own checkpoints: what goes into them, when they are written, and how a run continues from one."""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bailing_mtp.config import RunConfig
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.optimizer_state import generator_states, optimizer_shards, optimizer_steps, rank_states
from bailing_mtp.training.state import TrainState
from bailing_mtp.weights.checkpoint_files import open_checkpoint
from bailing_mtp.weights.convert import stored_dtypes
from bailing_mtp.weights.export import copy_small_files
from bailing_mtp.weights.passed import write_passed_through
from bailing_mtp.weights.sharded.reader import STATE_NAME
from bailing_mtp.weights.sharded.save import CheckpointSaver, SaveReport
from bailing_mtp.weights.sharded.sections import Replicas
from bailing_mtp.weights.stored import CONFIG_NAME

from .report import Report
from .resume import RNG_NAME, Position, module_table
from .rundir import note_in_resolved
from .sources import Source


class RunCheckpoints:
    """Writes <run_dir>/checkpoints/step_<n> while the run trains. All ranks make the same calls."""

    def __init__(self, config: RunConfig, source: Source, state: TrainState, data: Position, steps: int) -> None:
        self._config, self._source, self._state, self._data, self._steps = config, source, state, data, steps
        context = state.context
        self._table = module_table(state, source)
        self._replicas = Replicas.of(context)
        root = Path(config.run_dir) / "checkpoints"
        self._saver = CheckpointSaver(root, context, config.checkpoint.keep)
        self._carrier = source.directory
        """Holds the tokenizer and the MTP layer that is passed through: the source, then our own last checkpoint."""
        self._last = source.directory if source.resumes else None

    def after_step(self, stops: bool = False) -> dict[str, float]:
        """Finish a save that is done, begin one that is due; returns metrics of finished saves.

        After the last step, or where the run stops, it saves and waits.
        """
        step, every = self._state.step, self._config.checkpoint.save_every
        is_last = stops or step == self._steps
        due = is_last or (every is not None and step % every == 0)
        values = self._finished(self._saver.poll(block=due))
        if due:
            self._start(step)
        if is_last:
            values |= self._finished(self._saver.poll(block=True))
        return values

    def say_how_to_export(self) -> None:
        """One line after the closing summary."""
        if self._state.context.is_writer and self._last is not None:
            print(f"as Hugging Face files: python -m recipes.convert source={self._last} target=<dir> format=hf")

    def _start(self, step: int) -> None:
        context = self._state.context
        rng: list[Any] = [None] * context.world_size
        dist.all_gather_object(rng, generator_states())
        documents = {CONFIG_NAME: self._hf_config(), STATE_NAME: self._values(step), RNG_NAME: {"ranks": rng}}

        def extras(directory: Path) -> None:
            for name, value in documents.items():
                (directory / name).write_text(json.dumps(value) + "\n", encoding="utf-8")
            for carrier in self._carriers():
                copy_small_files(carrier, directory)
            if self._passes_mtp:
                write_passed_through(open_checkpoint(self._carrier), self._source.arch, directory)

        stored = [*self._table.weights(self._replicas)]
        stored += self._table.optimizer(optimizer_shards(self._state.optimizer))
        stored += self._table.rank_states(rank_states(self._state.optimizer), context.rank, context.world_size)
        self._saver.start(step, stored, extras)

    def _finished(self, report: SaveReport | None) -> dict[str, float]:
        if report is None:
            return {}
        self._carrier = self._last = report.directory
        if self._state.context.is_writer:
            print(
                f"checkpoint: {report.directory}, {report.n_bytes / 1e6:,.1f} MB in {report.total_s:.1f} s, "
                f"training waited {report.stall_s:.2f} s",
                flush=True,
            )
        return {"time/checkpoint_stall_s": report.stall_s, "time/checkpoint_s": report.total_s}

    def _carriers(self) -> list[Path]:
        """Directories of tokenizer files, the one in force last."""
        named = getattr(self._config, "data", None) and self._config.data.tokenizer
        tokenizer = Path(named) if named else None
        if tokenizer is not None and not tokenizer.is_dir():
            tokenizer = tokenizer.parent
        carriers = (Path(self._config.run_dir) / "tokenizer", self._carrier, tokenizer)
        return [carrier for carrier in carriers if carrier is not None and carrier.is_dir()]

    @property
    def _passes_mtp(self) -> bool:
        return self._state.mtp_module is None and self._source.holds_mtp and self._source.directory is not None

    def _hf_config(self) -> dict[str, Any]:
        holds_mtp = self._state.mtp_module is not None or self._passes_mtp
        return {**self._source.arch.hf_config, "num_nextn_predict_layers": int(holds_mtp)}

    def _values(self, step: int) -> dict[str, Any]:
        context = self._state.context
        return {
            "step": step,
            "optimizer_steps": optimizer_steps(self._state.optimizer),
            "scheduler_steps": self._state.scheduler.num_steps,
            "data": self._data.state_dict(),
            "config": self._config.model_dump(mode="json"),
            "layout": {"tp": context.tp, "ep": context.ep, "world_size": context.world_size},
            "fresh_mtp": list(self._source.fresh_mtp),
            "hf_dtypes": {} if self._source.files is None else stored_dtypes(self._source.files),
        }


def tell_fresh_mtp(config: RunConfig, source: Source, context: ParallelContext, report: Report) -> None:
    """Say that the MTP layer starts at random, in every place where a reader of the run looks."""
    report.note({"mtp/fresh_tensors": float(len(source.fresh_mtp))})
    if not context.is_writer:
        return
    fact = (
        f"the MTP layer starts from random weights: {source.directory} lacks {len(source.fresh_mtp)} of its "
        f"tensors ({source.fresh_mtp[0]}, ...), and checkpoint.allow_fresh_mtp is true"
    )
    print(f"warning: {fact}", file=sys.stderr, flush=True)
    note_in_resolved(config, fact)
