"""What the scheduler moves around: rows (one response each), groups (one prompt each), and the plan of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RowState = Literal["waiting", "filling", "running", "done"]


@dataclass(eq=False)
class Sequence:
    """Something that holds a slot and blocks and is prefilled, in one piece or in chunks."""

    order: int
    """Place in the order of submission; the older has the lower one."""
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    filled: int = 0
    """Tokens in the caches while it is prefilled."""

    @property
    def key(self) -> tuple[int, int]:
        """Age: the smaller is older."""
        return (self.order, 0)

    @property
    def fill_tokens(self) -> int:
        """Tokens that a prefill puts into the caches."""
        return 0


@dataclass(eq=False)
class Row(Sequence):
    """One response: its prompt, its tokens so far, and what it holds."""

    sample_index: int = 0
    prompt_ids: tuple[int, ...] = ()
    max_new_tokens: int = 1
    response: list[int] = field(default_factory=list)
    """Tokens so far; the last one is pending: sampled, in no cache."""
    state: RowState = "waiting"
    unread_tokens: int = 0
    """Tokens that steps under way may commit, whose results the host has not read."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.order, self.sample_index)

    @property
    def fill_tokens(self) -> int:
        return len(self.prompt_ids) + max(0, len(self.response) - 1)

    @property
    def limit_tokens(self) -> int:
        """Positions that the response can reach; later ones need no block."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(eq=False)
class Group(Sequence):
    """Several responses to one prompt: it is prefilled once, in a template slot, and forked."""

    rows: list[Row] = field(default_factory=list)
    unforked: list[Row] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return (self.order, self.rows[-1].sample_index + 1)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.rows[0].prompt_ids

    @property
    def fill_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def is_ready(self) -> bool:
        """Prefilled, with responses still to fork."""
        return self.slot is not None and self.filled == self.fill_tokens


@dataclass(frozen=True)
class Open:
    """A slot begins an empty sequence."""

    slot: int
    row: Row | None
    """The response that owns the slot, None for a template."""


@dataclass(frozen=True)
class Assign:
    """Entries first, first + 1, ... of a slot's block table."""

    slot: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Fork:
    """A response continues a template's sequence in its own slot, with these blocks as its whole table."""

    row: Row
    group: Group
    source_slot: int
    slot: int
    blocks: tuple[int, ...]
    copied: tuple[int, int] | None
    """(from, to) of the block that position P - 1 lies in, or None when the template's own is taken over."""


Event = Open | Assign | Fork


@dataclass(frozen=True)
class Chunk:
    """Part of a prefill: tokens start .. start + length - 1 of a sequence."""

    sequence: Row | Group
    slot: int
    start: int
    length: int

    @property
    def completes(self) -> bool:
        return self.start + self.length == self.sequence.fill_tokens


@dataclass(frozen=True)
class Plan:
    """One iteration: events, prefill, more events, first tokens, one decode step."""

    before: tuple[Event, ...]
    """To be applied in order before the prefill."""
    chunks: tuple[Chunk, ...]
    after: tuple[Event, ...]
    """To be applied in order after it."""
    starters: tuple[tuple[Row, Group | None], ...]
    """Rows whose prompt is complete with this iteration, with the group that they were forked from."""
    decode: tuple[Row, ...]
    """Rows that were running before; the starters that do not end at once join them."""

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.starters or self.decode)
