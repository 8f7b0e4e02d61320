"""Block tables of memories without a scheduler."""

import torch

from bailing_mtp.rollout.memory import RolloutMemory


def assign_blocks(memory: RolloutMemory, slot: int, first: int, blocks: list[int]) -> None:
    """Entries first, first + 1, ... of a slot's block table."""
    values = torch.tensor(blocks, dtype=torch.int32, device=memory.device)
    memory.slots.block_table_NM[slot, first : first + len(blocks)] = values
