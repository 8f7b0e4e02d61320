"""Endless, resumable batches of packed documents from token shards.

The sequence of packed microbatches is a function of (shards, split, sizes, seed) alone. A step takes the next
`microbatches_per_step` of it; data-parallel rank r of D computes numbers r, r+D, ... of these, so that the
same run on another number of ranks trains on the same microbatches.

An epoch shuffles all pieces of the split's documents (a document longer than `seq_tokens` is several pieces)
and packs them window by window; windows are packed on their own, so that a resumed run need not replay the
epoch. Shuffles draw from Philox keyed by (seed, epoch) and (seed, epoch, window).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.data.packing import TokenDocument, best_fit, check_pack_sizes, make_batch, piece_origin
from bailing_mtp.data.shards import TokenShards
from bailing_mtp.data.sources import Split
from bailing_mtp.errors import UserError

_WINDOW_MICROBATCHES = 128
_STATE_VERSION = 1


class StepLoader(ABC):
    """The sequence of microbatches over any items that are packed whole; see the module's text."""

    def __init__(
        self,
        n_items: int,
        n_tokens: int,
        microbatch_tokens: int,
        dp_rank: int,
        dp_size: int,
        microbatches_per_step: int,
        identity: Mapping[str, Any],
    ) -> None:
        """`n_tokens`: of all items together. `identity`: JSON values that make the sequence, `seed` among them."""
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        if microbatches_per_step < 1 or microbatches_per_step % dp_size:
            raise UserError(
                f"train.tokens_per_step: {microbatches_per_step} microbatches of {microbatch_tokens} tokens "
                f"cannot be shared by {dp_size} data-parallel ranks; allowed: a multiple of {dp_size}"
            )
        self._n_items = n_items
        self._microbatch_tokens = microbatch_tokens
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._microbatches_per_step = microbatches_per_step
        self._window_items = max(1, _WINDOW_MICROBATCHES * microbatch_tokens * n_items // n_tokens)
        self._identity = {"version": _STATE_VERSION, "microbatch_tokens": microbatch_tokens, **identity}
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)
        self._move_to(epoch=0, window=0, offset=0)

    @abstractmethod
    def _lengths(self, items: np.ndarray) -> np.ndarray:
        """Tokens of each item."""

    @abstractmethod
    def _batch(self, items: list[int]) -> TokenBatch:
        """The microbatch of these items."""

    @property
    def epoch(self) -> int:
        """Epoch of the microbatch drawn last, 0 before the first."""
        return self._epoch

    def next_step(self) -> list[TokenBatch]:
        """This rank's microbatches of the next step, on the CPU."""
        mine = []
        for index in range(self._microbatches_per_step):
            members = self._next_members()
            if index % self._dp_size == self._dp_rank:
                mine.append(self._batch(members.tolist()))
        return mine

    def state_dict(self) -> dict[str, Any]:
        """Where the sequence stands, as JSON values; the same on every rank."""
        return {**self._identity, "epoch": self._epoch, "window": self._window, "offset": self._offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after the step at which `state` was taken; the number of ranks may differ.

        Raises UserError if the state belongs to another sequence: other data, seed, split or sizes.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise UserError(
                    f"the saved data position cannot be continued: {key} was {state.get(key)!r}, "
                    f"now {value!r}; allowed: the same value, or a run that starts fresh"
                )
        self._move_to(int(state["epoch"]), int(state["window"]), int(state["offset"]))

    def _next_members(self) -> np.ndarray:
        """Items of the next microbatch of the sequence."""
        if self._offset == len(self._bins):
            is_last = (self._window + 1) * self._window_items >= self._n_items
            self._move_to(*((self._epoch + 1, 0, 0) if is_last else (self._epoch, self._window + 1, 0)))
        members = self._bins[self._offset]
        self._offset += 1
        return members

    def _move_to(self, epoch: int, window: int, offset: int) -> None:
        if epoch != self._epoch:
            self._order = _generator(self._identity["seed"], epoch).permutation(self._n_items)
        begin = window * self._window_items
        items = self._order[begin : begin + self._window_items]
        bins = best_fit(self._lengths(items).tolist(), self._microbatch_tokens)
        # Bins opened last are the emptiest: shuffled, so that a window does not end with small batches.
        shuffled = _generator(self._identity["seed"], epoch, window).permutation(len(bins))
        self._epoch, self._window, self._offset = epoch, window, offset
        self._bins = [items[bins[index]] for index in shuffled]


class PackedLoader(StepLoader):
    """Documents of token shards for one data-parallel rank; an item is a piece of a document."""

    def __init__(
        self,
        shards: TokenShards,
        microbatch_tokens: int,
        seq_tokens: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        microbatches_per_step: int = 1,
        seed: int = 0,
        split: Split = "train",
        valid_fraction: float = 0.01,
    ) -> None:
        """`microbatches_per_step` counts the microbatches of all ranks together.

        The last floor(`valid_fraction` * documents) documents are the split "valid", the others "train".
        Raises UserError for sizes that do not divide or a split without documents.
        """
        check_pack_sizes(microbatch_tokens, seq_tokens)
        self._shards = shards
        self._seq_tokens = seq_tokens
        self._first_document, n_documents = split_range(shards.n_documents, split, valid_fraction)
        lengths = np.diff(shards.offsets[self._first_document : self._first_document + n_documents + 1])
        self._piece_ends = np.cumsum(-(-lengths // seq_tokens))
        identity = {
            "seed": seed,
            "shards": shards.content_digest,
            "split": split,
            "valid_fraction": valid_fraction,
            "seq_tokens": seq_tokens,
        }
        sizes = (self.n_pieces, int(lengths.sum()), microbatch_tokens)
        super().__init__(*sizes, dp_rank, dp_size, microbatches_per_step, identity)

    @property
    def n_pieces(self) -> int:
        """Documents of an epoch after cutting."""
        return int(self._piece_ends[-1])

    def _batch(self, items: list[int]) -> TokenBatch:
        return make_batch([self._piece(item) for item in items], self._microbatch_tokens, self._seq_tokens)

    def _place(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Documents (numbers in the shards) of the pieces, and the token at which each piece begins."""
        local = np.searchsorted(self._piece_ends, pieces, side="right")
        first_piece = np.where(local > 0, self._piece_ends[local - 1], 0)
        return local + self._first_document, (pieces - first_piece) * self._seq_tokens

    def _lengths(self, items: np.ndarray) -> np.ndarray:
        documents, begins = self._place(items)
        lengths = self._shards.offsets[documents + 1] - self._shards.offsets[documents]
        return np.minimum(lengths - begins, self._seq_tokens)

    def _piece(self, piece: int) -> TokenDocument:
        documents, begins = self._place(np.array([piece]))
        index, begin = int(documents[0]), int(begins[0])
        origin, n_tokens = self._shards.origin(index), len(self._shards.document(index))
        token_ids = self._shards.document(index, begin, self._seq_tokens)
        if len(token_ids) < n_tokens:
            origin = piece_origin(origin, begin, begin + len(token_ids))
        return TokenDocument(token_ids, origin, self._shards.mask(index, begin, self._seq_tokens))


def split_range(n_documents: int, split: Split, valid_fraction: float) -> tuple[int, int]:
    """First document and number of documents of a split. Raises UserError for an empty one."""
    if not 0 <= valid_fraction < 1:
        raise UserError(f"data.valid_fraction: {valid_fraction} is not supported; allowed: 0 <= fraction < 1")
    n_valid = int(n_documents * valid_fraction)
    first, count = {"train": (0, n_documents - n_valid), "valid": (n_documents - n_valid, n_valid)}[split]
    if count == 0:
        raise UserError(
            f"the split {split!r} is empty: {n_documents} documents with data.valid_fraction={valid_fraction}; "
            "allowed: a fraction that leaves at least one document"
        )
    return first, count


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
