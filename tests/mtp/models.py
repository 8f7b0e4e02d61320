"""States and batches for the MTP tests: the golden MoE fixture, and fresh models of the same sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from bailing_mtp.config import MtpConfig
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.model.build import build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.objective import LossTerms, Objective, PretrainObjective
from bailing_mtp.training.state import DdpOptions, TrainState, build_state
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.load import read_architecture
from tests.distributed import worlds

PLAIN_DDP = DdpOptions(overlap_grad_reduce=False)


def fixture_state(context: ParallelContext, settings: ModelSettings = worlds.FP32) -> TrainState:
    return build_state(worlds.fixture_model("moe", context, settings), context, worlds.OPTIM, 10, PLAIN_DDP)


def fresh_state(
    context: ParallelContext, with_mtp: bool = True, settings: ModelSettings = worlds.FP32, **sizes: Any
) -> TrainState:
    """Random weights (seed 0) of the MoE fixture's architecture with some sizes replaced."""
    arch = dataclasses.replace(read_architecture(worlds.FIXTURES / "moe"), **sizes)
    built = build_model(arch, settings, context, with_mtp)
    init_fresh(arch, worlds.shard_of(context), built.trunk, built.mtp, seed=0)
    return build_state(built, context, worlds.OPTIM, 10, PLAIN_DDP)


def pack(
    lengths: tuple[int, ...], padding: tuple[bool, ...] | None = None, seed: int = 3, vocab: int = 512
) -> TokenBatch:
    """Random tokens with about a fifth of them no targets."""
    generator = torch.Generator().manual_seed(seed)
    packed = PackedLayout.build(lengths, padding)
    ids = torch.randint(0, vocab, (packed.n_tokens,), generator=generator)
    names = tuple(f"doc{index}" for index in range(len(lengths)))
    return TokenBatch(ids, torch.rand(packed.n_tokens, generator=generator) > 0.2, packed, names)


def objective(chunk_tokens: int | None = 16, **mtp: Any) -> PretrainObjective:
    return PretrainObjective(MtpConfig(**{"loss_scale": 0.3, **mtp}), chunk_tokens=chunk_tokens)


def named_chunks(state: TrainState) -> list[tuple[str, DistributedDataParallel]]:
    return list(zip(("trunk", "mtp")[: len(state.chunks)], state.chunks, strict=True))


def main_grads(state: TrainState) -> dict[str, Tensor]:
    """The gradient buffers, copied; names start with "trunk." or "mtp."."""
    return {
        f"{group}.{name}": parameter.main_grad.clone()
        for group, chunk in named_chunks(state)
        for name, parameter in chunk.module.named_parameters()
    }


def clear_gradients(state: TrainState) -> None:
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()


def weights(state: TrainState) -> dict[str, Tensor]:
    """Parameters and expert biases, copied."""
    tensors = {}
    for group, chunk in named_chunks(state):
        named = [*chunk.module.named_parameters(), *chunk.module.named_buffers()]
        tensors |= {f"{group}.{n}": x.detach().clone() for n, x in named if "local_tokens" not in n}
    return tensors


@dataclass
class Poisoned:
    """An objective whose loss of the microbatch that holds `document` is `value`."""

    inner: Objective
    document: str
    value: float

    def count(self, batch: TokenBatch) -> dict[str, int]:
        return self.inner.count(batch)

    def denominators(self) -> dict[str, str]:
        return self.inner.denominators()

    def __call__(self, state: TrainState, batch: TokenBatch, counts: Mapping[str, float]) -> LossTerms:
        terms = self.inner(state, batch, counts)
        return terms._replace(total=terms.total * self.value) if self.document in batch.document_ids else terms
