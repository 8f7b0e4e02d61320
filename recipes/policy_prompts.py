"""The prompts of grpo: those that are trained, and those that are held out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bailing_mtp.config import GrpoConfig, UserError
from bailing_mtp.data.prompts import PromptLoader
from bailing_mtp.data.records import BadRecord, open_records
from bailing_mtp.data.sources import Split
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.rl.rewards import RewardRefused, require_judgeable
from bailing_mtp.rollout.requests import Limits, check_prompt

from .dialogues import open_tokens
from .prompts import require_context, sampling_params
from .session import Source


class Prompts(NamedTuple):
    """Those that leave room for a response, read by every rank."""

    tokenizer: Tokenizer
    train: PromptLoader
    valid: PromptLoader | None
    """Of data.valid_path; None where it is null."""


def open_prompts(config: GrpoConfig, source: Source) -> Prompts:
    """The tokenizer and the prompts. Raises UserError naming data.path or data.valid_path."""
    data, sampling = config.data, config.sampling
    tokenizer, chat = open_tokens(data, source)
    params = sampling_params(sampling, config.seed)
    most_tokens = data.seq_tokens - sampling.max_new_tokens

    def load(path: str, samples: int, split: Split, apart_from: PromptLoader | None = None) -> PromptLoader:
        records = open_records(path, data.bad_lines, config.seed, split)
        return PromptLoader(records, chat, params, samples, most_tokens, config.seed, apart_from, judgeable)

    def judgeable(record: Mapping[str, Any]) -> None:
        try:
            require_judgeable(config.rl.reward, record)
        except RewardRefused as error:
            raise BadRecord(f"{error}, which rl.reward={config.rl.reward} compares with") from None

    train, valid = load(data.path, sampling.samples_per_prompt, "train"), None
    if data.valid_path is not None:
        try:
            valid = load(data.valid_path, config.train.eval_samples, "valid", train)
        except (UserError, FileNotFoundError) as error:
            raise UserError(str(error).replace("data.path: ", "data.valid_path: ")) from None
    _check_sampling(train, valid, tokenizer, source, config)
    return Prompts(tokenizer, train, valid)


def _check_sampling(
    train: PromptLoader, valid: PromptLoader | None, tokenizer: Tokenizer, source: Source, config: GrpoConfig
) -> None:
    """What the engine would refuse, before any weight is read; all prompts have the same settings."""
    arch, context_tokens = source.arch, config.rollout.context_tokens
    longest = max(loader.longest_tokens for loader in (train, valid) if loader is not None)
    tokens = longest + config.sampling.max_new_tokens
    if tokens > arch.max_positions:
        raise UserError(
            f"data.seq_tokens: the longest prompt, {longest} tokens, and sampling.max_new_tokens="
            f"{config.sampling.max_new_tokens} exceed the model's {arch.max_positions} positions"
        )
    require_context(context_tokens, arch.max_positions)
    if context_tokens is not None and tokens > context_tokens:
        raise UserError(
            f"rollout.context_tokens: {context_tokens} tokens do not hold the longest prompt, {longest} tokens, and "
            f"sampling.max_new_tokens={config.sampling.max_new_tokens}; allowed: at least {tokens}, or null"
        )
    limits = Limits(
        context_tokens=tokens, max_running=1, max_stops=arch.vocab_size, max_suppressed=arch.vocab_size
    )
    check_prompt(train.prompt(0, 0), tokenizer, arch.vocab_size, limits, "any prompt")


def write_prompts(prompts: PromptLoader, run_dir: Path, tokenizer: Tokenizer) -> None:
    """<run_dir>/data/held_out.jsonl: the held-out prompts as the generate verb reads them."""
    lines = [
        {
            "prompt_ids": list(prompt.prompt_ids),
            "text": tokenizer.decode(prompt.prompt_ids),
            "answer": (prompt.record or {}).get("answer"),
        }
        for prompt in prompts.all()
    ]
    file = run_dir / "data" / "held_out.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
