"""Who gets slots and blocks, who is prefilled, who decodes. Pure host code, the same on every rank of a replica.

A prompt with one response is prefilled in the response's own slot. One with several is prefilled once, in a
template slot, and each response forks from it: whole blocks before the one of position P - 1 are shared, that
block is copied, because the MTP row at P - 1 depends on the response's first token. When blocks run out the
youngest sequence gives up its own and is prefilled again later.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

from bailing_mtp.rollout.blocks import BlockPool, blocks_for
from bailing_mtp.rollout.sequences import Assign, Chunk, Event, Fork, Group, Open, Plan, Row


class Scheduler:
    """Slots 0 .. max_running - 1 are for rows, the n_templates behind them for shared prompts."""

    def __init__(
        self,
        max_running: int,
        n_templates: int,
        n_blocks: int,
        block_tokens: int,
        prefill_tokens: int,
        speculative_tokens: int,
    ) -> None:
        self.pool = BlockPool(n_blocks)
        self.running: list[Row] = []
        self.preemptions = 0
        """Sequences that gave up their blocks."""
        self._block_tokens = block_tokens
        self._prefill_tokens = prefill_tokens
        self._ahead_tokens = speculative_tokens + 1
        self._free_slots = list(range(max_running))
        self._free_templates = list(range(max_running, max_running + n_templates))
        self._waiting: list[Row | Group] = []
        self._filling: list[Row | Group] = []
        self._ready: list[Group] = []
        self._events: list[Event] = []
        self._orders = 0

    def submit(self, prompt_ids: tuple[int, ...], n_samples: int, max_new_tokens: int) -> list[Row]:
        """Queue `n_samples` responses to one prompt."""
        return self.resume(prompt_ids, {index: () for index in range(n_samples)}, max_new_tokens)

    def resume(
        self, prompt_ids: tuple[int, ...], responses: Mapping[int, Sequence[int]], max_new_tokens: int
    ) -> list[Row]:
        """Queue responses to one prompt: sample index, ascending -> tokens so far.

        Those that have tokens wait as preempted rows do; the others share a prefill.
        """
        order, self._orders = self._orders, self._orders + 1
        rows = [
            Row(order, sample_index=i, prompt_ids=prompt_ids, max_new_tokens=max_new_tokens, response=list(tokens))
            for i, tokens in responses.items()
        ]
        needed = blocks_for(rows[0].limit_tokens, self._block_tokens)
        assert needed <= self.pool.n_blocks, f"{needed} blocks needed, {self.pool.n_blocks} exist"
        fresh = [row for row in rows if not row.response]
        if len(fresh) > 1:
            self._wait(Group(order, rows=rows, unforked=fresh))
        for row in rows:
            if row.response or len(fresh) == 1:
                self._wait(row)
        return rows

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting or self._filling or self._ready)

    def plan(self, drain: Callable[[], None] = lambda: None) -> Plan:
        """Decide one iteration and take the slots and blocks for it. RuntimeError if work is left but none fits.

        drain: reads the results of all steps under way, so that no row has unread tokens.
        """
        self._events = []
        for row in sorted(self.running, key=lambda row: row.key):
            if row.state == "running":
                self._reserve(row, drain)
        decode = tuple(self.running)
        starters = self._fork_ready(idle=not decode)
        self._admit()
        before, self._events = tuple(self._events), []
        chunks = self._chunks()
        for chunk in chunks:
            if chunk.completes and isinstance(chunk.sequence, Row):
                self._start(chunk.sequence)
                starters.append((chunk.sequence, None))
        starters += self._fork_ready(idle=not (decode or starters))
        plan = Plan(before, tuple(chunks), tuple(self._events), tuple(starters), decode)
        if plan.is_empty and self.has_work:
            raise RuntimeError(f"the scheduler is stuck: {self._describe()}")
        return plan

    def finish(self, row: Row) -> None:
        """A row has ended, or is cancelled in whatever state it is in."""
        if row.state == "done":
            return
        if row.slot is not None:
            self._release(row)
        elif row in self._waiting:
            self._waiting.remove(row)
        else:
            self._leave_group(row)
        row.state = "done"

    def check_integrity(self, max_running: int, n_templates: int) -> None:
        """AssertionError unless every slot and block is accounted for."""
        holders = [*self.running, *self._filling, *self._ready]
        self.pool.check_integrity(holder.blocks for holder in holders)
        slots = [holder.slot for holder in holders] + self._free_slots + self._free_templates
        assert sorted(slots) == list(range(max_running + n_templates)), f"slots are lost or doubled: {slots}"
        for item in self._waiting:
            assert item.slot is None and not item.blocks, "a waiting sequence holds memory"

    # Blocks of rows

    def _needed_blocks(self, row: Row) -> int:
        """Blocks for the tokens of a row, those of the steps under way, and one step more."""
        tokens = min(row.fill_tokens + row.unread_tokens + self._ahead_tokens, row.limit_tokens)
        return blocks_for(tokens, self._block_tokens)

    def _reserve(self, row: Row, drain: Callable[[], None]) -> None:
        """Give a running row blocks for one step; the youngest sequences lose theirs for it, or it its own."""
        if self._missing(row) > self.pool.n_free:
            # Results may end rows or show that fewer tokens came; and a victim is prefilled with all of its own.
            drain()
        while row.state == "running" and self._missing(row) > self.pool.n_free:
            self._preempt(max([*self.running, *self._filling, *self._ready], key=lambda holder: holder.key))
        if row.state == "running" and self._missing(row) > 0:
            self._assign(row, self._missing(row))

    def _missing(self, row: Row) -> int:
        return self._needed_blocks(row) - len(row.blocks)

    def _assign(self, sequence: Row | Group, count: int) -> None:
        blocks = self.pool.allocate(count)
        assert sequence.slot is not None
        self._events.append(Assign(sequence.slot, len(sequence.blocks), tuple(blocks)))
        sequence.blocks += blocks

    def _preempt(self, victim: Row | Group) -> None:
        self.preemptions += 1
        self._release(victim)
        if isinstance(victim, Row):
            victim.state = "waiting"
        self._wait(victim)

    def _release(self, holder: Row | Group) -> None:
        """Take slot and blocks from a sequence and forget it."""
        for place in (self.running, self._filling, self._ready):
            if holder in place:
                place.remove(holder)
        self.pool.free(holder.blocks)
        assert holder.slot is not None
        bisect.insort(self._free_slots if isinstance(holder, Row) else self._free_templates, holder.slot)
        holder.slot, holder.blocks, holder.filled = None, [], 0

    def _wait(self, item: Row | Group) -> None:
        bisect.insort(self._waiting, item, key=lambda waiting: waiting.key)

    def _leave_group(self, row: Row) -> None:
        groups = [item for item in (*self._waiting, *self._filling, *self._ready) if isinstance(item, Group)]
        (group,) = (group for group in groups if row in group.unforked)
        group.unforked.remove(row)
        if group.unforked:
            return
        if group.slot is not None:
            self._release(group)
        else:
            self._waiting.remove(group)

    # Admission and prefill

    def _has_room(self, needed: int) -> bool:
        """Blocks for a newcomer, and one for every running row, so that it is not thrown out at once."""
        spare = len(self.running) if self.running or self._filling else 0
        return self.pool.n_free >= needed + spare

    def _admit(self) -> None:
        """Open slots for waiting sequences, oldest first. Nobody passes one that waits for blocks."""
        for item in list(self._waiting):
            is_row = isinstance(item, Row)
            free = self._free_slots if is_row else self._free_templates
            if not free:
                if not (self._free_slots or self._free_templates):
                    return
                continue
            needed = self._needed_blocks(item) if is_row else blocks_for(item.fill_tokens, self._block_tokens)
            if not self._has_room(needed):
                return
            self._waiting.remove(item)
            item.slot = free.pop(0)
            self._events.append(Open(item.slot, item if is_row else None))
            self._assign(item, needed)
            bisect.insort(self._filling, item, key=lambda filling: filling.key)
            if is_row:
                item.state = "filling"

    def _chunks(self) -> list[Chunk]:
        """The next tokens of the sequences that are prefilled, oldest first, within the budget."""
        chunks, budget = [], self._prefill_tokens
        for item in list(self._filling):
            length = min(budget, item.fill_tokens - item.filled)
            if length == 0:
                break
            chunk = Chunk(item, item.slot, item.filled, length)
            chunks.append(chunk)
            budget -= length
            item.filled += length
            if chunk.completes:
                self._filling.remove(item)
                if isinstance(item, Group):
                    bisect.insort(self._ready, item, key=lambda ready: ready.key)
        return chunks

    def _start(self, row: Row) -> None:
        row.state = "running"
        self.running.append(row)

    # Forks

    def _fork_ready(self, idle: bool) -> list[tuple[Row, Group | None]]:
        """Fork responses from prefilled templates while slots and blocks last.

        The last response takes the template's own blocks. So does any response when nothing else runs
        (`idle`) and a copy does not fit; the others of its group are then prefilled again.
        """
        forked: list[tuple[Row, Group | None]] = []
        for group in list(self._ready):
            while group.is_ready and group.unforked and self._free_slots:
                takes_over = len(group.unforked) == 1
                if not self._has_room(self._missing_for_fork(group, takes_over)):
                    if not idle or forked:
                        return forked
                    takes_over = True
                    self._make_room(group)
                row = group.unforked.pop(0)
                self._fork(row, group, takes_over)
                forked.append((row, group))
        return forked

    def _make_room(self, group: Group) -> None:
        """Let the youngest other sequences give way until one response of `group` can go on."""
        while self._missing_for_fork(group, takes_over=True) > self.pool.n_free:
            others = [holder for holder in (*self._filling, *self._ready) if holder is not group]
            self._preempt(max(others, key=lambda holder: holder.key))

    def _missing_for_fork(self, group: Group, takes_over: bool) -> int:
        held = len(group.blocks) if takes_over else self._shared_blocks(group)
        return self._needed_blocks(group.unforked[0]) - held

    def _shared_blocks(self, group: Group) -> int:
        return (group.fill_tokens - 1) // self._block_tokens

    def _fork(self, row: Row, group: Group, takes_over: bool) -> None:
        source_slot, copied = group.slot, None
        shared = list(group.blocks if takes_over else group.blocks[: self._shared_blocks(group)])
        self.pool.share(shared)
        own = self.pool.allocate(self._needed_blocks(row) - len(shared))
        if not takes_over:
            copied = (group.blocks[len(shared)], own[0])
        row.slot = self._free_slots.pop(0)
        row.blocks, row.filled = shared + own, group.fill_tokens
        self._start(row)
        assert source_slot is not None
        self._events.append(Fork(row, group, source_slot, row.slot, tuple(row.blocks), copied))
        if takes_over:
            self._release(group)
            if group.unforked:
                self._wait(group)

    def _describe(self) -> str:
        return (
            f"{len(self._waiting)} waiting, {len(self._filling)} in prefill, {len(self._ready)} templates, "
            f"{self.pool.n_free} of {self.pool.n_blocks} blocks free"
        )
