"""The rows of one step, read from the memory before anything runs.

Shapes: n rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from bailing_mtp.kernels.reference.noise import NoiseKeys
from bailing_mtp.rollout.distribution import Group, RowSettings, StepRules
from bailing_mtp.rollout.memory import RolloutMemory


@dataclass(frozen=True)
class StepRows:
    """Who takes part in a step, and how each row is drawn."""

    slots_n: Tensor
    """int64; padded rows name the scratch slot."""
    settings: RowSettings
    """Of the token after the pending one."""
    keys: NoiseKeys
    position_n: Tensor
    """int64, the pending token's position P."""
    pending_n: Tensor
    """int64, the pending token."""
    finished_n: Tensor
    """bool, rows that ended in an earlier step which the host has not read yet."""
    rules: StepRules
    group: Group
    """The tensor-parallel group."""

    @staticmethod
    def read(
        kernels: ModuleType, memory: RolloutMemory, slots_n: Tensor, rules: StepRules, group: Group
    ) -> StepRows:
        read = kernels.read_slots(memory.numbers(), slots_n)
        settings = RowSettings(
            read.temperature,
            read.top_k,
            read.top_p,
            read.min_new,
            response_index=read.generated,
            stop_ids=read.stop_ids,
            suppress_ids=read.suppress_ids,
        )
        keys = NoiseKeys(read.seed, read.rollout_step, read.prompt_index, read.sample_index)
        return StepRows(slots_n, settings, keys, read.position, read.pending, read.finished, rules, group)
