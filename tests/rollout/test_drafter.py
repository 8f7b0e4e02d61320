"""What the MTP layer's drafts are drawn from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.draft import MtpDrafter
from bailing_mtp.rollout.requests import Limits
from tests.rollout.engine_rig import make_engine, random_prompts, responses
from tests.rollout.program_rig import Rig, close

K = 3


class Recording(MtpDrafter):
    """Keeps the drafts and where they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list = []

    def draft(self, program, memory, rows, k):
        drafts = super().draft(program, memory, rows, k)
        if not rows.finished_n[0]:
            self.seen.append((rows.settings.response_index[0].item(), drafts))
        return drafts


def run(built: BuiltModel, context: ParallelContext, sampling: SamplingParams) -> Recording:
    drafter = Recording()
    session = make_engine(built, context, K, drafter=drafter).open(Limits(60, 1))
    session.submit(Prompt(prompt_ids=(1, 2, 3), index=0, sampling=sampling))
    while session.step():
        pass
    return drafter


def test_each_depth_has_the_masks_of_its_own_response_index(small: BuiltModel, alone: ParallelContext):
    sampling = SamplingParams(min_new_tokens=7, max_new_tokens=20, stop_token_ids=(4, 9), suppress_token_ids=(5,))
    borders = 0
    for index, drafts in run(small, alone, sampling).seen:
        for depth in range(K):
            mass = (drafts.logits_nkv[0, depth] - drafts.lse_nk[0, depth]).exp()
            assert (mass[[4, 9]] > 0).all() == (index + depth >= 7) and mass[5] == 0
            assert mass.sum() == pytest.approx(1, abs=1e-5) and mass[drafts.tokens_nk[0, depth]] > 0
        borders += index < 7 <= index + K - 1
    assert borders


def test_drafts_are_the_chain_of_the_training_path(small: BuiltModel, alone: ParallelContext):
    """q of every depth is the unrolled layer's distribution at the site where the step started."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12)
    (prompt,) = random_prompts(1, 24, sampling)
    prompt = replace(prompt, prompt_ids=(1, 2, 3))
    (response,) = responses(make_engine(small, alone).generate([prompt]))
    seen = run(small, alone, replace(sampling, temperature=1e-3)).seen
    rig = Rig.make(small, alone, drafts=K)
    for index, drafts in seen:
        known = [1, 2, 3, *response[:index]]
        ids = torch.tensor([*known, *drafts.tokens_nk[0, : K - 1].tolist(), 0, 0])
        ahead = [torch.cat((ids[d:], ids[:d])) for d in range(1, K + 1)]
        hidden_TH = rig.trained_hidden(ids)
        site = len(known) - 2
        for depth, out_TH in enumerate(rig.trained_depths(ahead, hidden_TH)):
            expected = (rig.trained_logits(out_TH[site]) / 1e-3).log_softmax(-1)
            found = drafts.logits_nkv[0, depth] / 1e-3 - drafts.lse_nk[0, depth]
            close(found * 1e-3, expected * 1e-3)
