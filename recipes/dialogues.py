"""From the data section of sft, dpo and grpo to tokenizer and chat format, and to token shards, built once."""

import functools
import sys
from pathlib import Path

from bailing_mtp.config import DialogueDataConfig, DpoConfig, PromptDataConfig, SftConfig, UserError
from bailing_mtp.data.chat import ChatFormat, open_format
from bailing_mtp.data.dialogues import DialogueOptions, open_conversation_shards, open_pair_shards
from bailing_mtp.data.loader import PackedLoader
from bailing_mtp.data.records import open_records
from bailing_mtp.data.shards import TokenShards
from bailing_mtp.data.tokenizer import Tokenizer, load_tokenizer
from bailing_mtp.log import ProgressLine
from bailing_mtp.parallel.context import ParallelContext

from .documents import Splits
from .session import Source


def open_conversations(
    config: SftConfig, source: Source, context: ParallelContext, microbatches_per_step: int
) -> Splits:
    """Loaders of packed conversations. Rank 0 builds shards under <run_dir>/data; the others wait."""
    shards = _open_shards(config, source, context, is_pairs=False)
    loader = functools.partial(
        PackedLoader,
        shards,
        config.train.microbatch_tokens,
        config.data.seq_tokens,
        context.dp_rank,
        context.dp,
        microbatches_per_step,
        config.seed,
        valid_fraction=config.data.valid_fraction,
    )
    return Splits(loader("train"), loader("valid") if config.train.eval_every is not None else None)


def open_pairs(config: DpoConfig, source: Source, context: ParallelContext) -> TokenShards:
    """Shards of preference pairs. Rank 0 builds them under <run_dir>/data; the others wait."""
    return _open_shards(config, source, context, is_pairs=True)


def _open_shards(
    config: SftConfig | DpoConfig, source: Source, context: ParallelContext, is_pairs: bool
) -> TokenShards:
    data = config.data
    records = open_records(data.path, data.bad_lines, config.seed)
    options = _options(data, source)
    shards = (open_pair_shards if is_pairs else open_conversation_shards)(
        records,
        options,
        Path(config.run_dir) / "data",
        is_builder=context.is_writer,
        barrier=context.barrier,
        progress=ProgressLine(sys.stderr if context.is_writer else None),
    )
    if context.is_writer:
        n_items, what = (shards.n_documents // 2, "pairs") if is_pairs else (shards.n_documents, "conversations")
        notes = "".join(f", {n:,} {note}" for note, n in shards.notes.items())
        skipped = f", {shards.n_skipped_lines:,} bad lines skipped" if shards.n_skipped_lines else ""
        trained = int(shards.loss_mask.sum())
        print(
            f"data: {n_items:,} {what}, {shards.n_tokens:,} tokens, {trained:,} of them trained, "
            f"from {data.path}{notes}{skipped}",
            flush=True,
        )
    return shards


def open_tokens(data: DialogueDataConfig | PromptDataConfig, source: Source) -> tuple[Tokenizer, ChatFormat]:
    """The tokenizer that the data section or the checkpoint names, and the chat format beside it."""
    if data.tokenizer is not None:
        path = Path(data.tokenizer)
    elif source.directory is not None and (source.directory / "tokenizer.json").is_file():
        path = source.directory
    else:
        raise UserError(
            "data.tokenizer: null, and checkpoint.load has no tokenizer.json; allowed: a tokenizer.json, or a "
            "directory with one"
        )
    tokenizer = load_tokenizer(path)
    tokenizer.require_fits(source.arch.vocab_size)
    return tokenizer, open_format(data.chat_template, tokenizer, path)


def _options(data: DialogueDataConfig, source: Source) -> DialogueOptions:
    tokenizer, chat = open_tokens(data, source)
    return DialogueOptions(tokenizer, chat, data.seq_tokens, data.too_long)
