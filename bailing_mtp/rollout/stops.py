"""Where a response ends: stop ids and caps on the device, inside a block of tokens; stop strings on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bailing_mtp.kernels.reference.settle import LENGTH, RUNNING, STOP, Cut, cut_block

__all__ = ["LENGTH", "RUNNING", "STOP", "Cut", "StopStrings", "cut_block"]


class StopStrings:
    """Finds the token that completes a stop string in a growing response.

    decode: ids -> text. Only the last tokens are decoded again: a string of n characters spans at most 4 n
    tokens that carry text. A string that is complete before `min_tokens` tokens ends nothing.
    """

    def __init__(
        self, strings: Sequence[str], decode: Callable[[Sequence[int]], str], min_tokens: int = 0
    ) -> None:
        self._strings, self._min_tokens = tuple(strings), min_tokens
        self._decode = decode
        self._window_tokens = 8 + 4 * max((len(text) for text in self._strings), default=0)
        self._ids: list[int] = []

    def add(self, token_ids: Sequence[int]) -> int | None:
        """Append tokens; returns how many of them belong to the response if one completes a string, else None."""
        for count, token_id in enumerate(token_ids, start=1):
            self._ids.append(token_id)
            if len(self._ids) < self._min_tokens:
                continue
            window = self._ids[-self._window_tokens :]
            before, after = self._decode(window[:-1]), self._decode(window)
            if any(after.count(text) > before.count(text) for text in self._strings):
                return count
        return None
