"""Prompts of policy training: an endless, resumable sequence, shuffled anew every epoch.

The sequence is a function of (prompts, seed) alone; every rank draws all of it. Shuffles draw from Philox keyed by
(seed, epoch).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.data.chat import ChatFormat
from bailing_mtp.data.records import BadRecord, RecordSource, prompt_of
from bailing_mtp.data.sources import BadLines
from bailing_mtp.errors import UserError

_STATE_VERSION = 1
_FORMS = ("prompt", "messages")


class _Item(NamedTuple):
    token_ids: tuple[int, ...]
    record: Mapping[str, Any]


class PromptLoader:
    """Prompts with their data lines as records. Reads all of them at once."""

    def __init__(
        self,
        source: RecordSource,
        chat: ChatFormat,
        sampling: SamplingParams,
        samples_per_prompt: int,
        most_tokens: int,
        seed: int = 0,
        apart_from: PromptLoader | None = None,
        check: Callable[[Mapping[str, Any]], None] = lambda record: None,
    ) -> None:
        """`most_tokens`: longer prompts are left out and counted, and so are those that `apart_from` holds too.
        `check` raises BadRecord for a record that will not do.
        Raises UserError for a bad line (by policy), or where no prompt is left.
        """
        self._sampling, self._samples_per_prompt = sampling, samples_per_prompt
        self._items, self.n_too_long, self.n_shared = [], 0, 0
        others = {item.token_ids for item in apart_from._items} if apart_from else set()
        bad_lines, digest = BadLines(source.policy), hashlib.sha256()
        for record, origin in source.records(bad_lines):
            try:
                prompt = _prompt_in(record)
                check(record)
                token_ids = tuple(chat.encode_prompt(prompt))
            except BadRecord as error:
                bad_lines.report(origin, str(error))
                continue
            if len(token_ids) > most_tokens:
                self.n_too_long += 1
                continue
            if token_ids in others:
                self.n_shared += 1
                continue
            self._items.append(_Item(token_ids, record))
            digest.update(json.dumps(token_ids).encode())
        self.n_skipped_lines = bad_lines.n_skipped
        if not self._items:
            shared = f", {self.n_shared} of the others are trained" if apart_from else ""
            raise UserError(
                f"data.path: {source.path} holds no prompt of at most {most_tokens} tokens "
                f"({self.n_too_long} are longer{shared}); allowed: at least one"
            )
        self._identity = {"version": _STATE_VERSION, "seed": seed, "prompts": digest.hexdigest()}
        self._epoch = self._offset = self._rollouts = 0
        self._order = self._shuffled(0)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def longest_tokens(self) -> int:
        """Length of the longest prompt."""
        return max(len(item.token_ids) for item in self._items)

    @property
    def rollouts(self) -> int:
        """Draws so far, which is the number of the next rollout: a part of the noise key."""
        return self._rollouts

    def draw(self, n: int, taken: Collection[int] = ()) -> list[Prompt]:
        """The next `n` prompts, with the indices 0, 1, ... that are not `taken` by prompts of earlier rollouts."""
        self._rollouts += 1
        free = (index for index in itertools.count() if index not in taken)
        return [self._next(index) for index in itertools.islice(free, n)]

    def prompt(self, number: int, index: int) -> Prompt:
        """Prompt `number` of all, as it is when drawn with this index."""
        item = self._items[number]
        return Prompt(
            prompt_ids=item.token_ids,
            index=index,
            sampling=self._sampling,
            samples_per_prompt=self._samples_per_prompt,
            record=item.record,
            number=number,
        )

    def all(self) -> list[Prompt]:
        """Every prompt once, in the order of the source; moves nothing."""
        return [self.prompt(number, number) for number in range(len(self._items))]

    def state_dict(self) -> dict[str, Any]:
        """Where the sequence stands, as JSON values; the same on every rank."""
        return {**self._identity, "epoch": self._epoch, "offset": self._offset, "rollouts": self._rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after the draw at which `state` was taken. UserError if it belongs to other prompts."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise UserError(
                    f"the saved position among the prompts cannot be continued: {key} was {state.get(key)!r}, now "
                    f"{value!r}; allowed: the same value, or a run that starts fresh"
                )
        self._epoch, self._offset = int(state["epoch"]), int(state["offset"])
        self._rollouts = int(state["rollouts"])
        self._order = self._shuffled(self._epoch)

    def _next(self, index: int) -> Prompt:
        if self._offset == len(self._items):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        self._offset += 1
        return self.prompt(int(self._order[self._offset - 1]), index)

    def _shuffled(self, epoch: int) -> np.ndarray:
        key = np.random.SeedSequence((self._identity["seed"], epoch))
        return np.random.Generator(np.random.Philox(key)).permutation(len(self._items))


def _prompt_in(record: Any) -> Any:
    given = [form for form in _FORMS if form in record] if isinstance(record, Mapping) else []
    if len(given) != 1:
        raise BadRecord(f"holds {' and '.join(given) or 'no prompt'}; allowed: one of {', '.join(_FORMS)}")
    return prompt_of(record[given[0]], given[0])
