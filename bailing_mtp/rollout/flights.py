"""Launched work whose results the host has not read: the newest iteration stays in the air while it is planned past."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bailing_mtp.rollout.graphs import StepShape
from bailing_mtp.rollout.results import RowResult, unpack
from bailing_mtp.rollout.routes import RouteFormat
from bailing_mtp.rollout.sequences import Row
from bailing_mtp.rollout.transfer import Pending


class Landed(NamedTuple):
    """One launch and its results. Rows may have ended since."""

    rows: tuple[Row, ...]
    shape: StepShape | None
    """None: first tokens."""
    results: list[RowResult]
    seconds: float | None
    """From the end of the launch before; None where other work lay between."""


class _Flight(NamedTuple):
    rows: tuple[Row, ...]
    shape: StepShape | None
    pending: Pending
    before: Pending | None
    """The launch that this one followed at once."""

    @property
    def step_tokens(self) -> int:
        """Most that a row's sequence grows by: a first token is pending, it is in no cache."""
        return 0 if self.shape is None else self.shape.drafts + 1


class Flights:
    """Launches in their order; counts what they may add into their rows' `unread_tokens`."""

    def __init__(self, routes: RouteFormat | None = None) -> None:
        """routes: how decode steps record them."""
        self._routes = routes
        self._flights: deque[_Flight] = deque()
        self._latest: Pending | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, rows: Sequence[Row], shape: StepShape | None, pending: Pending | None) -> None:
        """A launch; one without rows has no results that anybody wants."""
        if not rows:
            if pending is not None:
                self.interrupt()
            return
        assert pending is not None
        flight = _Flight(tuple(rows), shape, pending, self._latest)
        self._latest = pending
        for row in rows:
            row.unread_tokens += flight.step_tokens
        self._flights.append(flight)

    def interrupt(self) -> None:
        """Other work is queued, or the device ran dry: the next launch does not follow the last one."""
        self._latest = None

    def land(self, count: int) -> Iterator[Landed]:
        """Wait for the `count` oldest and give each with its results."""
        for _ in range(count):
            flight = self._flights.popleft()
            for row in flight.rows:
                row.unread_tokens -= flight.step_tokens
            columns, routes = (1, None) if flight.shape is None else (flight.step_tokens, self._routes)
            results = unpack(flight.pending.wait(), columns, len(flight.rows), routes)
            seconds = None if flight.before is None else flight.pending.seconds_since(flight.before)
            yield Landed(flight.rows, flight.shape, results, seconds)
