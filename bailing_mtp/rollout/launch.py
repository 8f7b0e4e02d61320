"""Decode steps as launches of fixed shape: what changes from step to step stands in tensors that stay where they are.

A step reads its rows' slots from here, runs draft, verify, accept, refresh, stop and cap logic, commits,
and leaves its output here, packed. Eager or as a replayed graph it is one function.

Shapes: n rows of a step, W words of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from bailing_mtp.rollout.distribution import Group
from bailing_mtp.rollout.draft import Drafter
from bailing_mtp.rollout.graphs import StepGraphs, StepShape
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.results import packed_words
from bailing_mtp.rollout.routes import RouteFormat
from bailing_mtp.rollout.rows import StepRows
from bailing_mtp.rollout.step import decode_step
from bailing_mtp.rollout.transfer import Pending, to_device


class DecodeSteps:
    """Lives as long as the memory whose addresses its graphs hold. `bind` before each rollout."""

    def __init__(
        self, memory: RolloutMemory, max_rows: int, graphs: StepGraphs | None, routes: RouteFormat | None = None
    ) -> None:
        """max_rows: the largest number of padded rows. graphs: None = eager. routes: how the programs to be bound
        record them, None = not at all."""
        self.memory, self.graphs, self._routes = memory, graphs, routes
        self._slots = torch.full((max_rows,), memory.scratch_slot, device=memory.device)
        words = max_rows * packed_words(memory.plan.records, routes)
        self._packed = torch.zeros(words, dtype=torch.int32, device=memory.device)
        self._named: list[int] = []

    def bind(self, program: Program, drafter: Drafter, group: Group) -> None:
        """The weights of the next rollout."""
        assert program.route_format == self._routes, f"{program.route_format}, room for {self._routes}"
        self._program, self._drafter, self._group = program, drafter, group

    def launch(self, slots: Sequence[int], shape: StepShape) -> Pending:
        """Queue one step of the rows in `slots`; the rest of the shape's rows are padding."""
        if self.graphs is None:
            self._name(slots, shape.rows)
            self._run(shape)
        else:
            if shape not in self.graphs:
                # On padding alone a step changes no sequence.
                self._name((), shape.rows)
                self.graphs.capture(shape, partial(self._run, shape))
            self._name(slots, shape.rows)
            self.graphs.replay(shape)
        return Pending(self._packed[: shape.rows * packed_words(shape.drafts + 1, self._routes)])

    def _name(self, slots: Sequence[int], rows: int) -> None:
        named = [*slots, *[self.memory.scratch_slot] * (rows - len(slots))]
        if named != self._named:
            self._slots[:rows].copy_(to_device(named, self.memory.device, torch.int64), non_blocking=True)
            self._named = named

    @torch.no_grad()
    def _run(self, shape: StepShape) -> None:
        n, k, rules = shape
        rows = StepRows.read(self._program.kernels, self.memory, self._slots[:n], rules, self._group)
        packed_nW = self._packed[: n * packed_words(k + 1, self._routes)].view(n, -1)
        decode_step(self._program, self.memory, self._drafter, rows, k, packed_nW)
