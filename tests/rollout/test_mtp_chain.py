"""The MTP layer in decoding: refreshed rows are the training path, and a draft chain is what training unrolls."""

import pytest
import torch

from tests.distributed.worlds import layout
from tests.rollout.program_rig import Rig, close, fixture_model


@pytest.fixture(scope="module")
def context():
    with layout(tp=1, ep=1) as context:
        yield context


@pytest.fixture(scope="module")
def moe(context):
    return fixture_model("moe", context)


def chain_reference(rig: Rig, ids: torch.Tensor, drafts: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states of depths 1, 2, ... after the last committed position.

    Training's layer over the document lengthened by the chain: its earlier rows keep their true trunk states,
    row t+d-1 takes the output of depth d-1 and draft d-1. ids: committed tokens and the pending one.
    """
    hidden_TH = rig.trained_hidden(ids[:-1])
    next_ids, outputs = ids[1:], []
    for depth in range(len(drafts) + 1):
        outputs.append(rig.trained_mtp(next_ids, hidden_TH)[-1])
        if depth < len(drafts):
            next_ids = torch.cat((next_ids, drafts[depth : depth + 1]))
            hidden_TH = torch.cat((hidden_TH, outputs[-1][None]))
    return outputs


def draft_chain(rig: Rig, slots: torch.Tensor, hidden_nH: torch.Tensor, drafts_nk: torch.Tensor) -> list[torch.Tensor]:
    outputs = [hidden_nH]
    for offset in range(1, drafts_nk.shape[1] + 1):
        outputs.append(rig.program.mtp_step(drafts_nk[:, offset - 1], outputs[-1], offset, slots))
    return outputs


def test_the_chain_is_what_training_unrolls(context, moe):
    """The document's own next tokens as drafts: every site of the unrolled training forward."""
    ids, depths = Rig.make(moe, context).tokens(14), 3
    for length in (1, 2, 5, 10):
        rig = Rig.make(moe, context)
        hidden_TH = rig.trained_hidden(ids[: len(ids) - depths])
        ahead = [ids[d : len(ids) - depths + d] for d in range(1, depths + 1)]
        expected = rig.trained_depths(ahead, hidden_TH)
        rig.prefill([(0, 0, ids[:length])])
        slots = rig.slots(0)
        m_1H = rig.program.mtp_row(ids[length : length + 1], hidden_TH[length - 1 : length], slots)
        ours = draft_chain(rig, slots, m_1H, ids[None, length + 1 : length + depths])
        for depth in range(depths):
            logits = rig.trained_logits(expected[depth][length - 1 : length])
            close(rig.logits(ours[depth]), logits)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_depths_one_to_three_after_prefill(context, moe, length):
    rig = Rig.make(moe, context)
    ids, drafts = rig.tokens(length + 1, seed=length), rig.tokens(2, seed=99)
    hidden_TH = rig.prefill([(1, 0, ids[:length])])
    slots = rig.slots(1)
    m_1H = rig.program.mtp_row(ids[length:], hidden_TH[-1:], slots)
    ours = draft_chain(rig, slots, m_1H, drafts[None])
    for depth, expected_H in enumerate(chain_reference(rig, ids, drafts)):
        close(rig.logits(ours[depth])[0], rig.trained_logits(expected_H[None])[0])


@pytest.mark.parametrize("accepted", [[0, 0, 0], [3, 1, 2], [1, 3, 0]])
def test_depths_after_steps_with_rejected_drafts(context, moe, accepted):
    """Whole steps: the chain and rejected columns leave rows behind that the refresh must have replaced."""
    rig = Rig.make(moe, context)
    ids, junk = rig.tokens(40), rig.tokens(3, seed=5)
    hidden_TH = rig.prefill([(2, 0, ids[:5])])
    slots, position = rig.slots(2), 5
    m_1H = rig.program.mtp_row(ids[5:6], hidden_TH[-1:], slots)
    for a in accepted:
        draft_chain(rig, slots, m_1H, junk[None, :2])
        fed = torch.cat((ids[position : position + a + 1], junk[: 3 - a]))
        hidden_nSH = rig.program.verify(fed[None], slots)
        shifted = torch.cat((ids[position + 1 : position + a + 2], junk[: 3 - a]))
        m_nSH = rig.program.mtp_refresh(shifted[None], hidden_nSH, slots)
        m_1H = m_nSH[:, a]
        rig.commit(slots, [a + 1])
        position += a + 1
        whole = rig.trained_mtp(ids[1 : position + 1], rig.trained_hidden(ids[:position]))
        close(m_nSH[0, : a + 1], whole[position - a - 1 :])
    ours = draft_chain(rig, slots, m_1H, junk[None, :2])
    for depth, expected_H in enumerate(chain_reference(rig, ids[: position + 1], junk[:2])):
        close(rig.logits(ours[depth])[0], rig.trained_logits(expected_H[None])[0])


def test_rows_draft_side_by_side(context, moe):
    rig = Rig.make(moe, context)
    sequences = [rig.tokens(n, seed=n) for n in (4, 9)]
    hidden_TH = rig.prefill([(3, 0, sequences[0][:-1]), (0, 0, sequences[1][:-1])])
    slots, drafts = rig.slots(3, 0, rig.memory.scratch_slot), rig.tokens(6, seed=7).view(3, 2)
    first = torch.stack((sequences[0][-1], sequences[1][-1], drafts[0, 0]))
    m_nH = rig.program.mtp_row(first, hidden_TH[[2, 10, 0]], slots)
    ours = draft_chain(rig, slots, m_nH, drafts)
    for row, ids in enumerate(sequences):
        for depth, expected_H in enumerate(chain_reference(rig, ids, drafts[row])):
            close(ours[depth][row], expected_H)
