"""Preference pairs of random tokens, for the golden fixture's vocabulary."""

from __future__ import annotations

import dataclasses

import torch

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.contracts.pairs import PairBatch


def pair_batch(*sizes: tuple[int, int, int], padding: int = 0, seed: int = 0, reference: float = -20.0) -> PairBatch:
    """sizes: (prompt, chosen, rejected) tokens of each pair; every row's reference is `reference` plus its number."""
    generator = torch.Generator().manual_seed(seed)
    lengths, ids, mask = [], [], []
    for prompt, *responses in sizes:
        prompt_ids = torch.randint(0, 512, (prompt,), generator=generator)
        for n_response in responses:
            lengths.append(prompt + n_response)
            ids += [prompt_ids, torch.randint(0, 512, (n_response,), generator=generator)]
            mask += [torch.zeros(prompt, dtype=torch.bool), torch.ones(n_response, dtype=torch.bool)]
    pads = [padding] if padding else []
    zeros = torch.zeros(padding, dtype=torch.int64)
    layout = PackedLayout.build([*lengths, *pads], [False] * len(lengths) + [True] * len(pads))
    names = tuple(f"row{index}" for index in range(len(lengths))) + ("padding",) * len(pads)
    batch = TokenBatch(torch.cat([*ids, zeros]), torch.cat([*mask, zeros.bool()]), layout, names)
    return PairBatch.of(batch, reference + torch.arange(len(lengths), dtype=torch.float64).view(-1, 2))


def without_rejected_mtp(batch: PairBatch) -> PairBatch:
    """The same pairs with MTP targets everywhere, as one shared mask would have it."""
    return dataclasses.replace(batch, mtp_mask_T=None)
