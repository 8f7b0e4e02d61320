"""From a JSONL file of prompts to requests: texts and messages become ids, a line's own sampling is merged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bailing_mtp.config import ConfigError, GenerateConfig, SamplingConfig, build_config
from bailing_mtp.contracts.samples import MAX_SEED, Prompt, SamplingParams
from bailing_mtp.data.chat import ChatFormat, open_format
from bailing_mtp.data.records import BadRecord, prompt_of, text_of
from bailing_mtp.data.sources import BadLines, jsonl_records
from bailing_mtp.data.tokenizer import Tokenizer, load_tokenizer
from bailing_mtp.errors import UserError
from bailing_mtp.rollout.requests import Limits, check_prompt

from .sources import Source

_SAMPLING = {field.name for field in fields(SamplingParams)}
_FORMS = ("prompt", "messages", "prompt_ids")


def open_tokenizer(config: GenerateConfig, source: Source) -> Tokenizer | None:
    """That of the key `tokenizer`, else of the checkpoint, else none."""
    path = tokenizer_path(config, source)
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    tokenizer.require_fits(source.arch.vocab_size)
    return tokenizer


def tokenizer_path(config: GenerateConfig, source: Source) -> Path | None:
    if config.tokenizer is not None:
        return Path(config.tokenizer)
    beside = source.directory
    return beside if beside is not None and (beside / "tokenizer.json").is_file() else None


@dataclass(frozen=True)
class PromptReader:
    """Turns lines into prompts. `chat` opens the chat format when the first messages ask for it."""

    sampling: SamplingConfig
    seed: int
    tokenizer: Tokenizer | None
    chat: Callable[[], ChatFormat]
    vocab_size: int
    max_positions: int
    """Of the model: most tokens of prompt and response."""
    context_tokens: int | None = None
    """rollout.context_tokens."""

    def read(self, path: Path) -> list[Prompt]:
        """Every line of a file, its place among them being its index. UserError naming file and line."""
        prompts: list[Prompt] = []
        for record, origin in jsonl_records(path, BadLines("fail", can_skip=False)):
            try:
                prompt = self._prompt(record, len(prompts))
            except ConfigError as error:
                lines = [f"{origin}: sampling.{problem}" for problem in error.problems]
                raise UserError("\n".join(lines)) from None
            except (BadRecord, UserError, ValueError) as error:
                raise UserError(f"{origin}: {error}") from None
            self._check(prompt, origin)
            prompts.append(prompt)
        if not prompts:
            raise UserError(f"prompts: {path} holds no prompt; allowed: at least one line")
        return prompts

    def _check(self, prompt: Prompt, origin: str) -> None:
        """What the engine would refuse, before any weight is read."""
        tokens = len(prompt.prompt_ids) + prompt.sampling.max_new_tokens
        if self.context_tokens is None and tokens > self.max_positions:
            raise UserError(
                f"{origin}: {len(prompt.prompt_ids)} prompt tokens and sampling.max_new_tokens="
                f"{prompt.sampling.max_new_tokens} exceed the model's {self.max_positions} positions"
            )
        limits = Limits(
            context_tokens=self.context_tokens or self.max_positions,
            max_running=1,
            max_stops=self.vocab_size,
            max_suppressed=self.vocab_size,
        )
        check_prompt(prompt, self.tokenizer, self.vocab_size, limits, origin)

    def _prompt(self, record: Any, index: int) -> Prompt:
        given = [form for form in _FORMS if form in record] if isinstance(record, Mapping) else []
        if len(given) != 1:
            raise BadRecord(f"holds {' and '.join(given) or 'no prompt'}; allowed: one of {', '.join(_FORMS)}")
        sampling = self._sampling(record.get("sampling", {}))
        return Prompt(
            prompt_ids=tuple(self._ids(record, given[0])),
            index=index,
            sampling=sampling_params(sampling, self.seed),
            samples_per_prompt=sampling.samples_per_prompt,
            record=record,
        )

    def _ids(self, record: Mapping[str, Any], form: str) -> list[int]:
        value = record[form]
        if form == "prompt_ids":
            if not isinstance(value, list) or any(type(item) is not int for item in value):
                raise BadRecord('"prompt_ids" is no list of integers')
            return value
        if self.tokenizer is None:
            raise BadRecord(f'"{form}" needs a tokenizer: the checkpoint has none, and tokenizer is null')
        if form == "messages":
            return self.chat().encode_prompt(prompt_of(value, form))
        return self.tokenizer.encode(text_of(value, form))

    def _sampling(self, own: Any) -> SamplingConfig:
        if not isinstance(own, Mapping):
            raise BadRecord('"sampling" is no object')
        return build_config(SamplingConfig, {**self.sampling.model_dump(), **own}) if own else self.sampling


def sampling_params(sampling: SamplingConfig, seed: int) -> SamplingParams:
    """What a request carries; `seed` where sampling.seed is null. Raises UserError for a seed out of range."""
    values = {name: value for name, value in sampling.model_dump().items() if name in _SAMPLING}
    seed = seed if sampling.seed is None else sampling.seed
    if seed > MAX_SEED:
        raise UserError(f"sampling.seed: {seed}; allowed: 0 to {MAX_SEED}")
    return SamplingParams(**values | {"seed": seed})


def require_context(context_tokens: int | None, max_positions: int) -> None:
    """Refuse a rollout.context_tokens that the model has no positions for; ConfigError."""
    if (context_tokens or 0) > max_positions:
        raise ConfigError(f"rollout.context_tokens: {context_tokens}; allowed: at most {max_positions}")


def read_prompts(config: GenerateConfig, source: Source, tokenizer: Tokenizer | None) -> list[Prompt]:
    """The prompts of a run. Raises UserError, before any weight is read."""
    arch, context_tokens = source.arch, config.rollout.context_tokens
    require_context(context_tokens, arch.max_positions)

    def chat() -> ChatFormat:
        path = tokenizer_path(config, source)
        assert tokenizer is not None and path is not None, "messages without a tokenizer were refused"
        try:
            return open_format(config.chat_template, tokenizer, path)
        except UserError as error:
            raise UserError(str(error).replace("data.chat_template", "chat_template")) from None

    reader = PromptReader(
        config.sampling, config.seed, tokenizer, chat, arch.vocab_size, arch.max_positions, context_tokens
    )
    return reader.read(Path(config.prompts))
