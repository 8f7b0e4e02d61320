"""Where a response ends: stop ids and caps on the device, inside a block of tokens; stop strings on the host.

Shapes: n rows, S tokens of a block, X stop ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RUNNING, STOP, LENGTH = 0, 1, 2
"""States of a row after a block."""


class Cut(NamedTuple):
    """What is kept of a block."""

    kept_n: Tensor
    """int64, tokens kept, 0..S."""
    state_n: Tensor
    """int64: RUNNING, STOP or LENGTH."""


def cut_block(
    tokens_nS: Tensor, n_tokens_n: Tensor, stop_ids_nX: Tensor, room_n: Tensor
) -> Cut:
    """Cut each row's first `n_tokens` tokens after its first stop id (which stays), and at `room` tokens.

    room_n: response tokens that the row may still add. A stop id inside the room wins over the cap.
    stop_ids_nX: -1 padded.
    """
    columns = torch.arange(tokens_nS.shape[1], device=tokens_nS.device)
    is_stop_nS = (tokens_nS.unsqueeze(-1) == stop_ids_nX.unsqueeze(1)).any(-1)
    stops_before_nS = is_stop_nS.long().cumsum(-1) - is_stop_nS.long()
    room_n1 = room_n.unsqueeze(-1)
    keep_nS = (columns < n_tokens_n.unsqueeze(-1)) & (stops_before_nS == 0) & (columns < room_n1)
    kept_n = keep_nS.sum(-1)
    stopped_n = (keep_nS & is_stop_nS).any(-1)
    full_n = kept_n >= room_n
    state_n = torch.where(stopped_n, STOP, torch.where(full_n, LENGTH, RUNNING))
    return Cut(kept_n, state_n)


class StopStrings:
    """Finds the token that completes a stop string in a growing response.

    decode: ids -> text. Only the last tokens are decoded again: a string of n characters spans at most 4 n
    tokens that carry text.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._window_tokens = 8 + 4 * max((len(text) for text in self._strings), default=0)
        self._ids: list[int] = []

    def add(self, token_ids: Sequence[int]) -> int | None:
        """Append tokens; returns how many of them belong to the response if one completes a string, else None."""
        for count, token_id in enumerate(token_ids, start=1):
            self._ids.append(token_id)
            window = self._ids[-self._window_tokens :]
            before, after = self._decode(window[:-1]), self._decode(window)
            if any(after.count(text) > before.count(text) for text in self._strings):
                return count
        return None
