"""From conversations to token ids and loss masks, by a chat template or in the plain form.

Only responses are trained. A conversation is tokenised in segments that meet where a response begins and where
it ends, so that a prompt has the ids that a rollout would feed, and a mask is exact to the token.

The plain form, for tokenizers without a template, must be asked for by name (`data.chat_template=plain`):
a prompt text and its response stand side by side as they are written; turns are `System: ...`, `User: ...` and
`Assistant: ...` lines; every response ends with the end-of-text token, and special tokens that a text spells out
are plain characters.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox

from bailing_mtp.data.records import BadRecord, Conversation, Message, Prompt
from bailing_mtp.data.tokenizer import Tokenizer
from bailing_mtp.errors import UserError

PLAIN = "plain"
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Encoded(NamedTuple):
    """Token ids and, for each, whether it is trained."""

    token_ids: list[int]
    loss_mask: list[bool]


class ChatFormat(Protocol):
    """How turns become tokens."""

    @property
    def digest(self) -> str:
        """Equal digests format alike."""
        ...

    def encode(self, conversation: Conversation) -> Encoded:
        """The whole conversation. Raises BadRecord where this format cannot express it."""
        ...

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """A prompt that waits for its response, with the same ids as inside a conversation. Raises BadRecord."""
        ...


@dataclass(frozen=True)
class PlainFormat:
    """The plain form of the module's text."""

    tokenizer: Tokenizer

    @property
    def digest(self) -> str:
        return "plain-1"

    def encode(self, conversation: Conversation) -> Encoded:
        ids, mask = [], []
        for text, is_response in self._segments(conversation):
            piece = self._piece(text, is_response)
            ids += piece
            mask += [is_response] * len(piece)
        return Encoded(ids, mask)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._piece(prompt, False)
        # A stand-in for the response that is waited for; its text is left out.
        *segments, _ = self._segments(Conversation(prompt, "."))
        return [token_id for text, is_response in segments for token_id in self._piece(text, is_response)]

    def _piece(self, text: str, is_response: bool) -> list[int]:
        return self.tokenizer.encode(text) + ([self.tokenizer.eos_id] if is_response else [])

    def _segments(self, conversation: Conversation) -> Iterator[tuple[str, bool]]:
        """Texts in order, and which of them are responses."""
        prompt, response = conversation
        if isinstance(prompt, str):
            yield prompt, False
            yield response, True
            return
        waiting: list[Message] = []
        for message in conversation.messages:
            if message.role != "assistant":
                waiting.append(message)
                continue
            yield _labelled(waiting) + "Assistant:", False
            yield " " + message.content, True
            waiting.clear()


def _labelled(messages: Sequence[Message]) -> str:
    return "".join(f"{message.role.capitalize()}: {message.content}\n" for message in messages)


@dataclass(frozen=True)
class TemplateFormat:
    """A Jinja chat template, rendered in a sandbox, under the names that Hugging Face templates use."""

    tokenizer: Tokenizer
    template: str
    source: str
    """File of the template, for messages."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """bos_token, eos_token, ... of tokenizer_config.json."""

    def __post_init__(self) -> None:
        try:
            _ = self._compiled
        except jinja2.TemplateError as error:
            raise UserError(f"{self.source}: is no Jinja template ({error})") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.template)

    @property
    def digest(self) -> str:
        parts = json.dumps(["template-1", self.template, sorted(self.variables.items())])
        return hashlib.sha256(parts.encode()).hexdigest()

    def encode(self, conversation: Conversation) -> Encoded:
        messages = conversation.messages
        ids, mask, done = [], [], ""
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before, after = self._render(messages[:index], True), self._render(messages[: index + 1], False)
            self._require_prefix(done, before, index)
            self._require_prefix(before, after, index)
            response = self._ended(after[len(before) :])
            for text, is_response in ((before[len(done) :], False), (response, True)):
                piece = self.tokenizer.encode(text, parse_special=True)
                ids += piece
                mask += [is_response] * len(piece)
            done = before + response
        return Encoded(ids, mask)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        return self.tokenizer.encode(self._render(messages, True), parse_special=True)

    def _ended(self, response: str) -> str:
        """Without the white space that a template puts after the end of a turn: a rollout has stopped by then."""
        stripped = response.rstrip()
        ends = self.variables.get("eos_token")
        return stripped if ends and stripped.endswith(ends) else response

    def _render(self, messages: Sequence[Message], waits: bool) -> str:
        turns = [{"role": m.role, "content": m.content, **m.extra} for m in messages]
        try:
            return self._compiled.render(messages=turns, add_generation_prompt=waits, **self.variables)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRecord(f"the chat template of {self.source} refuses it ({error})") from error

    def _require_prefix(self, earlier: str, later: str, index: int) -> None:
        if not later.startswith(earlier):
            raise BadRecord(
                f"the chat template of {self.source} writes what comes before the end of turn {index} differently "
                "when more turns follow, so no rollout would have seen these prompts; split the conversation into "
                "lines that end with one assistant turn each"
            )


def open_format(choice: str | None, tokenizer: Tokenizer, tokenizer_path: Path) -> ChatFormat:
    """`choice` is data.chat_template: null = the template beside the tokenizer, a file, or `plain`.

    `tokenizer_path`: the tokenizer.json or its directory. Raises UserError where there is no template.
    """
    if choice == PLAIN:
        return PlainFormat(tokenizer)
    directory = tokenizer_path if tokenizer_path.is_dir() else tokenizer_path.parent
    settings = _settings(directory / "tokenizer_config.json")
    variables = {name: text for name in _SPECIALS if (text := _token_text(settings.get(name))) is not None}
    if choice is not None:
        file = Path(choice)
        if not file.is_file():
            raise UserError(f"data.chat_template: {choice} is no file; allowed: a Jinja file, {PLAIN}, or null")
        return TemplateFormat(tokenizer, file.read_text(encoding="utf-8"), str(file), variables)
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return TemplateFormat(tokenizer, beside.read_text(encoding="utf-8"), str(beside), variables)
    template = _default_template(settings.get("chat_template"))
    if template is None:
        raise UserError(
            f"data.chat_template: null, and {directory} has no chat_template (tokenizer_config.json or "
            f"chat_template.jinja); allowed: a Jinja file, or {PLAIN} (prompt and response as they are written)"
        )
    return TemplateFormat(tokenizer, template, str(directory / "tokenizer_config.json"), variables)


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from error
    return value if isinstance(value, dict) else {}


def _default_template(value: Any) -> str | None:
    """A template, or the one named `default` of a list of {name, template}."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
