"""Drafts that are kept, or rejected, as told.

Shape legend: n rows of a step, k drafts, v vocabulary rows.
"""

import torch

from bailing_mtp.rollout.accept import Drafts
from bailing_mtp.rollout.distribution import first_id
from bailing_mtp.rollout.draft import MtpDrafter
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.rows import StepRows

SURE = 60.0
"""Logarithm of a factor that no probability of a real distribution makes up for."""
SHIFTS = {"own": 0.0, "all": SURE, "none": -SURE}


class ForcedDrafter(MtpDrafter):
    """The MTP layer's drafts, which the verdict keeps or rejects as told; the step's work is the same.

    A draft is kept where its own probability is reported far too low. It is rejected where it is reported as the
    only token that could have been drawn; what is left of the target's distribution is then all but that token.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._shift = torch.zeros((), device=device)

    def force(self, acceptance: str) -> None:
        self._shift.fill_(SHIFTS[acceptance])

    def draft(self, program: Program, memory: RolloutMemory, rows: StepRows, k: int) -> Drafts:
        drafts = super().draft(program, memory, rows, k)
        reject = self._shift < 0
        # Of a vocabulary that several ranks share, one of them holds the draft.
        v = drafts.logits_nkv.shape[-1]
        row_nk1 = drafts.tokens_nk.unsqueeze(-1) - first_id(v, rows.group)
        here_nk1 = (row_nk1 >= 0) & (row_nk1 < v)
        row_nk1 = row_nk1.clamp(0, v - 1)
        kept_nk1 = drafts.logits_nkv.gather(-1, row_nk1)
        # Far above the other logits, so that nothing of their probability is left.
        drafts.logits_nkv.scatter_(-1, row_nk1, torch.where(reject & here_nk1, 1e4, kept_nk1))
        lse_nk = torch.where(reject, 1e4 / rows.settings.temperature.clamp(min=1e-6).unsqueeze(-1), drafts.lse_nk)
        return drafts._replace(lse_nk=lse_nk + self._shift.clamp(min=0))
