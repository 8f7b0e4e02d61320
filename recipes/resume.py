"""How a run continues from its own last checkpoint, in the same layout of ranks or another."""

import time
from typing import Any, Protocol

from bailing_mtp.errors import UserError
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.optimizer_state import allocate, optimizer_shards, rank_states, set_generator_states
from bailing_mtp.training.state import TrainState
from bailing_mtp.weights.names import Shard
from bailing_mtp.weights.sharded.state import ModuleTable
from bailing_mtp.weights.stored import CheckpointError, read_json

from .failure import fail_together
from .sources import Source

RNG_NAME = "rng.json"


class Position(Protocol):
    """A loader that can say where it stands, and continue from there."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def module_table(state: TrainState, source: Source) -> ModuleTable:
    """The tensors of a state's modules, with their places in a sharded checkpoint."""
    return ModuleTable(source.arch, shard_of(state.context), state.trunk_module, state.mtp_module)


def shard_of(context: ParallelContext) -> Shard:
    return Shard(context.tp, context.tp_rank, context.ep, context.ep_rank)


def continue_run(source: Source, state: TrainState, data: Position) -> None:
    """Take optimizer, schedule, data position and random generators from the run's own checkpoint, whose weights
    the modules already hold. Collective. Raises UserError on all ranks.
    """
    started_s = time.monotonic()
    checkpoint = source.sharded
    assert source.resumes and checkpoint is not None
    values, error = checkpoint.state, None
    try:
        data.load_state_dict(values["data"])
        allocate(state.optimizer, values["optimizer_steps"])
        if state.offload is not None:
            state.offload.to_host()
        table, (rank, world_size) = module_table(state, source), (state.context.rank, state.context.world_size)
        table.fill_optimizer(optimizer_shards(state.optimizer), checkpoint)
        table.fill_rank_states(rank_states(state.optimizer), rank, world_size, checkpoint)
    except CheckpointError as caught:
        error = caught
    except ValueError as caught:
        error = UserError(f"{checkpoint.directory}: {caught}")
    fail_together(error)
    state.step = state.clock.trained = values["step"]
    state.scheduler.num_steps = values["scheduler_steps"]
    state.scheduler.step(increment=0)
    generators = read_json(checkpoint.directory / RNG_NAME)["ranks"]
    context = state.context
    same_ranks = len(generators) == context.world_size
    if same_ranks:
        set_generator_states(generators[context.rank])
    if context.is_writer:
        note = "" if same_ranks else f"; random generators start afresh ({len(generators)} ranks before)"
        took = f"{time.monotonic() - started_s:.1f} s"
        print(f"continues after step {state.step} of {checkpoint.directory} (read in {took}){note}", flush=True)
