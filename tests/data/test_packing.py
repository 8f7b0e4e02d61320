from __future__ import annotations

import numpy as np
import pytest
import torch

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.data.packing import TokenDocument, best_fit, cut_document, make_batch, pack_documents


def _document(value: int, n_tokens: int, first_trained: int | None = None) -> TokenDocument:
    mask = None if first_trained is None else [index >= first_trained for index in range(n_tokens)]
    return TokenDocument(np.full(n_tokens, value, dtype=np.uint32), f"doc{value}", mask)


def test_best_fit_by_hand() -> None:
    # 6 -> bin 0 (room 4); 5 -> bin 1 (room 5); 4 fills bin 0, not bin 1; 3 -> bin 1 (room 2);
    # 3 -> bin 2 (room 7); 2 fills bin 1.
    assert best_fit([6, 5, 4, 3, 3, 2], capacity=10) == [[0, 2], [1, 3, 5], [4]]


def test_best_fit_uses_the_last_token_of_room() -> None:
    assert best_fit([9, 9, 1], capacity=10) == [[0, 2], [1]]


def test_best_fit_takes_the_oldest_of_equal_bins() -> None:
    assert best_fit([7, 7, 7, 2, 3], capacity=10) == [[0, 3], [1, 4], [2]]


def test_best_fit_loses_nothing_and_overfills_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 500).tolist()
    bins = best_fit(lengths, 64)
    assert sorted(index for members in bins for index in members) == list(range(500))
    assert max(sum(lengths[index] for index in members) for members in bins) <= 64
    assert sum(lengths) / (64 * len(bins)) > 0.9


def test_item_above_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="item 1 of 11 tokens does not fit into 10"):
        best_fit([3, 11], 10)


def test_long_document_is_cut_with_its_mask() -> None:
    document = TokenDocument([1, 2, 3, 4, 5], "book", [False, False, False, True, True])
    pieces = [
        (list(piece.token_ids), piece.origin, list(piece.loss_mask)) for piece in cut_document(document, 2)
    ]
    assert pieces == [
        ([1, 2], "book[0:2]", [False, False]),
        ([3, 4], "book[2:4]", [False, True]),
        ([5], "book[4:5]", [True]),
    ]
    assert cut_document(document, 5) == [document]


def test_batch_by_hand() -> None:
    batch = make_batch(
        [_document(7, 3), _document(8, 2, first_trained=1)], microbatch_tokens=12, seq_tokens=4
    )
    assert batch.input_ids_T.tolist() == [7, 7, 7, 8, 8] + [0] * 7
    assert batch.input_ids_T.dtype == torch.int64
    assert batch.loss_mask_T.tolist() == [True, True, True, False, True] + [False] * 7
    assert batch.layout.lengths == (3, 2, 4, 3)
    assert batch.layout.is_padding == (False, False, True, True)
    assert batch.layout.position_ids_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert batch.document_ids == ("doc7", "doc8", "padding", "padding")


def test_full_batch_has_no_padding() -> None:
    batch = make_batch([_document(7, 3), _document(8, 3)], microbatch_tokens=6, seq_tokens=3)
    assert (batch.layout.lengths, batch.layout.is_padding) == ((3, 3), (False, False))


def test_packed_documents_by_hand() -> None:
    documents = [_document(1, 5), _document(2, 9), _document(3, 0), _document(4, 3)]
    batches = pack_documents(documents, microbatch_tokens=8, seq_tokens=6)
    # Pieces 5, 6, 3, 3: the first 3 (end of document 2) joins the 5, the second 3 opens a bin of its own.
    assert [batch.input_ids_T.tolist() for batch in batches] == [
        [1, 1, 1, 1, 1, 2, 2, 2],
        [2, 2, 2, 2, 2, 2, 0, 0],
        [4, 4, 4, 0, 0, 0, 0, 0],
    ]
    assert [batch.document_ids[:2] for batch in batches] == [
        ("doc1", "doc2[6:9]"),
        ("doc2[0:6]", "padding"),
        ("doc4", "padding"),
    ]


@pytest.mark.parametrize(("microbatch_tokens", "seq_tokens"), [(8, 9), (8, 1), (8, 0)])
def test_sizes_that_do_not_go_together(microbatch_tokens: int, seq_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"data.seq_tokens: {seq_tokens} is not supported.*allowed: 2 to 8"):
        pack_documents([_document(1, 3)], microbatch_tokens, seq_tokens)


def test_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="row: 2 mask values for 3 tokens"):
        TokenDocument([1, 2, 3], "row", [True, False])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_targets_stay_in_their_document(depth: int) -> None:
    """Token value = document: a target has its site's value; a document of n has n - 1 - depth of them."""
    batch = make_batch(
        [_document(3, 5), _document(9, 3), _document(4, 1)], microbatch_tokens=12, seq_tokens=6
    )
    target_ids_T, valid_T = batch.shift(depth)
    assert torch.equal(target_ids_T[valid_T], batch.input_ids_T[valid_T])
    counts = [int(valid_T[batch.input_ids_T == value].sum()) for value in (3, 9, 4, 0)]
    assert counts == [max(0, n - 1 - depth) for n in (5, 3, 1)] + [0]


def test_targets_of_padded_documents() -> None:
    """Documents of 5 and 3 tokens, each padded on its right to 8 and 4."""
    layout = PackedLayout.build([5, 3, 3, 1], [False, True, False, True])
    input_ids_T = torch.tensor([1] * 5 + [0] * 3 + [2] * 3 + [0])
    batch = TokenBatch(input_ids_T, torch.ones(12, dtype=torch.bool), layout)
    target_ids_T, valid_T = batch.shift(1)
    assert valid_T.nonzero().flatten().tolist() == [0, 1, 2, 8]
    assert target_ids_T[valid_T].tolist() == [1, 1, 1, 2]


def test_only_response_tokens_are_targets() -> None:
    """Prompt of 4, response of 3: depth 1 sites are those two before a response token."""
    row = TokenDocument([10, 11, 12, 13, 20, 21, 22], "row", [False] * 4 + [True] * 3)
    batch = make_batch([row, _document(5, 3)], microbatch_tokens=12, seq_tokens=8)
    target_ids_T, valid_T = batch.shift(1)
    assert valid_T.nonzero().flatten().tolist() == [2, 3, 4, 7]
    assert target_ids_T[valid_T].tolist() == [20, 21, 22, 5]
    assert batch.shift(0).valid_T.nonzero().flatten().tolist() == [3, 4, 5, 7, 8]
