"""Where drafts come from: the interface, and the MTP layer's chain.

Shapes: n rows, k drafts, v this rank's vocabulary rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bailing_mtp.parallel import vocab
from bailing_mtp.rollout import noise
from bailing_mtp.rollout.accept import Drafts, no_drafts
from bailing_mtp.rollout.distribution import Group, RowSettings, StepRules, first_id, process
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.noise import NoiseKeys
from bailing_mtp.rollout.program import Program


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, read from the memory before anything runs."""

    slots_n: Tensor
    """int64; padded rows name the scratch slot."""
    settings: RowSettings
    """Of the token after the pending one."""
    keys: NoiseKeys
    position_n: Tensor
    """int64, the pending token's position P."""
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
        return StepRows(slots_n, settings, keys, state.position[slots_n].long(), rules, group)


class Drafter(Protocol):
    """Proposes the k tokens after each row's pending one."""

    def draft(self, program: Program, memory: RolloutMemory, rows: StepRows, k: int) -> Drafts:
        """Drafts for positions P + 1 .. P + k, with the distributions that they were drawn from."""
        ...


class MtpDrafter:
    """The model's own MTP layer: its hidden state at P - 1 gives the first draft, each draft the next."""

    def draft(self, program: Program, memory: RolloutMemory, rows: StepRows, k: int) -> Drafts:
        hidden_nH = memory.slots.mtp_hidden_NH[rows.slots_n]
        tokens, logits, lse = [], [], []
        v = 0
        for index in range(k):
            if index:
                hidden_nH = program.mtp_step(tokens[-1], hidden_nH, index, rows.slots_n)
            logits_nv = program.logits(hidden_nH)
            v = logits_nv.shape[-1]
            drawn = process(logits_nv, rows.settings.later(index), rows.rules, rows.group)
            gumbel_nv = noise.gumbel(
                rows.keys, rows.position_n + 1 + index, noise.DRAFT, first_id(v, rows.group), v
            )
            token_n, _ = vocab.gumbel_argmax(drawn.logits, gumbel_nv, rows.group)
            tokens.append(token_n)
            logits.append(drawn.logits)
            lse.append(drawn.lse)
        if k == 0:
            return no_drafts(len(hidden_nH), v, hidden_nH.device)
        return Drafts(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(lse, 1))
