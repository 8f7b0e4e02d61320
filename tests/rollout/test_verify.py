"""A verify with any number of accepted drafts is that many single steps, and single steps are the training forward."""

import itertools

import pytest
import torch

from tests.distributed.worlds import layout
from tests.rollout.blocks import assign_blocks
from tests.rollout.program_rig import Rig, close, fixture_model

DRAFTS = 3


@pytest.fixture(scope="module")
def context():
    with layout(tp=1, ep=1) as context:
        yield context


@pytest.fixture(scope="module")
def moe(context):
    return fixture_model("moe", context)


def speculate(rig: Rig, slots: list[int], sequences: list[torch.Tensor], k: int, accepted: list[int]) -> torch.Tensor:
    """One step on known sequences: true tokens where drafts shall be accepted, wrong ones after.

    Returns the hidden states [n, k + 1, H]; commits accepted + 1 tokens of each row.
    """
    fed = []
    for slot, ids, a in zip(slots, sequences, accepted, strict=True):
        position = int(rig.memory.slots.position[slot])
        row = ids[position : position + k + 1].clone()
        row[a + 1 :] = (row[a + 1 :] + 1 + torch.arange(k - a)) % rig.vocab_size
        fed.append(row)
    hidden_nSH = rig.program.verify(torch.stack(fed), rig.slots(*slots))
    rig.commit(rig.slots(*slots), [a + 1 for a in accepted])
    return hidden_nSH


def check_step(rig: Rig, slots: list[int], sequences: list[torch.Tensor], k: int, accepted: list[int]) -> None:
    """As speculate, comparing the columns of accepted tokens with the training forward."""
    before = [int(rig.memory.slots.position[slot]) for slot in slots]
    hidden_nSH = speculate(rig, slots, sequences, k, accepted)
    for ids, position, a, hidden_SH in zip(sequences, before, accepted, hidden_nSH, strict=True):
        expected = rig.trained_logits(rig.trained_hidden(ids[: position + a + 1]))[position:]
        close(rig.logits(hidden_SH[: a + 1]), expected)


def check_settled(rig: Rig, slot: int, ids: torch.Tensor, spare: int) -> None:
    """The slot holds what a prefill of its committed tokens holds."""
    rig.prefill([(spare, 0, ids[: int(rig.memory.slots.position[slot])])])
    for ours, theirs in zip(rig.settled(slot), rig.settled(spare), strict=True):
        close(ours, theirs)


def test_single_steps_equal_prefill(context, moe):
    rig = Rig.make(moe, context, drafts=0)
    ids = rig.tokens(14)
    rig.prefill([(2, 0, ids[:3])])
    for _ in range(11):
        check_step(rig, [2], [ids], 0, [0])
    check_settled(rig, 2, ids, spare=0)


@pytest.mark.parametrize(("k", "accepted"), [(k, a) for k in range(DRAFTS + 1) for a in range(k + 1)])
def test_every_accept_count_equals_single_steps(context, moe, k, accepted):
    rig = Rig.make(moe, context, drafts=DRAFTS)
    ids = rig.tokens(30, seed=k)
    rig.prefill([(1, 0, ids[:6])])
    for _ in range(3):
        check_step(rig, [1], [ids], k, [accepted])
    check_settled(rig, 1, ids, spare=0)
    check_step(rig, [1], [ids], 0, [0])


def test_k_changes_from_step_to_step_and_rows_accept_differently(context, moe):
    rig = Rig.make(moe, context, drafts=DRAFTS, slots=6)
    sequences = [rig.tokens(50, seed=s) for s in range(3)]
    rig.prefill([(slot, 0, ids[: 3 + slot]) for slot, ids in zip((4, 0, 2), sequences, strict=True)])
    generator = torch.Generator().manual_seed(0)
    for k in (0, 2, 1, 3, 0, 0, 3, 1, 2, 2):
        accepted = torch.randint(0, k + 1, (3,), generator=generator).tolist()
        check_step(rig, [4, 0, 2], sequences, k, accepted)
    for slot, ids in zip((4, 0, 2), sequences, strict=True):
        check_settled(rig, slot, ids, spare=1)
        rig.free_blocks += rig.memory.slots.block_table_NM[1].tolist()


def test_slots_skip_steps_and_change_places(context, moe):
    rig = Rig.make(moe, context, drafts=2)
    sequences = [rig.tokens(40, seed=s) for s in range(3)]
    rig.prefill([(slot, 0, ids[:4]) for slot, ids in enumerate(sequences)])
    steps = [([0, 1, 2], 2), ([1], 1), ([2, 0], 2), ([2], 0), ([1, 2], 2), ([0, 2, 1], 1), ([0], 2)]
    for turn, (slots, k) in enumerate(steps):
        accepted = [(turn + slot) % (k + 1) for slot in slots]
        check_step(rig, slots, [sequences[slot] for slot in slots], k, accepted)
    for slot in range(3):
        check_settled(rig, slot, sequences[slot], spare=3)
        rig.free_blocks += rig.memory.slots.block_table_NM[3].tolist()


