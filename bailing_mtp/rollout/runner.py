"""Carries out the scheduler's plans on the device: events, prefills, first tokens, decode steps.

Everything is queued on one stream in the order of the calls, and nothing waits for it.

Shapes: T tokens of a prefill, m starting rows, n decoding rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bailing_mtp.rollout.blocks import blocks_for
from bailing_mtp.rollout.distribution import Group as ProcessGroup
from bailing_mtp.rollout.distribution import StepRules
from bailing_mtp.rollout.graphs import StepShape
from bailing_mtp.rollout.launch import DecodeSteps
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.prefill import PrefillPlan, Segment
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.results import packed_words
from bailing_mtp.rollout.routes import RouteLog
from bailing_mtp.rollout.rows import StepRows
from bailing_mtp.rollout.sequences import Assign, Chunk, Event, Fork, Group, Open, Row
from bailing_mtp.rollout.step import first_step
from bailing_mtp.rollout.transfer import Pending, all_to_device, to_device


@dataclass
class Runner:
    """The device side of one rollout. Holds the memory, and the last hidden state of every prefilled prompt."""

    program: Program
    memory: RolloutMemory
    steps: DecodeSteps
    group: ProcessGroup
    fixed_reach: bool = False
    """Every step reaches over whole block tables, as graphs do, instead of the blocks that its rows may hold."""
    routes: RouteLog = field(default_factory=RouteLog)
    """Of the tokens in the caches; stays empty where nothing is recorded."""
    _hidden: dict[Row | Group, Tensor] = field(default_factory=dict)

    def apply(self, events: Sequence[Event]) -> None:
        """Slots, block tables and forks, in order."""
        assigned: list[tuple[int, int, int]] = []
        for event in events:
            if isinstance(event, Assign):
                assigned += [(event.slot, event.first + i, block) for i, block in enumerate(event.blocks)]
                continue
            self._assign(assigned)
            assigned = []
            if isinstance(event, Open):
                self.memory.reset_slot(event.slot)
            elif isinstance(event, Fork):
                self._fork(event)
        self._assign(assigned)

    def _assign(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Entries (slot, index, block) of block tables, in one transfer."""
        if entries:
            slot_m, index_m, block_m = to_device(list(zip(*entries, strict=True)), self.memory.device, torch.int64)
            self.memory.slots.block_table_NM[slot_m, index_m] = block_m.to(torch.int32)

    def _fork(self, fork: Fork) -> None:
        device = self.memory.device
        self.memory.copy_slots(*to_device([[fork.source_slot], [fork.slot]], device))
        self._assign([(fork.slot, index, block) for index, block in enumerate(fork.blocks)])
        if fork.copied is not None:
            self.memory.copy_block(*fork.copied)
        self.routes.forked(fork.row, fork.group)

    def forget(self) -> None:
        """Drop hidden states and routes of sequences that hold no slot any more."""
        self._hidden = {owner: h for owner, h in self._hidden.items() if owner.slot is not None}
        self.routes.forget()

    @torch.no_grad()
    def prefill(self, chunks: Sequence[Chunk], padded_tokens: int) -> None:
        """Bring chunks into the caches; keeps the hidden state of the last token of each that is complete."""
        if padded_tokens == 0:
            return
        segments = [Segment(chunk.slot, chunk.start, chunk.length) for chunk in chunks]
        ids, next_ids, known = [], [], []
        for chunk in chunks:
            tokens, end = _tokens(chunk.sequence), chunk.start + chunk.length
            following = tokens[chunk.start + 1 : end + 1]
            ids += tokens[chunk.start : end]
            next_ids += [*following, *[0] * (chunk.length - len(following))]
            known += [position + 1 < chunk.sequence.fill_tokens for position in range(chunk.start, end)]
        padding = padded_tokens - len(ids)
        segments += self._padding(padding)
        device = self.memory.device
        plan = PrefillPlan.build(segments, device)
        rows = {"ids": ids, "next_ids": next_ids, "known": [int(is_known) for is_known in known]}
        there = all_to_device({name: torch.tensor(row + [0] * padding) for name, row in rows.items()}, device)
        record = self.program.new_record()
        hidden_TH = self.program.prefill(plan, there["ids"], record)
        if record is not None and chunks:
            self.routes.prefilled(chunks, record.routes())
        if self.memory.plan.speculative_tokens:
            self.program.mtp_prefill(plan, there["next_ids"], hidden_TH, there["known"].bool())
        end = 0
        for chunk in chunks:
            end += chunk.length
            if chunk.completes:
                self._hidden[chunk.sequence] = hidden_TH[end - 1].clone()

    def _padding(self, tokens: int) -> list[Segment]:
        longest = self.memory.plan.context_tokens
        lengths = [longest] * (tokens // longest) + [tokens % longest]
        return [Segment(self.memory.scratch_slot, 0, length) for length in lengths if length]

    @torch.no_grad()
    def start(self, starters: Sequence[tuple[Row, Group | None]], padded: int, rules: StepRules) -> Pending | None:
        """First tokens of rows whose prompt is in the caches, packed; a preempted row keeps its pending token."""
        if padded == 0:
            return None
        device, plan = self.memory.device, self.memory.plan
        hidden = [self._hidden[group or row] for row, group in starters]
        known = [row.response[-1] if row.response else -1 for row, _ in starters]
        idle = padded - len(starters)
        zero_H = torch.zeros(plan.hidden_size, dtype=plan.dtype, device=device)
        hidden_mH = torch.stack(hidden + [zero_H] * idle)
        known_m = to_device(known + [-1] * idle, device)
        slots = [row.slot for row, _ in starters] + [self.memory.scratch_slot] * idle
        self._reach([row for row, _ in starters], ahead=1)
        rows = StepRows.read(self.program.kernels, self.memory, to_device(slots, device), rules, self.group)
        packed_mW = torch.empty(padded, packed_words(1), dtype=torch.int32, device=device)
        first_step(self.program, self.memory, rows, hidden_mH, known_m, packed_mW)
        return Pending(packed_mW)

    def decode(self, running: Sequence[Row], padded: int, rules: StepRules, drafts: int) -> Pending | None:
        """One step of all running rows, packed."""
        if padded == 0:
            return None
        self._reach(running, ahead=drafts + 1)
        return self.steps.launch([row.slot for row in running], StepShape(padded, drafts, rules))

    def _reach(self, running: Sequence[Row], ahead: int) -> None:
        memory = self.memory
        tokens = max((row.fill_tokens + row.unread_tokens + ahead for row in running), default=1)
        needed = blocks_for(tokens, memory.plan.block_tokens)
        memory.live_blocks = memory.plan.max_blocks if self.fixed_reach else min(memory.plan.max_blocks, needed)


def _tokens(sequence: Row | Group) -> list[int]:
    response = sequence.response if isinstance(sequence, Row) else []
    return [*sequence.prompt_ids, *response]
