"""Bytes that autograd saves in one forward: of real CPU tensors, or of the GPU's path on tensors without memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bailing_mtp.config import MtpConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.sites import DraftSites, HeadRows
from bailing_mtp.model import specs
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from tests.mtp import models


def saved_bytes(modules: tuple[nn.Module, ...], forward: Callable[[], object]) -> int:
    """Of unique storages, parameters left out."""
    parameters = {p.untyped_storage()._cdata for module in modules for p in module.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(x.untyped_storage().nbytes() for place, x in saved.items() if place not in parameters)


def on_cpu(
    arch: Architecture, settings: ModelSettings, mtp: MtpConfig, lengths: tuple[int, ...], context: ParallelContext
) -> int:
    """Of a pretraining loss, computed."""
    built = build_model(arch, settings, context, with_mtp=True)
    init_fresh(arch, Shard(), built.trunk, built.mtp, seed=0)
    return _of_loss(built, mtp, models.pack(lengths, vocab=arch.vocab_size), context)


def on_fake_gpu(
    arch: Architecture, settings: ModelSettings, mtp: MtpConfig, lengths: tuple[int, ...], context: ParallelContext
) -> int:
    """The same of the GPU's path: torch says which storages an operation on a GPU saves, and nothing is computed.
    Triton kernels are replaced by their twins, and fla's functions by ones that save the same."""
    batch = models.pack(lengths, vocab=arch.vocab_size)
    nowhere = dataclasses.replace(context, device=torch.device("meta"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(specs.KDA_KERNELS, "fla", "tests.training.fla_saves")
        patch.setitem(specs.ELEMENTWISE_KERNELS, "triton", "bailing_mtp.kernels.reference.train")
        patch.setattr(specs, "HEAD_KERNELS", "bailing_mtp.kernels.reference.head")
        # Sites are told apart by values, which nothing here has: every one counts.
        patch.setattr(DraftSites, "of", lambda *_: None)
        patch.setattr(HeadRows, "of", lambda batch, n, _: HeadRows.every(sum(lengths), n, batch.input_ids_T.device))
        patch.setattr(Tensor, "pin_memory", lambda x: x)
        with FakeTensorMode(allow_non_fake_inputs=True):
            with torch.device("cuda"):
                built = build_model(arch, settings, nowhere, with_mtp=True)
            _move_buffers(built)
            return _of_loss(built, mtp, batch.to(torch.device("cuda")), context)


def _move_buffers(built: BuiltModel) -> None:
    """megatron-core makes them on its current device, which is the CPU here."""
    for module in (part for whole in built.modules for part in whole.modules()):
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda"))


def _of_loss(built: BuiltModel, mtp: MtpConfig, batch: Any, context: ParallelContext) -> int:
    state = SimpleNamespace(
        trunk=built.trunk, trunk_module=built.trunk, mtp=built.mtp, mtp_module=built.mtp, context=context
    )
    counts = {f"sites_depth{depth}": 1.0 for depth in range(4)}
    objective = PretrainObjective(mtp)
    return saved_bytes(built.modules, lambda: objective(state, batch, counts).total)
