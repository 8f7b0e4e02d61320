"""Drafters whose drafts are known beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from bailing_mtp.rollout.accept import Drafts
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.rows import StepRows


class ScriptedDrafter:
    """Proposes the given response of each prompt, wrong at every `wrong_every`-th response token.

    Its q is a one-hot at the draft.
    """

    def __init__(self, response_of: Mapping[int, tuple[int, ...]], vocab: int, wrong_every: int = 0) -> None:
        self.response_of, self.vocab, self.wrong_every = response_of, vocab, wrong_every

    def draft(self, program: Program, memory: RolloutMemory, rows: StepRows, k: int) -> Drafts:
        tokens_nk = torch.tensor(
            [
                [self.token(int(prompt), int(index) + j) for j in range(k)]
                for prompt, index in zip(rows.keys.prompt_index, rows.settings.response_index, strict=True)
            ]
        )
        logits = torch.full((*tokens_nk.shape, self.vocab), -math.inf)
        logits.scatter_(-1, tokens_nk.unsqueeze(-1), 0.0)
        return Drafts(tokens_nk, logits, torch.zeros(tokens_nk.shape))

    def token(self, prompt: int, index: int) -> int:
        response = self.response_of.get(prompt, ())
        token = response[index] if index < len(response) else 0
        is_wrong = self.wrong_every and index % self.wrong_every == self.wrong_every - 1
        return (token + 1) % self.vocab if is_wrong else token
