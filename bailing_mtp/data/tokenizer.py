"""Byte-level BPE tokenizers: train one, read a `tokenizer.json`, encode and decode.

A vocabulary trained on a small text may hold fewer entries than were asked for. The model's
`vocab_size` stays what was asked; every id stays below it (`Tokenizer.require_fits`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from bailing_mtp.errors import UserError

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
_BYTE_VALUES = 256


class Tokenizer:
    """Text <-> ids, with the ids that end and pad documents."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: Sequence[int],
        pad_id: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`eos_ids`: the id appended to documents, then further ids that end a text.

        `pad_id` defaults to the first of them; `settings` is the tokenizer_config.json to keep on save.
        """
        if not eos_ids:
            raise ValueError("a tokenizer needs at least one end-of-text id")
        self._backend = backend
        self._settings = dict(settings or {})
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.pad_id = self.eos_ids[0] if pad_id is None else pad_id
        self.size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        for token_id in (*self.eos_ids, self.pad_id):
            if token_id < 0 or backend.id_to_token(token_id) is None:
                raise UserError(
                    f"end or pad id {token_id} is no token of this tokenizer; allowed: 0 to {self.size - 1}"
                )

    @property
    def eos_id(self) -> int:
        """The id that is appended to every document."""
        return self.eos_ids[0]

    @cached_property
    def digest(self) -> str:
        """sha256 of the tokenizer's JSON: equal digests encode alike."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def require_fits(self, vocab_size: int) -> None:
        """Raise UserError if an id would lie outside a model's `vocab_size`."""
        if self.size > vocab_size:
            raise UserError(
                f"the tokenizer has ids up to {self.size - 1}, but the model's vocab_size is {vocab_size}; "
                f"allowed: a vocab_size >= {self.size}"
            )

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of one text; nothing is added around it. See `encode_batch`."""
        return self.encode_batch([text], parse_special)[0]

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[list[int]]:
        """Ids of several texts, encoded in parallel.

        With `parse_special` false, a special token spelled out in a text is plain characters, so that no
        document can end itself; chat templates, which write special tokens on purpose, set it true.
        """
        self._backend.encode_special_tokens = not parse_special
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; ids without a token (a model vocabulary may be larger) give no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        """Id of one token by its exact spelling, None if there is none."""
        return self._backend.token_to_id(token)

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` (eos and pad by name, other settings kept)."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._settings,
            "eos_token": self._backend.id_to_token(self.eos_id),
            "pad_token": self._backend.id_to_token(self.pad_id),
        }
        settings_json = json.dumps(settings, indent=2, ensure_ascii=False)
        (target / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        (target / "tokenizer_config.json").write_text(settings_json, encoding="utf-8")


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = (EOS_TOKEN, PAD_TOKEN),
) -> Tokenizer:
    """Train a byte-level BPE; digits are tokens of their own, so that numbers have one spelling.

    `special_tokens` get the ids 0, 1, ...; the first ends documents, the second (if any) pads.
    The result has at most `vocab_size` ids, and fewer when the text offers too few merges.
    Raises UserError for a `vocab_size` below 256 bytes + special tokens.
    """
    smallest = _BYTE_VALUES + len(special_tokens)
    if not special_tokens or len(set(special_tokens)) != len(special_tokens):
        raise ValueError(f"special_tokens {tuple(special_tokens)} must be distinct, the first ends documents")
    if vocab_size < smallest:
        raise UserError(f"vocab_size: {vocab_size}; allowed: >= {smallest} (256 bytes + special tokens)")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    ids = [backend.token_to_id(token) for token in special_tokens]
    return Tokenizer(backend, eos_ids=ids[:1], pad_id=ids[1] if len(ids) > 1 else None)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a `tokenizer.json`, or the directory that holds one.

    The end and pad tokens come from `tokenizer_config.json` beside it, else from `config.json`
    (whose `eos_token_id` may be a list; its further ids also end a text).
    Raises FileNotFoundError, or UserError naming the file that is wrong.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}; allowed: a tokenizer.json, or a directory with one")
    if "model" not in _read_object(file):
        raise UserError(f"{file}: has no 'model'; allowed: a tokenizer.json of the tokenizers library")
    backend = tokenizers.Tokenizer.from_file(str(file))
    settings_file, config_file = file.with_name("tokenizer_config.json"), file.with_name("config.json")
    settings = _read_object(settings_file) if settings_file.is_file() else {}
    config = _read_object(config_file) if config_file.is_file() else {}
    named_eos = _named_ids(backend, settings, "eos_token", settings_file)
    named_pad = _named_ids(backend, settings, "pad_token", settings_file)
    eos_ids = named_eos + _config_ids(config, "eos_token_id", config_file)
    pad_ids = named_pad + _config_ids(config, "pad_token_id", config_file)
    if not eos_ids:
        raise UserError(
            f"{file}: no end-of-text token; allowed: eos_token in {settings_file}, "
            f"or eos_token_id in {config_file}"
        )
    return Tokenizer(backend, eos_ids, pad_ids[0] if pad_ids else None, settings)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from error
    if isinstance(value, dict):
        return value
    raise UserError(f"{file}: holds a {type(value).__name__}; allowed: a JSON object")


def _named_ids(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], key: str, file: Path) -> list[int]:
    token = settings.get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return []
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise UserError(f"{file}: {key}: {token!r} is no token of the tokenizer beside it")
    return [token_id]


def _config_ids(config: Mapping[str, Any], key: str, file: Path) -> list[int]:
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise UserError(f"{file}: {key}: {value!r}; allowed: an id or a list of ids")
    return ids
