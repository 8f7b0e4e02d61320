"""Prefill is the training forward, whole or in chunks, and leaves behind what single steps would."""

import pytest
import torch

from bailing_mtp.kernels.reference import prefill as prefill_twins
from bailing_mtp.rollout.prefill import PrefillPlan, prefill_kernels
from bailing_mtp.training.scoring import score_batch
from tests.distributed.worlds import layout
from tests.rollout.program_rig import VARIANTS, Rig, close, fixture_model, random_model, tiny_model


@pytest.fixture(scope="module")
def context():
    with layout(tp=1, ep=1) as context:
        yield context


@pytest.fixture(scope="module")
def moe(context):
    return fixture_model("moe", context)


def prefill_in_chunks(rig: Rig, slot: int, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    hidden = []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        following = ids[stop : stop + 1] if stop < len(ids) else None
        hidden.append(rig.prefill([(slot, start, ids[:stop])], following=following))
    return torch.cat(hidden)


@pytest.mark.parametrize("kind", ["dense", "moe", "tiny"])
def test_prefill_equals_score(context, kind):
    built = tiny_model(context) if kind == "tiny" else fixture_model(kind, context)
    rig = Rig.make(built, context)
    documents = [rig.tokens(n, seed=n) for n in (1, 37, 2, 16)]
    hidden_TH = rig.prefill([(slot, 0, ids) for slot, ids in enumerate(documents)])
    logits = rig.logits(hidden_TH).split([len(ids) for ids in documents])
    for slot, ids in enumerate(documents):
        scores = score_batch(rig.built, rig.batch(ids), context, with_logits=True)
        close(logits[slot], scores.logits_TV)
        assert int(rig.memory.slots.position[slot]) == len(ids)


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_and_steps_of_every_variant(context, name):
    rig = Rig.make(random_model(context, **VARIANTS[name]), context)
    ids = rig.tokens(15)
    ids[3] = rig.vocab_size - 1
    expected_TH = rig.trained_hidden(ids)
    close(rig.prefill([(1, 0, ids[:9])]), expected_TH[:9])
    slots = rig.slots(1)
    close(rig.program.verify(ids[None, 9:13], slots)[0], expected_TH[9:13])
    mtp_TH = rig.trained_mtp(ids[1:], expected_TH[:-1])
    close(rig.program.mtp_row(ids[9:10], expected_TH[8:9], slots), mtp_TH[8:9])
    close(rig.program.mtp_refresh(ids[None, 10:14], expected_TH[None, 9:13], slots)[0], mtp_TH[9:13])
    rig.commit(slots, [4])
    close(rig.program.verify(ids[None, 13:15], slots)[0], expected_TH[13:15])


@pytest.mark.parametrize("cuts", [[1], [2], [3], [4, 8], [7, 8], [1, 2, 3, 4, 5, 19]])
def test_chunked_prefill_equals_whole(context, moe, cuts):
    rig = Rig.make(moe, context)
    ids = rig.tokens(20)
    whole_TH = rig.prefill([(0, 0, ids)])
    close(prefill_in_chunks(rig, 2, ids, cuts), whole_TH)
    for ours, theirs in zip(rig.settled(2), rig.settled(0), strict=True):
        close(ours, theirs)
    close(rig.cached_rows(2, 19, mtp=True), rig.cached_rows(0, 19, mtp=True))


def test_a_pack_mixes_chunks_of_several_sequences(context, moe):
    rig = Rig.make(moe, context)
    one, two = rig.tokens(11, seed=1), rig.tokens(9, seed=2)
    rig.prefill([(0, 0, one[:5])])
    hidden_TH = rig.prefill([(3, 0, two), (0, 5, one)])
    close(hidden_TH[:9], rig.trained_hidden(two))
    close(hidden_TH[9:], rig.trained_hidden(one)[5:])


def test_mtp_prefill_writes_the_rows_that_decoding_reads(context, moe):
    """Prompts of one token, of two, and of a block and one more."""
    for length in (1, 2, 5):
        rig = Rig.make(moe, context)
        ids = rig.tokens(length + 1, seed=length)
        hidden_TH = rig.prefill([(0, 0, ids[:length])])
        written = ~rig.cached_rows(0, length, mtp=True)[0].isnan().any(-1)
        assert written.tolist() == [True] * (length - 1) + [False]
        mtp_H = rig.program.mtp_row(ids[length:], hidden_TH[-1:], rig.slots(0))
        close(mtp_H, rig.trained_mtp(ids[1:], rig.trained_hidden(ids[:length]))[-1:])


def test_scratch_segments_only_pad(context, moe):
    ids = Rig.make(moe, context).tokens(10)
    plain, padded = (Rig.make(moe, context, poison=False) for _ in range(2))
    hidden_TH = plain.prefill([(1, 0, ids)])
    scratch = padded.memory.scratch_slot
    padded_TH = padded.prefill([(1, 0, ids), (scratch, 0, ids[:3]), (scratch, 0, ids[:2])])
    close(padded_TH[:10], hidden_TH)
    for ours, theirs in zip(padded.settled(1), plain.settled(1), strict=True):
        close(ours, theirs)
    assert int(padded.memory.slots.position[scratch]) == 0


def test_a_slot_is_free_of_its_last_sequence(context, moe):
    rig = Rig.make(moe, context)
    first, second = rig.tokens(12, seed=1), rig.tokens(8, seed=2)
    rig.prefill([(0, 0, first)])
    rig.program.verify(first[None, :3], rig.slots(0))
    rig.commit(rig.slots(0), [2])
    close(rig.prefill([(0, 0, second)]), rig.trained_hidden(second))
    close(rig.program.verify(first[None, :2], rig.slots(0))[0], rig.trained_hidden(torch.cat((second, first[:2])))[8:])


def test_tables_of_a_pack():
    plan = PrefillPlan.build([(5, 0, 65), (2, 7, 1), (0, 3, 128)], torch.device("cpu"))
    pack = plan.pack
    assert pack.lengths == plan.lengths == (65, 1, 128) and pack.key_lengths == (65, 8, 131)
    assert pack.chunks_M2.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]
    assert pack.chunk_offsets.tolist() == [0, 2, 3, 5]
    assert pack.cu_seqlens.tolist() == pack.query_ends.tolist() == [0, 65, 66, 194]
    assert pack.key_ends.tolist() == [0, 65, 73, 204] and pack.key_ends.dtype is pack.query_ends.dtype is torch.int32
    assert pack.segment_T.tolist() == [0] * 65 + [1] + [2] * 128
    assert plan.position_T.tolist() == [*range(65), 7, *range(3, 131)]
    assert plan.continues_s.tolist() == [False, True, True] and plan.slots_s.tolist() == [5, 2, 0]
    assert PrefillPlan.build([(5, 0, 65)], torch.device("cpu")).continues_s is None


def test_prefills_in_fp32_run_on_the_twins():
    assert prefill_kernels("torch", torch.bfloat16) is prefill_twins
    assert prefill_kernels("triton", torch.float32) is prefill_twins
