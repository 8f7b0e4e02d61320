from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.data import loader as loader_module
from bailing_mtp.data.loader import PackedLoader
from bailing_mtp.data.shards import TokenShards

SIZES = {"microbatch_tokens": 128, "seq_tokens": 64}


def _shards(lengths: list[int]) -> TokenShards:
    """Documents in memory; token = 1000 * (1 + document) + position."""
    tokens = [1000 * (1 + index) + position for index, n in enumerate(lengths) for position in range(n)]
    names = [f"doc{index}".encode() for index in range(len(lengths))]
    return TokenShards(
        directory=Path("memory"),
        content_digest=f"digest of {lengths}",
        tokens=np.array(tokens, dtype=np.uint32),
        offsets=np.cumsum([0, *lengths]),
        origins=np.frombuffer(b"".join(names), dtype=np.uint8),
        origin_offsets=np.cumsum([0, *map(len, names)]),
        max_token_id=max(tokens),
        n_skipped_lines=0,
        first_skipped=None,
    )


def _key(batch: TokenBatch) -> tuple[Any, ...]:
    return (
        tuple(batch.input_ids_T.tolist()),
        batch.layout.lengths,
        batch.layout.is_padding,
        batch.document_ids,
    )


def _steps(loader: PackedLoader, n_steps: int) -> list[list[tuple[Any, ...]]]:
    return [[_key(batch) for batch in loader.next_step()] for _ in range(n_steps)]


def _tokens_of_epochs(loader: PackedLoader, n_epochs: int) -> list[list[int]]:
    """Real tokens of the first epochs of a new loader."""
    tokens: list[list[int]] = [[] for _ in range(n_epochs)]
    while True:
        (batch,) = loader.next_step()
        if loader.epoch == n_epochs:
            return tokens
        tokens[loader.epoch] += batch.input_ids_T[~batch.layout.padding_T].tolist()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_WINDOW_MICROBATCHES", 4)


@pytest.mark.usefixtures("small_windows")
def test_every_epoch_has_every_token_once(shards: TokenShards) -> None:
    first, second = _tokens_of_epochs(PackedLoader(shards, **SIZES, valid_fraction=0.0), 2)
    assert sorted(first) == sorted(second) == sorted(shards.tokens.tolist())


@pytest.mark.usefixtures("small_windows")
def test_epochs_and_seeds_pack_other_documents_together(shards: TokenShards) -> None:
    """Not only the order of the microbatches changes: their members do."""
    packs: dict[tuple[int, int], set[tuple[str, ...]]] = {}
    for seed in (1, 2):
        loader = PackedLoader(shards, **SIZES, seed=seed)
        while loader.epoch < 2:
            (batch,) = loader.next_step()
            packs.setdefault((seed, loader.epoch), set()).add(batch.document_ids)
    assert len(packs[1, 0]) > 50
    for other in ((1, 1), (2, 0), (2, 1)):
        assert len(packs[1, 0] & packs[other]) < 5


def test_batches_by_hand() -> None:
    """Documents of 5 (cut into 3 + 2), 3 and 2 tokens in microbatches of 6: two bins, the whole epoch."""
    loader = PackedLoader(_shards([5, 3, 2]), microbatch_tokens=6, seq_tokens=3, valid_fraction=0.0)
    assert loader.n_pieces == 4
    pieces = {
        (1000, 1001, 1002): "doc0[0:3]",
        (1003, 1004): "doc0[3:5]",
        (2000, 2001, 2002): "doc1",
        (3000, 3001): "doc2",
    }
    for _ in range(3):
        seen = {}
        for _ in range(2):
            (batch,) = loader.next_step()
            borders = batch.layout.cu_seqlens.tolist()
            for index, (begin, end) in enumerate(pairwise(borders)):
                assert batch.loss_mask_T[begin:end].tolist() == [not batch.layout.is_padding[index]] * (
                    end - begin
                )
                if batch.layout.is_padding[index]:
                    assert batch.input_ids_T[begin:end].tolist() == [0] * (end - begin)
                else:
                    seen[tuple(batch.input_ids_T[begin:end].tolist())] = batch.document_ids[index]
        assert seen == pieces


def test_every_batch_is_full_size_and_within_limits(shards: TokenShards) -> None:
    loader = PackedLoader(shards, **SIZES, microbatches_per_step=8)
    batches = [batch for _ in range(20) for batch in loader.next_step()]
    assert {batch.input_ids_T.numel() for batch in batches} == {128}
    assert max(max(batch.layout.lengths) for batch in batches) <= 64
    n_padding = sum(int(batch.layout.padding_T.sum()) for batch in batches)
    assert n_padding < 0.05 * 128 * len(batches)
    assert all((batch.loss_mask_T == ~batch.layout.padding_T).all() for batch in batches)


