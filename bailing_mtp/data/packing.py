"""Packs documents into microbatches of a fixed number of tokens.

T is `microbatch_tokens`: every batch is filled up to it by padding, so that shapes never change.
No document, padding included, is longer than `seq_tokens`; a longer one is cut, and each piece is a document
of its own (nothing attends or predicts across a cut).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.errors import UserError

PADDING_ORIGIN = "padding"
_PADDING_ID = 0


@dataclass(frozen=True)
class TokenDocument:
    """Tokens that belong together. `loss_mask` is True on trained tokens; None means all of them."""

    token_ids: np.ndarray | Sequence[int]
    origin: str
    loss_mask: np.ndarray | Sequence[bool] | None = None

    def __post_init__(self) -> None:
        n_tokens = len(self.token_ids)
        if self.loss_mask is not None and len(self.loss_mask) != n_tokens:
            raise ValueError(f"{self.origin}: {len(self.loss_mask)} mask values for {n_tokens} tokens")


def check_pack_sizes(microbatch_tokens: int, seq_tokens: int) -> None:
    """Raise UserError unless 2 <= seq_tokens <= microbatch_tokens (a site needs a next token)."""
    if not 2 <= seq_tokens <= microbatch_tokens:
        raise UserError(
            f"data.seq_tokens: {seq_tokens} is not supported with microbatches of {microbatch_tokens} "
            f"tokens; allowed: 2 to {microbatch_tokens}"
        )


def cut_document(document: TokenDocument, seq_tokens: int) -> list[TokenDocument]:
    """Pieces of at most `seq_tokens` tokens, in order; the origin of a piece names its tokens."""
    n_tokens = len(document.token_ids)
    if n_tokens <= seq_tokens:
        return [document]
    pieces = []
    for begin in range(0, n_tokens, seq_tokens):
        end = min(begin + seq_tokens, n_tokens)
        origin = piece_origin(document.origin, begin, end)
        mask = None if document.loss_mask is None else document.loss_mask[begin:end]
        pieces.append(TokenDocument(document.token_ids[begin:end], origin, mask))
    return pieces


def piece_origin(origin: str, begin: int, end: int) -> str:
    """Name of tokens `begin` to `end` (exclusive) of a document that was cut."""
    return f"{origin}[{begin}:{end}]"


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `lengths`, each bin's lengths adding up to at most `capacity`.

    Every item goes, in the order given, to the fullest bin that still has room for it (the oldest of equals),
    else to a new bin. Raises ValueError for an item longer than `capacity`.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"item {index} of {length} tokens does not fit into {capacity}")
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, bin_index = rooms.pop(at)
        else:
            room, bin_index = capacity, len(bins)
            bins.append([])
        bins[bin_index].append(index)
        if room > length:
            insort(rooms, (room - length, bin_index))
    return bins


def make_batch(documents: Sequence[TokenDocument], microbatch_tokens: int, seq_tokens: int) -> TokenBatch:
    """One batch of exactly `microbatch_tokens` tokens: the documents in order, then masked padding.

    Padding longer than `seq_tokens` is several padding documents, so that no position exceeds the limit.
    """
    lengths = [len(document.token_ids) for document in documents]
    n_padding = microbatch_tokens - sum(lengths)
    assert n_padding >= 0 and max(lengths, default=0) <= seq_tokens, (lengths, microbatch_tokens, seq_tokens)
    padding = [min(seq_tokens, n_padding - begin) for begin in range(0, n_padding, seq_tokens)]
    input_ids_T = torch.full((microbatch_tokens,), _PADDING_ID, dtype=torch.int64)
    loss_mask_T = torch.zeros(microbatch_tokens, dtype=torch.bool)
    begin = 0
    for document, length in zip(documents, lengths, strict=True):
        mask = np.ones(length) if document.loss_mask is None else document.loss_mask
        input_ids_T[begin : begin + length] = torch.from_numpy(np.array(document.token_ids, dtype=np.int64))
        loss_mask_T[begin : begin + length] = torch.from_numpy(np.array(mask, dtype=bool))
        begin += length
    flags = [False] * len(lengths) + [True] * len(padding)
    origins = [document.origin for document in documents] + [PADDING_ORIGIN] * len(padding)
    layout = PackedLayout.build([*lengths, *padding], flags)
    return TokenBatch(input_ids_T, loss_mask_T, layout, tuple(origins))


def pack_documents(
    documents: Sequence[TokenDocument], microbatch_tokens: int, seq_tokens: int
) -> list[TokenBatch]:
    """Cut, pack by best fit in the order given, and fill up: every token lies in exactly one batch.

    Raises UserError when the sizes do not allow it; empty documents are left out.
    """
    check_pack_sizes(microbatch_tokens, seq_tokens)
    filled = [document for document in documents if len(document.token_ids) > 0]
    pieces = [piece for document in filled for piece in cut_document(document, seq_tokens)]
    bins = best_fit([len(piece.token_ids) for piece in pieces], microbatch_tokens)
    return [
        make_batch([pieces[index] for index in members], microbatch_tokens, seq_tokens) for members in bins
    ]
