"""Launched work whose results the host has not read: the newest iteration stays in the air while it is planned past."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bailing_mtp.rollout.results import RowResult, unpack
from bailing_mtp.rollout.routes import RouteFormat
from bailing_mtp.rollout.sequences import Row
from bailing_mtp.rollout.transfer import Pending


class Landed(NamedTuple):
    """One launch and its results. Rows may have ended since."""

    rows: tuple[Row, ...]
    drafts: int | None
    """None: first tokens."""
    results: list[RowResult]


class _Flight(NamedTuple):
    rows: tuple[Row, ...]
    drafts: int | None
    pending: Pending

    @property
    def step_tokens(self) -> int:
        """Most that a row's sequence grows by: a first token is pending, it is in no cache."""
        return 0 if self.drafts is None else self.drafts + 1


class Flights:
    """Launches in their order; counts what they may add into their rows' `unread_tokens`."""

    def __init__(self, routes: RouteFormat | None = None) -> None:
        """routes: how decode steps record them."""
        self._routes = routes
        self._flights: deque[_Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, rows: Sequence[Row], drafts: int | None, pending: Pending | None) -> None:
        """A launch; one without rows has no results that anybody wants."""
        if not rows:
            return
        assert pending is not None
        flight = _Flight(tuple(rows), drafts, pending)
        for row in rows:
            row.unread_tokens += flight.step_tokens
        self._flights.append(flight)

    def land(self, count: int) -> Iterator[Landed]:
        """Wait for the `count` oldest and give each with its results."""
        for _ in range(count):
            flight = self._flights.popleft()
            for row in flight.rows:
                row.unread_tokens -= flight.step_tokens
            columns, routes = (1, None) if flight.drafts is None else (flight.drafts + 1, self._routes)
            results = unpack(flight.pending.wait(), columns, len(flight.rows), routes)
            yield Landed(flight.rows, flight.drafts, results)
