"""Lines that are more than text: conversations, preference pairs, prompts with answers.

A JSONL file, a directory of them, or generated problems (`reasoning_gym:...`), whose records are the generator's
entries with a `prompt` added. Every record comes with its origin (`file.jsonl:12`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from bailing_mtp.data.sources import (
    BadLinePolicy,
    BadLines,
    FileSource,
    GeneratedSource,
    Split,
    encodable,
    jsonl_records,
    open_source,
    problem_prompt,
)
from bailing_mtp.errors import UserError

ROLES = ("system", "user", "assistant", "tool", "observation", "developer")


class BadRecord(ValueError):
    """Why a record cannot be used; whoever reads it adds where it came from."""


class RecordSource(Protocol):
    """JSON values in a fixed order, and an identity that changes when they do."""

    @property
    def path(self) -> str: ...

    @property
    def policy(self) -> BadLinePolicy: ...

    def identity(self) -> str: ...

    def records(self, bad_lines: BadLines) -> Iterator[tuple[Any, str]]: ...


@dataclass(frozen=True)
class JsonlSource:
    """The lines of a .jsonl file, or of all such files of a directory."""

    files: FileSource

    @property
    def path(self) -> str:
        return self.files.path

    @property
    def policy(self) -> BadLinePolicy:
        return self.files.policy

    def identity(self) -> str:
        return self.files.identity()

    def records(self, bad_lines: BadLines) -> Iterator[tuple[Any, str]]:
        found = [file for file in self.files.files() if file.suffix == ".jsonl"]
        if not found:
            raise UserError(f"data.path: {self.path} holds no .jsonl file; allowed: JSONL, one record a line")
        for file in found:
            yield from jsonl_records(file, bad_lines)


@dataclass(frozen=True)
class ProblemSource:
    """Generated problems: question, answer and metadata of the generator, and `prompt` and `response` texts."""

    problems: GeneratedSource

    @property
    def path(self) -> str:
        return self.problems.path

    @property
    def policy(self) -> BadLinePolicy:
        return self.problems.policy

    def identity(self) -> str:
        return self.problems.identity()

    def records(self, bad_lines: BadLines) -> Iterator[tuple[Any, str]]:
        for entry, origin in self.problems.entries():
            texts = {"prompt": problem_prompt(entry["question"]), "response": f" {str(entry['answer']).strip()}\n"}
            yield {**entry, **texts}, origin


def open_records(
    path: str, bad_lines: BadLinePolicy = "fail", seed: int = 0, split: Split = "train"
) -> RecordSource:
    """The records of `data.path`. `split`: which problems a generator gives, without meaning for files.

    Raises FileNotFoundError or UserError naming data.path.
    """
    source = open_source(path, bad_lines, seed=seed, split=split)
    return JsonlSource(source) if isinstance(source, FileSource) else ProblemSource(source)


@dataclass(frozen=True)
class Message:
    """One turn. `extra`: further keys of the data line, which a chat template may read."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | tuple[Message, ...]
"""What comes before a response: a text, or turns."""


class Conversation(NamedTuple):
    """A prompt and what follows it: a response text, or further turns of which the assistant's are trained."""

    prompt: Prompt
    response: str | None

    @property
    def messages(self) -> tuple[Message, ...]:
        """All turns; a prompt text is the user's, a response text the assistant's."""
        turns = (Message("user", self.prompt),) if isinstance(self.prompt, str) else self.prompt
        return turns if self.response is None else (*turns, Message("assistant", self.response))


class Preference(NamedTuple):
    """Two responses to one prompt."""

    chosen: Conversation
    rejected: Conversation


def conversation_of(record: Any) -> Conversation:
    """{"messages": [...]} with at least one assistant turn, or {"prompt", "response"}. Raises BadRecord."""
    keys = _keys(record)
    if "messages" in keys:
        messages = messages_of(record["messages"], "messages")
        if not any(message.role == "assistant" for message in messages):
            raise BadRecord('"messages" holds no assistant turn, so nothing would be trained')
        return Conversation(messages, None)
    if {"prompt", "response"} <= keys:
        return Conversation(prompt_of(record["prompt"], "prompt"), text_of(record["response"], "response"))
    raise BadRecord('allowed: {"messages": [{"role", "content"}, ...]} or {"prompt", "response"}')


def preference_of(record: Any) -> Preference:
    """{"prompt", "chosen", "rejected"}: the prompt a text or messages, the responses texts. Raises BadRecord."""
    if not {"prompt", "chosen", "rejected"} <= _keys(record):
        raise BadRecord('allowed: {"prompt", "chosen", "rejected"}')
    prompt = prompt_of(record["prompt"], "prompt")
    chosen, rejected = (_response_of(record[key], key) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadRecord('"chosen" and "rejected" are the same')
    return Preference(Conversation(prompt, chosen), Conversation(prompt, rejected))


def prompt_of(value: Any, key: str) -> Prompt:
    """A prompt text, or messages that do not end with the assistant. Raises BadRecord."""
    if not isinstance(value, list):
        return text_of(value, key)
    messages = messages_of(value, key)
    if messages[-1].role == "assistant":
        raise BadRecord(f'"{key}" ends with an assistant turn; allowed: turns that wait for the assistant')
    return messages


def messages_of(value: Any, key: str) -> tuple[Message, ...]:
    """Turns with a known role and a text. Raises BadRecord."""
    if not isinstance(value, list) or not value:
        raise BadRecord(f'"{key}" is no list of turns; allowed: [{{"role", "content"}}, ...]')
    return tuple(_message_of(item, f"{key}[{index}]") for index, item in enumerate(value))


def text_of(value: Any, key: str) -> str:
    """A text that is not blank. Raises BadRecord."""
    if not isinstance(value, str):
        raise BadRecord(f'"{key}" is a {type(value).__name__}; allowed: a string')
    if not value.strip():
        raise BadRecord(f'"{key}" is empty')
    if not encodable(value):
        raise BadRecord(f'"{key}" holds half of a surrogate pair, which is no character')
    return value


def _response_of(value: Any, key: str) -> str:
    """A text, or a list of one assistant turn."""
    if not isinstance(value, list):
        return text_of(value, key)
    messages = messages_of(value, key)
    if len(messages) != 1 or messages[0].role != "assistant":
        raise BadRecord(f'"{key}" is a list of {len(messages)} turns; allowed: a text, or one assistant turn')
    return messages[0].content


def _message_of(item: Any, key: str) -> Message:
    if not {"role", "content"} <= _keys(item, key):
        raise BadRecord(f'"{key}" lacks "role" or "content"')
    if item["role"] not in ROLES:
        raise BadRecord(f'"{key}.role" is {item["role"]!r}; allowed: {", ".join(ROLES)}')
    content = text_of(item["content"], f"{key}.content")
    return Message(item["role"], content, {k: v for k, v in item.items() if k not in ("role", "content")})


def _keys(value: Any, key: str | None = None) -> set[str]:
    if isinstance(value, dict):
        return set(value)
    where = "the line" if key is None else f'"{key}"'
    raise BadRecord(f"{where} holds a {type(value).__name__}; allowed: a JSON object")
