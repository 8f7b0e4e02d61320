"""A microbatch of rollout samples with what the policy loss needs for every token.

Shapes: T tokens of the pack, L expert layers of the trunk, k experts per token. Per-token values stand at the token
itself; `at_sites` moves them to the site that predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch, to_device


def _none_yet() -> Tensor:
    return torch.zeros(0)


@dataclass(frozen=True)
class PolicyBatch(TokenBatch):
    """Samples, one a document; the loss mask is True on response tokens."""

    advantage_T: Tensor = field(default_factory=_none_yet)
    """fp32, the sample's advantage on its response tokens, 0 elsewhere."""
    rollout_logprob_T: Tensor = field(default_factory=_none_yet)
    """fp32, tempered log-probability with which the rollout drew the token, 0 elsewhere."""
    old_logprob_T: Tensor | None = None
    """fp32, the trainer's own tempered log-probability before the update, where ratios are taken to it."""
    reference_logprob_T: Tensor | None = None
    """fp32, tempered log-probability under the reference model, where there is one."""
    routes_TLk: Tensor | None = None
    """int16, expert ids that the rollout chose, -1 where none are recorded; None without routing replay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values_T in self._per_token().items():
            if values_T.shape != self.input_ids_T.shape:
                raise ValueError(f"{name} {tuple(values_T.shape)} must be [{self.layout.n_tokens}]")
        if self.routes_TLk is not None and self.routes_TLk.shape[0] != self.layout.n_tokens:
            raise ValueError(f"routes {tuple(self.routes_TLk.shape)} must be [{self.layout.n_tokens}, L, k]")

    def at_sites(self, values_T: Tensor) -> Tensor:
        """Values of the next token of the pack; meaningless where `shift(0)` is not valid."""
        return self._ahead(values_T, 1)

    def padded_to(self, multiple: int) -> PolicyBatch:
        extra = -self.layout.n_tokens % multiple
        if extra == 0:
            return self
        padded = {name: torch.nn.functional.pad(x_T, (0, extra)) for name, x_T in self._per_token().items()}
        if self.routes_TLk is not None:
            padded["routes_TLk"] = torch.nn.functional.pad(self.routes_TLk, (0, 0, 0, 0, 0, extra), value=-1)
        return PolicyBatch(**_arguments(self.tokens().padded_to(multiple)), **padded)

    def tokens(self) -> TokenBatch:
        """The pack without the policy's values."""
        return TokenBatch(**_arguments(self))

    def to(self, device: torch.device) -> PolicyBatch:
        moved = {name: to_device(x_T, device) for name, x_T in self._per_token().items()}
        if self.routes_TLk is not None:
            moved["routes_TLk"] = to_device(self.routes_TLk, device)
        return replace(super().to(device), **moved).remembering(self)

    def _per_token(self) -> dict[str, Tensor]:
        names = ("advantage_T", "rollout_logprob_T", "old_logprob_T", "reference_logprob_T")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _arguments(batch: TokenBatch) -> dict[str, Any]:
    """What a TokenBatch with the tokens of `batch` is made of."""
    return {f.name: getattr(batch, f.name) for f in fields(TokenBatch) if f.init}
