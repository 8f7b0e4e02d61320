"""Which blocks of the paged latent cache belong to whom. Pure host bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Blocks 0 .. n_blocks - 1 with reference counts; the lowest free one is handed out first."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._references = [0] * n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises OutOfBlocks and takes nothing if there are fewer."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.n_blocks} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free and cannot be shared"
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less; a block without references is free again."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """AssertionError unless `tables` (the blocks of every owner) account for every reference."""
        counted = [0] * self.n_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {table}"
            for block in table:
                counted[block] += 1
        assert counted == self._references, "references do not match the tables"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(self._references[block] == 0 for block in self._free), "a free block has references"
        n_used = sum(count > 0 for count in counted)
        assert n_used + len(self._free) == self.n_blocks, "blocks are lost"


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // block_tokens)