def test_same_seed_repeats_and_another_differs(shards: TokenShards) -> None:
    first, again, other = (PackedLoader(shards, **SIZES, seed=seed) for seed in (1, 1, 2))
    steps = _steps(first, 12)
    assert steps == _steps(again, 12)
    assert steps != _steps(other, 12)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("dp_size", [2, 4])
def test_ranks_share_the_microbatches_of_one_rank(shards: TokenShards, dp_size: int) -> None:
    whole = _steps(PackedLoader(shards, **SIZES, microbatches_per_step=4), 30)
    ranks = [
        _steps(PackedLoader(shards, **SIZES, dp_rank=rank, dp_size=dp_size, microbatches_per_step=4), 30)
        for rank in range(dp_size)
    ]
    for step, expected in enumerate(whole):
        shares = [ranks[rank][step] for rank in range(dp_size)]
        assert [len(share) for share in shares] == [4 // dp_size] * dp_size
        assert [shares[index % dp_size][index // dp_size] for index in range(4)] == expected


@pytest.mark.usefixtures("small_windows")
def test_resume_continues_exactly_at_every_step(shards: TokenShards) -> None:
    """Also across windows and epochs, and on another number of ranks."""
    loader = PackedLoader(shards, **SIZES, microbatches_per_step=6, seed=5)
    states, steps = [], []
    while loader.epoch < 2:
        states.append(json.loads(json.dumps(loader.state_dict())))
        steps += _steps(loader, 1)
    assert len({state["window"] for state in states}) > 2
    for number in range(0, len(steps) - 1, 3):
        resumed = PackedLoader(shards, **SIZES, microbatches_per_step=6, seed=5)
        resumed.next_step()
        resumed.load_state_dict(states[number])
        assert _steps(resumed, 2) == steps[number : number + 2]
    half = PackedLoader(shards, **SIZES, dp_rank=1, dp_size=2, microbatches_per_step=6, seed=5)
    half.load_state_dict(states[9])
    assert _steps(half, 1) == [steps[9][1::2]]
    assert half.state_dict() == states[10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "seed was 5, now 6"),
        ({"seq_tokens": 32}, "seq_tokens was 64, now 32"),
        ({"microbatch_tokens": 256}, "microbatch_tokens was 128, now 256"),
        ({"split": "valid"}, "split was 'train', now 'valid'"),
        ({"valid_fraction": 0.1}, "valid_fraction was 0.05, now 0.1"),
    ],
)
def test_state_of_another_sequence_is_refused(
    shards: TokenShards, change: dict[str, Any], message: str
) -> None:
    settings = {**SIZES, "seed": 5, "valid_fraction": 0.05}
    state = PackedLoader(shards, **settings).state_dict()
    with pytest.raises(ValueError, match=f"cannot be continued: {message}"):
        PackedLoader(shards, **(settings | change)).load_state_dict(state)


def test_state_of_other_data_is_refused(shards: TokenShards) -> None:
    state = PackedLoader(shards, **SIZES).state_dict()
    other = PackedLoader(replace(shards, content_digest="other"), **SIZES)
    with pytest.raises(ValueError, match=r"cannot be continued: shards was '.*', now 'other'"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="version was None, now 1"):
        other.load_state_dict({})


def test_splits_never_overlap() -> None:
    data = _shards([7, 12, 3, 30, 5, 9, 4, 11, 6, 8])
    train = _tokens_of_epochs(PackedLoader(data, 16, 8, split="train", valid_fraction=0.25), 1)[0]
    valid = _tokens_of_epochs(PackedLoader(data, 16, 8, split="valid", valid_fraction=0.25), 1)[0]
    assert {token // 1000 - 1 for token in valid} == {8, 9}
    assert sorted(train + valid) == sorted(data.tokens.tolist())


@pytest.mark.parametrize(("lengths", "fraction"), [([5, 6], 0.3), ([5], 0.9), ([5, 6], 0.0)])
def test_empty_split_is_refused(lengths: list[int], fraction: float) -> None:
    with pytest.raises(ValueError, match=f"the split 'valid' is empty: {len(lengths)} documents"):
        PackedLoader(_shards(lengths), 8, 4, split="valid", valid_fraction=fraction)
    assert len(PackedLoader(_shards(lengths), 8, 4, valid_fraction=fraction).next_step()) == 1


def test_wrong_sizes_are_refused(shards: TokenShards) -> None:
    with pytest.raises(ValueError, match=r"train.tokens_per_step: 3 microbatches.*allowed: a multiple of 2"):
        PackedLoader(shards, **SIZES, dp_size=2, microbatches_per_step=3)
    with pytest.raises(ValueError, match=r"data.seq_tokens: 129 .*allowed: 2 to 128"):
        PackedLoader(shards, 128, 129)
    with pytest.raises(ValueError, match=r"valid_fraction: 1\.0 is not supported"):
        PackedLoader(shards, **SIZES, valid_fraction=1.0)
