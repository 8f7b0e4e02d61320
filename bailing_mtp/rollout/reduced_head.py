"""Drafts from a part of the vocabulary: the file that lists it, and the rows of the output head that it needs.

q is then renormalised over the listed ids and zero elsewhere. Nothing after the draft knows: logits of a whole row
are handed on, -inf at the ids that are not listed, so that what is sampled keeps the target's distribution.

Shapes: n rows, H hidden size, v this rank's vocabulary rows, x those of them that are listed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bailing_mtp.errors import UserError
from bailing_mtp.rollout.program import Program

_KEY = "rollout.draft_vocabulary"


def read_draft_ids(path: str, vocab_size: int) -> tuple[int, ...]:
    """The token ids that the JSON file lists, in rising order. Raises UserError naming key, file and the first id
    that will not do."""
    try:
        listed = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{_KEY}: {path} cannot be read as JSON: {error}") from error
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{_KEY}: {path} must hold a list of at least one token id")
    seen: set[int] = set()
    for place, token in enumerate(listed):
        where = f"{_KEY}: {path}, entry {place}: {json.dumps(token)}"
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UserError(f"{where} is no token id; allowed: integers from 0 to {vocab_size - 1}")
        if token in seen:
            raise UserError(f"{where} stands there twice; allowed: distinct ids")
        seen.add(token)
    return tuple(sorted(seen))


class ReducedHead:
    """The head's rows of the listed ids of this rank, side by side for the drafts' product.

    They are gathered anew as each rollout begins, from the weights that it begins with, and a rollout never outlives
    its weights: these rows are never older than the model. Their place stays, since graphs hold its address, until
    `release` gives it back with the rest of the rollout's memory.
    """

    def __init__(self, ids: Sequence[int], tp_rank: int, v: int) -> None:
        first = tp_rank * v
        self._columns = [token - first for token in ids if first <= token < first + v]
        self._column_x: Tensor | None = None
        self._rows_xH: Tensor | None = None

    def row_bytes(self, head_vH: Tensor) -> int:
        """Device memory that `refresh` takes."""
        return len(self._columns) * head_vH.shape[1] * head_vH.element_size()

    @torch.no_grad()
    def refresh(self, head_vH: Tensor) -> None:
        """Gather the rows from the head as it is now."""
        if self._rows_xH is None:
            self._column_x = torch.tensor(self._columns, dtype=torch.int64, device=head_vH.device)
            self._rows_xH = head_vH.new_empty(len(self._columns), head_vH.shape[1])
        torch.index_select(head_vH.detach(), 0, self._column_x, out=self._rows_xH)

    def release(self) -> None:
        self._column_x = self._rows_xH = None

    def logits(self, program: Program, hidden_nH: Tensor, out_nv: Tensor) -> Tensor:
        """[n, v] in fp32, -inf at ids that are not listed; written to `out_nv`."""
        assert self._rows_xH is not None and self._column_x is not None, "the rows were not gathered"
        listed_nx = program.compute.logits(hidden_nH, self._rows_xH)
        return out_nv.fill_(-torch.inf).index_copy_(1, self._column_x, listed_nx)
