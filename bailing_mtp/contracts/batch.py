"""Packed token batches, and the one definition of the next-token and MTP shifts.

Shapes: T tokens of the whole pack (every tensor-parallel rank holds all T), N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """On `device`. The host waits for no copy to a GPU; from pageable memory it would, for all queued work."""
    if device.type == "cuda" and x.device.type == "cpu":
        # The allocator of pinned memory keeps a block until the copies that read it are done.
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


class Shift(NamedTuple):
    """Targets of every site of a pack for one prediction depth."""

    target_ids_T: Tensor
    """int64; token t+1+depth, or 0 where the site has no such token in its document."""
    valid_T: Tensor
    """bool; True where the target lies in the same document and is a trained token."""


@dataclass(frozen=True)
class PackedLayout:
    """Where documents lie in a pack. Padding is a document of its own, masked everywhere.

    Example: documents of 5 and 3 tokens padded to 8 and 4 are lengths (5, 3, 3, 1) with
    is_padding (False, True, False, True).
    """

    lengths: tuple[int, ...]
    """Document lengths on the host (so that no kernel launch waits for the device); sum = T."""
    is_padding: tuple[bool, ...]
    cu_seqlens: Tensor
    """int64 [N+1], prefix sums of `lengths`, on the batch's device."""
    position_ids_T: Tensor
    """int64, position inside the document."""
    document_end_T: Tensor
    """int64, one past the last index of the token's document."""
    padding_T: Tensor
    """bool, True on padding tokens."""

    @staticmethod
    def build(lengths: Sequence[int], is_padding: Sequence[bool] | None = None) -> PackedLayout:
        """Layout of consecutive documents of `lengths` tokens, on the CPU."""
        flags = tuple(is_padding) if is_padding is not None else (False,) * len(lengths)
        if len(flags) != len(lengths) or any(n < 0 for n in lengths):
            raise ValueError(f"lengths {tuple(lengths)} and is_padding {flags} do not describe a pack")
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
        n_tokens = torch.tensor(tuple(lengths), dtype=torch.int64)
        begin_T = torch.repeat_interleave(cu_seqlens[:-1], n_tokens)
        return PackedLayout(
            lengths=tuple(int(n) for n in lengths),
            is_padding=flags,
            cu_seqlens=cu_seqlens,
            position_ids_T=torch.arange(int(cu_seqlens[-1])) - begin_T,
            document_end_T=torch.repeat_interleave(cu_seqlens[1:], n_tokens),
            padding_T=torch.repeat_interleave(torch.tensor(flags, dtype=torch.bool), n_tokens),
        )

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def n_padding_tokens(self) -> int:
        return sum(n for n, is_padding in zip(self.lengths, self.is_padding, strict=True) if is_padding)

    def to(self, device: torch.device) -> PackedLayout:
        moved = {
            name: to_device(getattr(self, name), device)
            for name in ("cu_seqlens", "position_ids_T", "document_end_T", "padding_T")
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class TokenBatch:
    """One microbatch of packed documents, the same on all ranks of a tensor-parallel group."""

    input_ids_T: Tensor
    """int64."""
    loss_mask_T: Tensor
    """bool; True where the token is a trained token, i.e. may be the *target* of a site."""
    layout: PackedLayout
    document_ids: tuple[str, ...] = ()
    """Where each document came from, for error reports."""
    mtp_mask_T: Tensor | None = None
    """bool; which tokens may be MTP targets, where that differs from the loss mask (preference pairs train the
    MTP layer on the chosen document only). None: the loss mask."""
    _host: TokenBatch | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n_tokens = self.layout.n_tokens
        if self.input_ids_T.shape != (n_tokens,) or self.loss_mask_T.shape != (n_tokens,):
            raise ValueError(
                f"input_ids {tuple(self.input_ids_T.shape)} and loss_mask {tuple(self.loss_mask_T.shape)} "
                f"must be [{n_tokens}], the sum of the document lengths"
            )

    def shift(self, depth: int) -> Shift:
        """Targets for `depth` (0: the language model's t+1; d: the MTP layer's t+1+d).

        A site is valid only if its target is in the same document and is a trained token
        (Bailing V3 spec section 5); padding is never a target.
        """
        target_ids_T = self.token_ahead(depth + 1)
        inside_T = self._inside(depth + 1)
        mask_T = self.loss_mask_T if depth == 0 or self.mtp_mask_T is None else self.mtp_mask_T
        trained_T = mask_T & ~self.layout.padding_T
        valid_T = inside_T & self._ahead(trained_T, depth + 1)
        return Shift(target_ids_T, valid_T)

    def token_ahead(self, n_ahead: int) -> Tensor:
        """int64 [T]: the token `n_ahead` positions later in the same document, 0 where there is none."""
        return torch.where(self._inside(n_ahead), self._ahead(self.input_ids_T, n_ahead), 0)

    def has_token_ahead(self, n_ahead: int) -> Tensor:
        """bool [T]: True where the document (not padding) has a token `n_ahead` positions later."""
        return self._inside(n_ahead) & ~self.layout.padding_T

    def _inside(self, n_ahead: int) -> Tensor:
        index_T = torch.arange(self.input_ids_T.numel(), device=self.input_ids_T.device)
        return index_T + n_ahead < self.layout.document_end_T

    @staticmethod
    def _ahead(values_T: Tensor, n_ahead: int) -> Tensor:
        out_T = torch.zeros_like(values_T)
        if n_ahead < values_T.numel():
            out_T[: values_T.numel() - n_ahead] = values_T[n_ahead:]
        return out_T

    def padded_to(self, multiple: int) -> TokenBatch:
        """The same batch with a padding document appended so that T is a multiple (tensor parallel)."""
        extra = -self.layout.n_tokens % multiple
        if extra == 0:
            return self
        zeros = torch.zeros(extra, dtype=self.input_ids_T.dtype, device=self.input_ids_T.device)
        layout = PackedLayout.build((*self.layout.lengths, extra), (*self.layout.is_padding, True))
        return replace(
            self,
            input_ids_T=torch.cat([self.input_ids_T, zeros]),
            loss_mask_T=torch.cat([self.loss_mask_T, zeros.bool()]),
            mtp_mask_T=None if self.mtp_mask_T is None else torch.cat([self.mtp_mask_T, zeros.bool()]),
            layout=layout.to(self.input_ids_T.device),
        )

    def to(self, device: torch.device) -> TokenBatch:
        moved = replace(
            self,
            input_ids_T=to_device(self.input_ids_T, device),
            loss_mask_T=to_device(self.loss_mask_T, device),
            mtp_mask_T=None if self.mtp_mask_T is None else to_device(self.mtp_mask_T, device),
            layout=self.layout.to(device),
        )
        return moved.remembering(self)

    def remembering(self, source: TokenBatch) -> Self:
        """Itself, just made from `source`, whose copy in host memory it keeps."""
        on_host = source if source.input_ids_T.device.type == "cpu" else source._host
        object.__setattr__(self, "_host", on_host)
        return self

    def on_host(self) -> TokenBatch:
        """The same pack in host memory: the one it was moved from, which `dataclasses.replace` forgets. Waits for the
        device only if there is none."""
        if self.input_ids_T.device.type == "cpu":
            return self
        return self.to(torch.device("cpu")) if self._host is None else self._host
