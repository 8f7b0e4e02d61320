"""Advantages by hand; samples to microbatches: every token's values where they belong, loads in balance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.contracts.samples import Prompt, RolloutGroup, Sample
from bailing_mtp.errors import UserError
from bailing_mtp.rl.advantages import Advantages, advantages
from bailing_mtp.rl.samples import (
    PolicyRow,
    balanced,
    make_policy_batch,
    pack_rows,
    policy_rows,
    reward_samples,
)


def test_group_normalisation_by_hand():
    """Rewards 1, 0, 0, 1: mean 1/2, population std 1/2. Rewards 0, 3: mean 3/2, std 3/2."""
    found = advantages([[1, 0, 0, 1], [0, 3]], "group")
    assert found.groups[0] == pytest.approx([1, -1, -1, 1], abs=1e-5)
    assert found.groups[1] == pytest.approx([-1, 1], abs=1e-5)
    skewed = advantages([[2.0, 0.0, 0.0]], "group").groups[0]
    std = math.sqrt(8 / 9)
    assert skewed == pytest.approx([4 / 3 / std, -2 / 3 / std, -2 / 3 / std], rel=1e-5)


def test_leave_one_out_by_hand():
    assert advantages([[1.0, 0.0, 0.5]], "rloo").groups[0] == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("kind", ["group", "rloo"])
def test_groups_that_teach_nothing_are_dropped_and_counted(kind: str):
    found = advantages([[1, 1, 1], [0, 1], [0.3], [], [0.1 + 0.2, 0.1 + 0.2]], kind)
    assert [group is None for group in found.groups] == [True, False, True, True, True]
    assert found.n_dropped == 4
    with pytest.raises(ValueError, match="must be finite"):
        advantages([[float("nan"), 1.0]], kind)


def sample(prompt: int, index: int, n_prompt: int, n_response: int, **changes: Any) -> Sample:
    """Token ids 100, 101, ... and 200, 201, ...; log-probs -0.1, -0.2, ... and kept mass -0.01 each."""
    values = {
        "prompt_index": prompt,
        "sample_index": index,
        "prompt_ids": tuple(range(100, 100 + n_prompt)),
        "response_ids": tuple(range(200, 200 + n_response)),
        "logprobs": tuple(-9.0 for _ in range(n_response)),
        "processed_logprobs": tuple(-0.1 * (i + 1) for i in range(n_response)),
        "kept_logmass": tuple(-0.01 for _ in range(n_response)),
        "finish_reason": "stop",
    }
    return Sample(**(values | changes))


def group(*samples: Sample) -> RolloutGroup:
    return RolloutGroup(Prompt(prompt_ids=(1,), index=samples[0].prompt_index), samples)


def test_batch_values_by_hand():
    batch = make_policy_batch([PolicyRow(sample(0, 0, 2, 3), 1.5), PolicyRow(sample(0, 1, 3, 1), -0.5)])
    assert batch.layout.lengths == (5, 4)
    assert batch.input_ids_T.tolist() == [100, 101, 200, 201, 202, 100, 101, 102, 200]
    assert batch.loss_mask_T.tolist() == [False] * 2 + [True] * 3 + [False] * 3 + [True]
    assert batch.advantage_T.tolist() == [0, 0, 1.5, 1.5, 1.5, 0, 0, 0, -0.5]
    expected = torch.tensor([0, 0, -0.11, -0.21, -0.31, 0, 0, 0, -0.11])
    torch.testing.assert_close(batch.rollout_logprob_T, expected)
    valid_T = batch.shift(0).valid_T
    assert valid_T.nonzero().flatten().tolist() == [1, 2, 3, 7]
    torch.testing.assert_close(batch.at_sites(batch.rollout_logprob_T)[valid_T], expected[[2, 3, 4, 8]])
    assert batch.document_ids == ("prompt 0 sample 0", "prompt 0 sample 1")
    padded = batch.padded_to(4)
    assert isinstance(padded, PolicyBatch) and padded.layout.lengths == (5, 4, 3)
    assert padded.advantage_T.tolist() == [*batch.advantage_T.tolist(), 0, 0, 0]
    assert padded.shift(0).valid_T.nonzero().flatten().tolist() == [1, 2, 3, 7]
    assert padded.to(torch.device("cpu")).rollout_logprob_T.shape == (12,)


def test_per_token_values_must_fit_the_pack():
    batch = make_policy_batch([PolicyRow(sample(0, 0, 2, 3), 1.0)])
    with pytest.raises(ValueError, match=r"rollout_logprob_T \(4,\) must be \[5\]"):
        PolicyBatch(batch.input_ids_T, batch.loss_mask_T, batch.layout, (), None, batch.advantage_T, torch.zeros(4))


def test_greedy_samples_are_refused():
    with pytest.raises(ValueError, match="temperature 0"):
        make_policy_batch([PolicyRow(sample(3, 0, 1, 1, kept_logmass=None), 1.0)])


def test_what_is_left_out_is_counted():
    groups = [
        group(sample(0, 0, 1, 2), sample(0, 1, 1, 2, finish_reason="cancelled"), sample(0, 2, 1, 2)),
        group(sample(1, 0, 1, 2), sample(1, 1, 1, 0)),
    ]
    found = policy_rows(groups, Advantages(((1.0, -1.0), None)))
    assert [(row.sample.sample_index, row.advantage) for row in found.rows] == [(0, 1.0), (2, -1.0)]
    assert found.left_out == {"unusable": 2, "equal_rewards": 1}


def test_what_a_reward_function_is_given():
    record = {"prompt": "p", "answer": 7, "level": 2}
    prompt = Prompt(prompt_ids=(5, 6), index=0, record=record)
    samples = (sample(0, 0, 2, 1), sample(0, 1, 2, 0), sample(0, 2, 2, 2))
    found = reward_samples(RolloutGroup(prompt, samples), lambda ids: "-".join(map(str, ids)))
    assert found == [
        {"prompt": "5-6", "response": response, "answer": 7, "record": record} for response in ("200", "200-201")
    ]


def test_balanced_by_hand():
    assert balanced([7, 5, 4, 4], 2, 11) == [[0, 3], [1, 2]]
    assert balanced([7, 5, 4, 4], 2, 10) is None


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_every_row_is_packed_once_and_ranks_agree_on_the_count(dp: int):
    rows = [PolicyRow(sample(i, 0, 1 + i % 5, 1 + 7 * i % 11), float(i)) for i in range(23)]
    per_rank = pack_rows(rows, 24, dp)
    assert len(per_rank) == dp and len({len(batches) for batches in per_rank}) == 1
    batches = [batch for rank in per_rank for batch in rank]
    assert sorted(name for batch in batches for name in batch.document_ids) == sorted(row.name for row in rows)
    assert all(batch.layout.n_tokens <= 24 for batch in batches)
    total = sum(row.n_tokens for row in rows)
    assert len(batches) - dp < 1.3 * total / 24
    loads = [sum(batch.layout.n_tokens for batch in rank) for rank in per_rank]
    assert max(loads) - min(loads) <= 24


def test_few_rows_still_give_every_rank_a_microbatch():
    per_rank = pack_rows([PolicyRow(sample(0, 0, 2, 2), 1.0)], 24, dp=2)
    assert [batch.layout.is_padding for (batch,) in per_rank] == [(False,), (True,)]
    assert not per_rank[1][0].shift(0).valid_T.any()
    assert len(pack_rows([], 24, dp=2)) == 2


def test_row_that_fits_nowhere_is_named():
    with pytest.raises(UserError, match="train.microbatch_tokens: 5 cannot hold prompt 4 sample 2 of 6 tokens"):
        pack_rows([PolicyRow(sample(4, 2, 2, 4), 1.0)], 5, dp=1)
