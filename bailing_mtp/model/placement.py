"""Rows sorted by where each of their choices goes: to an expert, or to a rank that holds some of its experts.

Shapes: T rows, k choices of each, E places to go to, A choices that go somewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Placement(NamedTuple):
    """Choices sorted by id. Those that go nowhere come last; `first` leaves them out."""

    token_A: Tensor
    """Row of each sorted choice."""
    order_A: Tensor
    """Place in the flat [T * k] of each sorted choice."""
    place_Tk: Tensor
    """Where each choice of each row went; for one that goes nowhere, past the end."""
    ends_E: Tensor
    """int32; one past the last choice of each id."""

    def first(self, n_choices: int) -> Placement:
        """Of the A choices that go somewhere."""
        return self._replace(token_A=self.token_A[:n_choices], order_A=self.order_A[:n_choices])


def placement(ids_Tk: Tensor, n_ids: int) -> Placement:
    """Sort the ids from 0 to `n_ids`, which means nowhere, on their device."""
    ids_A = ids_Tk.flatten()
    if n_ids < torch.iinfo(torch.int16).max:
        ids_A = ids_A.to(torch.int16)  # a quarter of the radix passes
    sorted_A, order_A = ids_A.sort(stable=True)
    place_A = torch.empty_like(order_A)
    place_A[order_A] = torch.arange(order_A.numel(), device=order_A.device)
    ids_E = torch.arange(n_ids, device=ids_A.device, dtype=sorted_A.dtype)
    ends_E = torch.searchsorted(sorted_A, ids_E, right=True, out_int32=True)
    return Placement(order_A // ids_Tk.shape[1], order_A, place_A.view(ids_Tk.shape), ends_E)
