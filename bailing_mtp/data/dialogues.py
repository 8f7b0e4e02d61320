"""Token shards of conversations and of preference pairs, and the loader that keeps pairs together.

A document longer than `data.seq_tokens` is cut at its end or left out, as `data.too_long` says; one that then has
no trained token is left out. Pair i of preference shards is documents 2i (chosen) and 2i+1 (rejected).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bailing_mtp.contracts.pairs import PairBatch
from bailing_mtp.data.chat import ChatFormat
from bailing_mtp.data.loader import StepLoader, split_range
from bailing_mtp.data.packing import TokenDocument, check_pack_sizes, make_batch
from bailing_mtp.data.records import BadRecord, Conversation, RecordSource, conversation_of, preference_of
from bailing_mtp.data.shards import TokenShards, open_masked_shards
from bailing_mtp.data.sources import BadLines, Split
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.errors import UserError
from bailing_mtp.log import ProgressLine

TooLong = Literal["cut", "skip"]
_FORMAT_VERSION = 1
CUT = "cut to data.seq_tokens"
LEFT_OUT = "left out, too long for data.seq_tokens"


@dataclass(frozen=True)
class DialogueOptions:
    """How records become documents."""

    tokenizer: Tokenizer
    chat: ChatFormat
    seq_tokens: int
    too_long: TooLong = "cut"


def open_conversation_shards(
    source: RecordSource,
    options: DialogueOptions,
    cache_dir: str | Path,
    *,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
    progress: ProgressLine | None = None,
) -> TokenShards:
    """Shards of {"messages"} or {"prompt", "response"} records, one document each, trained on responses.

    Ranks and errors as in `open_shards`.
    """
    make = functools.partial(_conversations, source, options)
    key = _key("conversations", source, options)
    return open_masked_shards(
        source, key, make, cache_dir, is_builder=is_builder, barrier=barrier, progress=progress
    )


def open_pair_shards(
    source: RecordSource,
    options: DialogueOptions,
    cache_dir: str | Path,
    *,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
    progress: ProgressLine | None = None,
) -> TokenShards:
    """Shards of {"prompt", "chosen", "rejected"} records, two documents each. Ranks and errors as in `open_shards`."""
    make = functools.partial(_pairs, source, options)
    key = _key("pairs", source, options)
    return open_masked_shards(
        source, key, make, cache_dir, is_builder=is_builder, barrier=barrier, progress=progress
    )


def _key(kind: str, source: RecordSource, options: DialogueOptions) -> str:
    tokenizer = options.tokenizer
    parts = [_FORMAT_VERSION, kind, source.identity(), tokenizer.digest, tokenizer.eos_id, options.chat.digest]
    parts += [options.seq_tokens, options.too_long]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _conversations(
    source: RecordSource, options: DialogueOptions, bad_lines: BadLines, notes: Counter[str]
) -> Iterator[TokenDocument]:
    for record, origin in source.records(bad_lines):
        try:
            document = _document(conversation_of(record), origin, options)
        except BadRecord as error:
            bad_lines.report(origin, str(error))
            continue
        yield from _fitted([document], options, notes)


def _pairs(
    source: RecordSource, options: DialogueOptions, bad_lines: BadLines, notes: Counter[str]
) -> Iterator[TokenDocument]:
    for record, origin in source.records(bad_lines):
        try:
            rows = preference_of(record)
            named = zip(("chosen", "rejected"), rows, strict=True)
            documents = [_document(row, f"{origin}#{name}", options) for name, row in named]
        except BadRecord as error:
            bad_lines.report(origin, str(error))
            continue
        yield from _fitted(documents, options, notes)


def _document(conversation: Conversation, origin: str, options: DialogueOptions) -> TokenDocument:
    token_ids, loss_mask = options.chat.encode(conversation)
    if not any(loss_mask[1:]):
        raise BadRecord("its responses have no token that anything predicts")
    return TokenDocument(token_ids, origin, loss_mask)


def _fitted(documents: list[TokenDocument], options: DialogueOptions, notes: Counter[str]) -> list[TokenDocument]:
    """The documents of one record, cut to the limit, or none of them; counts records."""
    limit = options.seq_tokens
    if all(len(document.token_ids) <= limit for document in documents):
        return documents
    cut = [TokenDocument(d.token_ids[:limit], d.origin, d.loss_mask[:limit]) for d in documents]
    if options.too_long == "skip" or not all(any(document.loss_mask[1:]) for document in cut):
        notes[LEFT_OUT] += 1
        return []
    notes[CUT] += 1
    return cut


class PairLoader(StepLoader):
    """Microbatches of whole preference pairs for one data-parallel rank; promises as in `data.loader`."""

    def __init__(
        self,
        shards: TokenShards,
        reference_logprobs_N: np.ndarray,
        reference_key: str,
        microbatch_tokens: int,
        seq_tokens: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        microbatches_per_step: int = 1,
        seed: int = 0,
        split: Split = "train",
        valid_fraction: float = 0.01,
    ) -> None:
        """`reference_logprobs_N`: of the trained tokens of each document of the shards, summed; `reference_key`
        tells them from those of other weights.

        Raises UserError for sizes that do not divide or a split without pairs.
        """
        check_pack_sizes(microbatch_tokens, seq_tokens)
        if 2 * seq_tokens > microbatch_tokens:
            raise UserError(
                f"train.microbatch_tokens: {microbatch_tokens} cannot hold a pair of rows of "
                f"data.seq_tokens={seq_tokens}; use at least {2 * seq_tokens}"
            )
        assert len(reference_logprobs_N) == shards.n_documents, "one reference value per document"
        self._shards, self._reference_N, self._seq_tokens = shards, reference_logprobs_N, seq_tokens
        self._first_pair, n_pairs = split_range(shards.n_documents // 2, split, valid_fraction)
        ends = 2 * np.array([self._first_pair, self._first_pair + n_pairs])
        first_token, last_token = shards.offsets[ends]
        identity: dict[str, Any] = {
            "seed": seed,
            "pairs": shards.content_digest,
            "reference": reference_key,
            "split": split,
            "valid_fraction": valid_fraction,
            "seq_tokens": seq_tokens,
        }
        sizes = (n_pairs, int(last_token - first_token), microbatch_tokens)
        super().__init__(*sizes, dp_rank, dp_size, microbatches_per_step, identity)

    def _lengths(self, items: np.ndarray) -> np.ndarray:
        first = 2 * (items + self._first_pair)
        return self._shards.offsets[first + 2] - self._shards.offsets[first]

    def _batch(self, items: list[int]) -> PairBatch:
        rows = [row for item in items for row in (2 * (item + self._first_pair), 2 * (item + self._first_pair) + 1)]
        documents = documents_of(self._shards, rows)
        batch = make_batch(documents, self._microbatch_tokens, self._seq_tokens)
        return PairBatch.of(batch, torch.from_numpy(self._reference_N[rows].reshape(-1, 2)))


def documents_of(shards: TokenShards, indices: list[int]) -> list[TokenDocument]:
    """Whole documents of shards, with their masks."""
    return [TokenDocument(shards.document(i), shards.origin(i), shards.mask(i)) for i in indices]
