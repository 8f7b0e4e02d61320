"""Where drafts come from: the interface, and the MTP layer's chain.

Shapes: n rows, k drafts, H hidden size, v this rank's vocabulary rows.
"""

from __future__ import annotations

from typing import Protocol

import torch

from bailing_mtp.rollout.accept import Drafts
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.rows import StepRows
from bailing_mtp.rollout.sampling import Draft, draw_draft


class Drafter(Protocol):
    """Proposes the k tokens after each row's pending one."""

    def draft(self, program: Program, memory: RolloutMemory, rows: StepRows, k: int) -> Drafts:
        """Drafts for positions P + 1 .. P + k, k > 0, with the distributions that they were drawn from."""
        ...


class MtpDrafter:
    """The model's own MTP layer: its hidden state at P - 1 gives the first draft, each draft the next."""

    def draft(self, program: Program, memory: RolloutMemory, rows: StepRows, k: int) -> Drafts:
        hidden_nH = memory.slots.mtp_hidden_NH[rows.slots_n]
        logits_knv = program.empty_logits(k, len(rows.slots_n))
        drawn: list[Draft] = []
        for index in range(k):
            if index:
                hidden_nH = program.mtp_step(drawn[-1].token_n, hidden_nH, index, rows.slots_n)
            drawn.append(draw_draft(program.kernels, program.logits(hidden_nH, logits_knv[index]), rows, index))
        tokens, logits, lses = zip(*drawn, strict=True)
        # Plain rows draw from the head's own logits, which lie side by side already.
        logits_nkv = logits_knv.transpose(0, 1) if rows.rules.is_plain else torch.stack(logits, 1)
        return Drafts(torch.stack(tokens, 1), logits_nkv, torch.stack(lses, 1))
