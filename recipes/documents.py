"""From the data section to loaders: tokenizer (read, or trained once), token shards (built once), packing."""

import functools
import itertools
import sys
from pathlib import Path
from typing import NamedTuple

from bailing_mtp.config import PretrainConfig
from bailing_mtp.data.loader import PackedLoader
from bailing_mtp.data.shards import open_shards
from bailing_mtp.data.sources import BadLines, open_source
from bailing_mtp.data.sources import Source as DocumentSource
from bailing_mtp.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from bailing_mtp.log import ProgressLine
from bailing_mtp.parallel.context import ParallelContext

from .session import Source

TOKENIZER_DOCUMENTS = 20_000
"""Documents that a new tokenizer is trained on, from the first."""


class Splits(NamedTuple):
    """The documents of a run, packed."""

    train: PackedLoader
    valid: PackedLoader | None
    """The held-out ones; None when the run evaluates nothing."""


def open_documents(
    config: PretrainConfig, source: Source, context: ParallelContext, microbatches_per_step: int
) -> Splits:
    """Rank 0 trains the tokenizer and builds shards under <run_dir>/data; the others wait."""
    data = config.data
    documents = open_source(data.path, data.bad_lines, seed=config.seed)
    tokenizer = _open_tokenizer(config, source, documents, context)
    tokenizer.require_fits(source.arch.vocab_size)
    shards = open_shards(
        documents,
        tokenizer,
        Path(config.run_dir) / "data",
        is_builder=context.is_writer,
        barrier=context.barrier,
        progress=ProgressLine(sys.stderr if context.is_writer else None),
    )
    if context.is_writer:
        print(
            f"data: {shards.n_documents:,} documents, {shards.n_tokens:,} tokens from {data.path}, "
            f"vocabulary {tokenizer.size}",
            flush=True,
        )
    loader = functools.partial(
        PackedLoader,
        shards,
        config.train.microbatch_tokens,
        data.seq_tokens,
        context.dp_rank,
        context.dp,
        microbatches_per_step,
        config.seed,
        valid_fraction=data.valid_fraction,
    )
    return Splits(loader("train"), loader("valid") if config.train.eval_every is not None else None)


def _open_tokenizer(
    config: PretrainConfig, source: Source, documents: DocumentSource, context: ParallelContext
) -> Tokenizer:
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    if source.directory is not None and (source.directory / "tokenizer.json").is_file():
        return load_tokenizer(source.directory)
    target = Path(config.run_dir) / "tokenizer"
    try:
        if context.is_writer and not (target / "tokenizer.json").is_file():
            print(f"tokenizer: training a byte-level BPE of {config.data.vocab_size} entries", flush=True)
            texts = (document.text for document in documents.documents(BadLines(config.data.bad_lines)))
            sample = itertools.islice(texts, TOKENIZER_DOCUMENTS)
            train_tokenizer(sample, config.data.vocab_size).save(target)
    finally:
        context.barrier()
    return load_tokenizer(target)
