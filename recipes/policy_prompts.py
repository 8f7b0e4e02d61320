"""The prompts of grpo: those that are trained, and those that are held out."""

import json
from pathlib import Path
from typing import NamedTuple

from bailing_mtp.config import GrpoConfig, UserError
from bailing_mtp.data.prompts import PromptLoader
from bailing_mtp.data.records import open_records
from bailing_mtp.data.sources import Split
from bailing_mtp.data.tokenizer import Tokenizer

from .dialogues import open_tokens
from .prompts import sampling_params
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
        return PromptLoader(records, chat, params, samples, most_tokens, config.seed, apart_from)

    train, valid = load(data.path, sampling.samples_per_prompt, "train"), None
    if data.valid_path is not None:
        try:
            valid = load(data.valid_path, config.train.eval_samples, "valid", train)
        except (UserError, FileNotFoundError) as error:
            raise UserError(str(error).replace("data.path: ", "data.valid_path: ")) from None
    return Prompts(tokenizer, train, valid)


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
