"""Counter-based noise: what a token is drawn with depends on its request and position alone.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The key is (seed, rollout step).
The counter is (vocabulary id >> 2, position * 4 + purpose, prompt index, sample index); of the four words of a
block, token id takes number id & 3. `tl.philox` of Triton gives the same words for the same key and counter.

Shapes: n rows, k columns, v vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DRAFT, ACCEPT, FRESH = 0, 1, 2
"""Purposes: drawing a draft, testing it, drawing the recovered, bonus or first token."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class NoiseKeys(NamedTuple):
    """Key and counter words of n rows, int64 [n] each."""

    seed: Tensor
    step: Tensor
    prompt_index: Tensor
    sample_index: Tensor


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words of each counter, as int64 tensors of the broadcast shape."""
    c0, c1, c2, c3 = (word & _MASK for word in counter)
    k0, k1 = (word & _MASK for word in key)
    for _ in range(_ROUNDS):
        # The product of two 32-bit words may wrap in int64; its bits are those of the unsigned product.
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((odd >> 32) & _MASK) ^ c1 ^ k0, ((even >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = odd & _MASK, even & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def to_uniform(words: Tensor) -> Tensor:
    """32-bit words -> fp32 in (0, 1): (x + 0.5) * 2**-32, fine near 0, at most 1 - 2**-24."""
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def to_gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise; the large values, which decide an argmax, come from the fine end of the uniform."""
    return -torch.log(-torch.log1p(-uniform))


def accept_uniform(keys: NoiseKeys, position_nk: Tensor) -> Tensor:
    """The uniform that tests the draft at each absolute position; fp32 [n, k]."""
    seed, step, prompt_index, sample_index = (word.unsqueeze(-1) for word in keys)
    zero = torch.zeros_like(position_nk)
    counter = (zero, position_nk * 4 + ACCEPT, prompt_index, sample_index)
    return to_uniform(philox(counter, (seed, step))[0])


def gumbel(keys: NoiseKeys, position_n: Tensor, purpose: int, first_id: int, v: int) -> Tensor:
    """Gumbel noise of vocabulary ids first_id .. first_id + v - 1 for one token per row; fp32 [n, v]."""
    return gumbel_at(keys, position_n * 4 + purpose, first_id, v)


def gumbel_at(keys: NoiseKeys, counter_n: Tensor, first_id: int, v: int) -> Tensor:
    """As `gumbel`, given the second word of the counter."""
    first_block, last_block = first_id >> 2, (first_id + v - 1) >> 2
    block = torch.arange(first_block, last_block + 1, device=counter_n.device)
    seed, step, prompt_index, sample_index = (word.unsqueeze(-1) for word in keys)
    counter = (block.unsqueeze(0), counter_n.unsqueeze(-1), prompt_index, sample_index)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed, step))), dim=-1).flatten(1)
    skipped = first_id - first_block * 4
    return to_gumbel(to_uniform(words[:, skipped : skipped + v]))
