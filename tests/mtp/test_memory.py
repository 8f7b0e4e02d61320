"""What the MTP loss keeps for backward, and how many chunks of logits live at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bailing_mtp.config import PretrainConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.losses.chunked import LOGITS_PER_CHUNK, chunk_tokens_for
from bailing_mtp.losses.heads import HeadOptions, head_outputs
from bailing_mtp.model.build import build_model
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from recipes.compose import compose
from tests.distributed import worlds
from tests.mtp import models

VOCAB = 32768
MIB = 2**20


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    """`model=tiny` with a 32k vocabulary."""
    plain = compose(PretrainConfig, "pretrain", ["model=tiny", f"model.architecture.vocab_size={VOCAB}"])
    arch = Architecture.from_hf(plain["model"]["architecture"], "conf/model/tiny.yaml", strict=True)
    with worlds.layout(tp=1, ep=1) as context:
        built = build_model(arch, worlds.FP32, context, with_mtp=True)
        init_fresh(arch, Shard(), built.trunk, built.mtp, seed=0)
        yield build_state(built, context, worlds.OPTIM, 10, models.PLAIN_DDP)


def _saved(state: TrainState, batch: TokenBatch, objective: PretrainObjective) -> list[Tensor]:
    """One tensor of each storage that the forward saves for backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for chunk in state.chunks for p in chunk.module.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        terms = objective(state, batch, objective.count(batch))
    assert terms.total.requires_grad
    return [tensor for pointer, tensor in saved.items() if pointer not in parameters]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("lengths", [(256,) * 4, (1024,), (300, 100, 500, 124)])
def test_saved_bytes_grow_by_at_most_15_percent(state: TrainState, lengths: tuple[int, ...]):
    batch = models.pack(lengths, vocab=VOCAB)
    off = _saved(state, batch, models.objective(None, loss_scale=None))
    # 149.8 MiB when this was written: a larger trunk must not pay for a smaller ratio.
    assert _bytes(off) < 153 * MIB
    for mtp in ({}, {"objective": "soft"}, {"objective": "soft", "detach": True}):
        on = _saved(state, batch, models.objective(None, **mtp))
        assert _bytes(off) < _bytes(on) <= 1.15 * _bytes(off), f"{mtp}: {_bytes(on) / _bytes(off):.3f}"


def test_no_logits_of_a_whole_pack_are_saved(state: TrainState):
    batch = models.pack((256,) * 4, vocab=VOCAB)
    for mtp in ({"loss_scale": None}, {}, {"objective": "soft", "depth": 2}):
        saved = _saved(state, batch, models.objective(None, **mtp))
        largest = max(tensor.untyped_storage().nbytes() for tensor in saved)
        assert largest < 1024 * VOCAB, f"{mtp}: a storage of {largest / MIB:.0f} MiB"


class _Live(TorchDispatchMode):
    """Counts the storages of at least `elements` fp32 elements that are alive at once."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._least_bytes, self._alive, self.most = 4 * elements, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self._least_bytes:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage)
        self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
        self.most = max(self.most, len(self._alive))
        return out


def _live_chunks(n_depths: int, objective: str) -> int:
    """Most [t, v] fp32 tensors alive in one forward and backward of the heads, t tokens of a chunk."""
    chunk_tokens, vocab, hidden, tokens = 64, 512, 4, 320
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(tokens, hidden, generator=generator).requires_grad_() for _ in range(n_depths + 1)]
    head_VH = torch.randn(vocab, hidden, generator=generator).requires_grad_()
    batch = models.pack((tokens,))
    options = HeadOptions(chunk_tokens=chunk_tokens, objective=objective)
    with _Live(chunk_tokens * vocab) as live:
        outputs = head_outputs(streams[0], tuple(streams[1:]), head_VH, batch, None, options)
        (sum(depth.loss_T.sum() for depth in outputs.depths) - outputs.log_prob_T.sum()).backward()
    return live.most


@pytest.mark.parametrize("objective", ["hard", "soft"])
def test_mtp_adds_less_than_a_gigabyte_of_live_logits(objective: str):
    """A chunk of fp32 logits is at most 256 MiB whatever the sizes, so three more of them are 0.75 GiB."""
    assert chunk_tokens_for(157184) * 157184 <= LOGITS_PER_CHUNK == 2**28 // 4
    plain, with_mtp = _live_chunks(0, "hard"), _live_chunks(1, objective)
    assert 2 <= plain < with_mtp <= plain + 3, f"{plain} without, {with_mtp} with"
    # A further depth adds its logits and their gradient.
    assert _live_chunks(3, objective) <= with_mtp + 2 * 2