def test_committing_nothing_undoes_a_step(context, moe):
    rig = Rig.make(moe, context, drafts=2)
    ids = rig.tokens(20)
    rig.prefill([(0, 0, ids[:5])])
    speculate(rig, [0], [ids], 2, [1])
    rig.program.verify(ids[None, :3], rig.slots(0))
    rig.commit(rig.slots(0), [0])
    check_step(rig, [0], [ids], 2, [2])


def test_block_edges(context, moe):
    """Every start against the block size, every accept count."""
    for length, accepted in itertools.product(range(1, 9), range(3)):
        rig = Rig.make(moe, context, drafts=2, slots=1, context_tokens=16)
        ids = rig.tokens(16, seed=length)
        rig.prefill([(0, 0, ids[:length])], room=16)
        check_step(rig, [0], [ids], 2, [accepted])
        check_step(rig, [0], [ids], 0, [0])


def test_padded_rows_leave_live_slots_bit_equal(context, moe):
    plain, padded = (Rig.make(moe, context, drafts=2) for _ in range(2))
    ids = plain.tokens(20)
    for rig in (plain, padded):
        rig.prefill([(1, 0, ids[:6]), (2, 0, ids[:9])])
    scratch = padded.memory.scratch_slot
    idle = [x[2].clone() for x in padded.memory.kda.by_slot()]
    for _ in range(3):
        fed = ids[6:9].expand(1, -1)
        ours = padded.program.verify(torch.cat((fed, fed.new_zeros(2, 3))), padded.slots(1, scratch, scratch))
        theirs = plain.program.verify(fed, plain.slots(1))
        close(ours[:1], theirs)
        padded.commit(padded.slots(1, scratch, scratch), [2, 3, 1])
        plain.commit(plain.slots(1), [2])
    for ours, theirs in zip(padded.memory.kda.by_slot(), idle, strict=True):
        assert torch.equal(ours[2].nan_to_num(7), theirs.nan_to_num(7))
    assert torch.equal(padded.cached_rows(2, 9), plain.cached_rows(2, 9))
    for name in ("count", "parity", "position"):
        assert int(getattr(padded.memory.slots, name)[scratch]) == 0


def test_positions_past_the_context_limit_damage_nothing(context, moe):
    rig = Rig.make(moe, context, drafts=3, slots=2, context_tokens=10)
    ids, other = rig.tokens(14), rig.tokens(10, seed=1)
    rig.prefill([(0, 0, ids[:8]), (1, 0, other[:10])], room=10)
    kept = rig.cached_rows(1, 10)
    check_step(rig, [0], [ids], 3, [0])
    rig.program.mtp_refresh(ids[None, 9:13], torch.zeros(1, 4, rig.memory.plan.hidden_size), rig.slots(0))
    check_step(rig, [0], [ids], 3, [0])
    assert torch.equal(rig.cached_rows(1, 10), kept)
    close(rig.cached_rows(0, 10), _prefilled_rows(context, moe, ids[:10]))


def _prefilled_rows(context, moe, ids: torch.Tensor) -> torch.Tensor:
    rig = Rig.make(moe, context, drafts=3, slots=2, context_tokens=len(ids))
    rig.prefill([(0, 0, ids)], room=len(ids))
    return rig.cached_rows(0, len(ids))


def test_a_fork_continues_like_its_source(context, moe):
    rig = Rig.make(moe, context, drafts=2)
    ids, other = rig.tokens(24), rig.tokens(24, seed=1)
    rig.prefill([(0, 0, ids[:6])])
    speculate(rig, [0], [ids], 2, [1])
    rig.memory.copy_slots(torch.tensor([0]), torch.tensor([3]))
    # Position 8 begins the third block of four tokens: both may share the first two only.
    assign_blocks(rig.memory, 3, 2, [rig.free_blocks.pop() for _ in range(5)])
    branch = torch.cat((ids[:8], other))
    check_step(rig, [3, 0], [branch, ids], 2, [2, 0])
    check_step(rig, [0, 3], [ids, branch], 2, [1, 1])
    check_step(rig, [3], [branch], 0, [0])


def test_a_copied_block_holds_the_same_rows(context, moe):
    rig = Rig.make(moe, context, drafts=2)
    ids = rig.tokens(20)
    rig.prefill([(0, 0, ids[:6])])
    table = rig.memory.slots.block_table_NM
    fresh = [rig.free_blocks.pop() for _ in range(4)]
    rig.memory.copy_slots(torch.tensor([0]), torch.tensor([2]))
    rig.memory.copy_block(int(table[0, 1]), fresh[0])
    assign_blocks(rig.memory, 2, 1, fresh)
    branch = torch.cat((ids[:6], rig.tokens(8, seed=3)))
    check_step(rig, [0, 2], [ids, branch], 2, [2, 2])
    check_step(rig, [0, 2], [ids, branch], 1, [0, 1])


def test_fewer_live_blocks_change_nothing(context, moe):
    rig = Rig.make(moe, context, drafts=2)
    ids = rig.tokens(20)
    rig.prefill([(0, 0, ids[:6])])
    rig.memory.live_blocks = 3
    check_step(rig, [0], [ids], 2, [2])
    check_step(rig, [0], [ids], 2, [1])
