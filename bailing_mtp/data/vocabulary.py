"""The tokenizer of a run without one: trained once on the run's own documents, then reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers

from bailing_mtp.data.cache import build_once
from bailing_mtp.data.sources import BadLines, Source
from bailing_mtp.data.tokenizer import EOS_TOKEN, PAD_TOKEN, Tokenizer, load_tokenizer, train_tokenizer
from bailing_mtp.errors import UserError

# Enough text for any small vocabulary; more only takes time and memory.
_TRAINING_CHARS = 100_000_000


def open_trained_tokenizer(
    source: Source,
    vocab_size: int,
    cache_dir: str | Path,
    *,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids, trained on the first 100 million characters of `source`.

    Kept in `cache_dir`; ranks work together as in `build_once`.
    Raises UserError for a `vocab_size` that is too small or a source without documents.
    """
    special_tokens = (EOS_TOKEN, PAD_TOKEN)
    parts = [source.identity(), vocab_size, special_tokens, tokenizers.__version__, _TRAINING_CHARS]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]

    def fill(work_dir: Path) -> None:
        train_tokenizer(_training_texts(source), vocab_size, special_tokens).save(work_dir)

    directory = Path(cache_dir) / f"tokenizer-{key}"
    return load_tokenizer(build_once(directory, fill, is_builder=is_builder, barrier=barrier))


def _training_texts(source: Source) -> Iterator[str]:
    n_chars = 0
    for text, _ in source.documents(BadLines(source.policy)):
        yield text
        n_chars += len(text)
        if n_chars >= _TRAINING_CHARS:
            return
    if n_chars == 0:
        raise UserError(f"data.path: {source.path} holds no document to train a tokenizer on")
