"""Carries out the scheduler's plans on the device: events, prefills, first tokens, decode steps.

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
from bailing_mtp.rollout.draft import Drafter, StepRows
from bailing_mtp.rollout.memory import RolloutMemory
from bailing_mtp.rollout.prefill import PrefillPlan, Segment
from bailing_mtp.rollout.program import Program
from bailing_mtp.rollout.sequences import Assign, Chunk, Event, Fork, Group, Open, Row
from bailing_mtp.rollout.step import StepOutput, decode_step, first_step


@dataclass(frozen=True)
class RowResult:
    """What one row gained, on the host."""

    tokens: list[int]
    n_accepted: int
    state: int
    error: bool
    raw: list[float]
    processed: list[float]
    kept_logmass: list[float]


@dataclass
class Runner:
    """The device side of one rollout. Holds the memory, and the last hidden state of every prefilled prompt."""

    program: Program
    memory: RolloutMemory
    drafter: Drafter
    group: ProcessGroup
    _hidden: dict[Row | Group, Tensor] = field(default_factory=dict)

    def apply(self, events: Sequence[Event]) -> None:
        """Slots, block tables and forks, in order."""
        for event in events:
            if isinstance(event, Open):
                self.memory.reset_slot(event.slot)
            elif isinstance(event, Assign):
                self.memory.assign_blocks(event.slot, event.first, list(event.blocks))
            elif isinstance(event, Fork):
                self._fork(event)

    def _fork(self, fork: Fork) -> None:
        self.memory.copy_slot(fork.source_slot, fork.slot)
        self.memory.assign_blocks(fork.slot, 0, list(fork.blocks))
        if fork.copied is not None:
            self.memory.copy_block(*fork.copied)

    def forget(self) -> None:
        """Drop hidden states of sequences that hold no slot any more."""
        self._hidden = {owner: h for owner, h in self._hidden.items() if owner.slot is not None}

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
        hidden_TH = self.program.prefill(plan, torch.tensor(ids + [0] * padding, device=device))
        if self.memory.plan.speculative_tokens:
            next_T = torch.tensor(next_ids + [0] * padding, device=device)
            known_T = torch.tensor(known + [False] * padding, device=device)
            self.program.mtp_prefill(plan, next_T, hidden_TH, known_T)
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
    def start(self, starters: Sequence[tuple[Row, Group | None]], padded: int, rules: StepRules) -> list[RowResult]:
        """First tokens of rows whose prompt is in the caches; a preempted row keeps its pending token."""
        if padded == 0:
            return []
        device, plan = self.memory.device, self.memory.plan
        hidden = [self._hidden[group or row] for row, group in starters]
        known = [row.response[-1] if row.response else -1 for row, _ in starters]
        idle = padded - len(starters)
        zero_H = torch.zeros(plan.hidden_size, dtype=plan.dtype, device=device)
        hidden_mH = torch.stack(hidden + [zero_H] * idle)
        known_m = torch.tensor(known + [-1] * idle, device=device)
        rows = self._rows([row for row, _ in starters], padded, rules, ahead=1)
        output = first_step(self.program, self.memory, rows, hidden_mH, known_m)
        return _to_host(output, len(starters))

    @torch.no_grad()
    def decode(self, running: Sequence[Row], padded: int, rules: StepRules, drafts: int) -> list[RowResult]:
        """One step of all running rows."""
        if padded == 0:
            return []
        rows = self._rows(running, padded, rules, ahead=drafts + 1)
        output = decode_step(self.program, self.memory, self.drafter, rows, drafts)
        return _to_host(output, len(running))

    def _rows(self, running: Sequence[Row], padded: int, rules: StepRules, ahead: int) -> StepRows:
        memory = self.memory
        slots = [row.slot for row in running] + [memory.scratch_slot] * (padded - len(running))
        reach = max((row.fill_tokens + ahead for row in running), default=1)
        memory.live_blocks = min(memory.plan.max_blocks, blocks_for(reach, memory.plan.block_tokens))
        slots_n = torch.tensor(slots, device=memory.device)
        return StepRows.read(memory, slots_n, rules, self.group)


def _tokens(sequence: Row | Group) -> list[int]:
    response = sequence.response if isinstance(sequence, Row) else []
    return [*sequence.prompt_ids, *response]


def _to_host(output: StepOutput, n_rows: int) -> list[RowResult]:
    """The first `n_rows` rows, in two transfers."""
    columns = output.tokens_nS.shape[1]
    whole = torch.cat(
        [
            output.tokens_nS,
            torch.stack([output.kept_n, output.n_accepted_n, output.state_n, output.error_n.long()], 1),
        ],
        dim=1,
    )
    log_probs = torch.stack(list(output.log_probs), 1)
    results = []
    for numbers, (raw, processed, mass) in zip(
        whole[:n_rows].tolist(), log_probs[:n_rows].tolist(), strict=True
    ):
        kept, n_accepted, state, error = numbers[columns:]
        results.append(
            RowResult(
                numbers[:kept], n_accepted, state, bool(error), raw[:kept], processed[:kept], mass[:kept]
            )
        )
    return results
