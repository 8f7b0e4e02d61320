"""Whole decode steps on the Triton kernels give the host, and leave in the slots, what they do on the twins."""

import pytest
import torch

from bailing_mtp.kernels.triton import decode
from bailing_mtp.rollout.distribution import StepRules
from bailing_mtp.rollout.draft import MtpDrafter
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.results import packed_words, unpack
from bailing_mtp.rollout.rows import StepRows
from bailing_mtp.rollout.step import decode_step, first_step
from tests.distributed.worlds import layout
from tests.rollout.program_rig import Rig, random_model

STATE = ("count", "parity", "position", "pending", "generated", "error", "finished")
SLOTS = [2, 0, 3]


def begin(rig: Rig) -> Rig:
    """Three prompts; one slot is greedy, one is hot and may add three tokens."""
    slots = rig.memory.slots
    rig.last_mH = torch.stack([rig.prefill([(slot, 0, rig.tokens(4 + slot, seed=slot))])[-1] for slot in SLOTS])
    slots.temperature[SLOTS] = torch.tensor([1.0, 0.0, 1.6])
    slots.max_new[SLOTS] = torch.tensor([30, 30, 3], dtype=torch.int32)
    slots.seed[SLOTS] = torch.tensor([7, 2**35 + 1, 9])
    slots.prompt_index[SLOTS] = torch.tensor([0, 1, 2], dtype=torch.int32)
    slots.rollout_step.fill_(3)
    return rig


@pytest.mark.parametrize(("masks", "steps"), [(False, (2, 0, 3)), (True, (2,))])
def test_steps(masks: bool, steps: tuple[int, ...]) -> None:
    rules = StepRules(greedy=True, masks=masks)
    with layout(tp=1, ep=1) as context, torch.no_grad():
        built = random_model(context, head_dim=8, v_head_dim=4)
        ours, theirs = (begin(Rig.make(built, context)) for _ in range(2))
        ours.program = Program(ours.program.view, ours.memory, context, decode)
        slots_n = torch.tensor([*SLOTS, ours.memory.scratch_slot])
        accepted = 0
        for k in (None, *steps):
            columns, found = (k or 0) + 1, []
            for rig in (ours, theirs):
                m = slots_n[:3] if k is None else slots_n
                rows = StepRows.read(rig.program.kernels, rig.memory, m, rules, None)
                packed = torch.full((len(m), packed_words(columns)), -7, dtype=torch.int32)
                if k is None:
                    first_step(rig.program, rig.memory, rows, rig.last_mH, torch.tensor([-1, -1, 5]), packed)
                else:
                    decode_step(rig.program, rig.memory, MtpDrafter(), rows, k, packed)
                found.append(unpack(packed, columns, 3))
            for our, their in zip(*found, strict=True):
                assert (our.tokens, our.n_accepted, our.state, our.error) == (
                    their.tokens, their.n_accepted, their.state, their.error,
                )  # fmt: skip
                for name in ("raw", "processed", "kept_logmass"):
                    assert getattr(our, name) == pytest.approx(getattr(their, name), abs=1e-4, nan_ok=True)
            for name in STATE:
                assert getattr(ours.memory.slots, name)[SLOTS].equal(getattr(theirs.memory.slots, name)[SLOTS]), name
            hidden = [rig.memory.slots.mtp_hidden_NH[SLOTS] for rig in (ours, theirs)]
            torch.testing.assert_close(*hidden, rtol=1e-3, atol=1e-3)
            accepted += sum(row.n_accepted for row in found[0])
        assert accepted
