"""A rollout program on the Triton kernels equals the same program on their twins, over steps of changing width."""

from collections.abc import Callable

import torch

from bailing_mtp.kernels.triton import decode
from bailing_mtp.rollout.program import Program
from tests.distributed.worlds import layout
from tests.rollout.program_rig import Rig, random_model


def test_program() -> None:
    with layout(tp=1, ep=1) as context:
        built = random_model(context, head_dim=8, v_head_dim=4)
        ours, theirs = (Rig.make(built, context) for _ in range(2))
        ours.program = Program(ours.program.view, ours.memory, context, decode)
        sequences, slots_n = [theirs.tokens(9, seed=1), theirs.tokens(5, seed=2)], torch.tensor([2, 0])
        parts = [(int(slot), 0, ids) for slot, ids in zip(slots_n, sequences, strict=True)]
        after = torch.tensor([3, 4])

        def compare(run: Callable[[Rig], torch.Tensor]) -> torch.Tensor:
            hidden = run(ours)
            expected = run(theirs)
            torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
            return expected

        compare(lambda rig: rig.prefill(parts, following=after))
        for S, committed in ((3, [2, 1]), (1, [1, 1]), (4, [4, 2]), (2, [1, 2])):
            fed_nS = theirs.tokens(2 * S, seed=S).view(2, S)
            hidden_nSH = compare(lambda rig, fed=fed_nS: rig.program.verify(fed, slots_n))
            compare(lambda rig, fed=fed_nS, hidden=hidden_nSH: rig.program.mtp_refresh(fed, hidden, slots_n))
            one = (fed_nS[:, 0], hidden_nSH[:, 0])
            compare(lambda rig, one=one: rig.program.mtp_step(*one, 1, slots_n))
            for rig in (ours, theirs):
                rig.commit(slots_n, committed)
