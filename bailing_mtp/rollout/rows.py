"""The rows of one step, read from the memory before anything runs.

Shapes: n rows.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    finished_n: Tensor
    """bool, rows that ended in an earlier step which the host has not read yet."""
    rules: StepRules
    group: Group
    """The tensor-parallel group."""

    @staticmethod
    def read(memory: RolloutMemory, slots_n: Tensor, rules: StepRules, group: Group) -> StepRows:
        state = memory.slots
        settings = RowSettings(
            temperature=state.temperature[slots_n],
            top_k=state.top_k[slots_n],
            top_p=state.top_p[slots_n],
            min_new=state.min_new[slots_n],
            response_index=state.generated[slots_n],
            stop_ids=state.stop_ids_Nx[slots_n],
            suppress_ids=state.suppress_ids_Nx[slots_n],
        )
        keys = NoiseKeys(
            seed=state.seed[slots_n],
            step=state.rollout_step[slots_n].long(),
            prompt_index=state.prompt_index[slots_n].long(),
            sample_index=state.sample_index[slots_n].long(),
        )
        position_n, finished_n = state.position[slots_n].long(), state.finished[slots_n]
        return StepRows(slots_n, settings, keys, position_n, finished_n, rules, group)
