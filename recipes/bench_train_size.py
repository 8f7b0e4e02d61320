"""How much of a model a training benchmark can hold on every rank."""

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.model.build import BuiltModel, build_on_meta
from bailing_mtp.parallel.context import ParallelContext

from .session import Source, model_settings

BYTES_PER_PARAMETER = 6
"""bf16 weight and fp32 gradient."""
STATE_BYTES_PER_PARAMETER = {"adamw": 4 + 8, "adamw8bit": 2 + 2 * 4 / 256}
"""fp32 master weight and two fp32 moments, which the ranks with the same parameter share; or two 8-bit moments whose
blocks of 256 have an fp32 scale each."""


def cut_to_memory(config: BenchmarkConfig, arch: Architecture, context: ParallelContext, memory: int) -> Architecture:
    """The same model with as many whole layer groups as leave `reserve_gb` beside weights and optimizer."""

    def with_layers(n: int) -> Architecture:
        return Architecture.from_hf(dict(arch.hf_config) | {"num_hidden_layers": n}, "model.architecture")

    if config.layers is not None:
        return with_layers(config.layers)
    settings, room = model_settings(config.model, random_source(arch)), memory - config.reserve_gb * 2**30
    for n in range(arch.num_layers, arch.layer_group_size, -arch.layer_group_size):
        if _held_bytes(config, build_on_meta(with_layers(n), settings, context), context) <= room:
            return with_layers(n)
    return with_layers(arch.layer_group_size)


def _held_bytes(config: BenchmarkConfig, built: BuiltModel, context: ParallelContext) -> float:
    """Weights, gradients and optimizer states of this rank."""
    held_bytes, state_bytes = 0.0, STATE_BYTES_PER_PARAMETER[config.optim.name]
    for parameter in (p for module in built.modules for p in module.parameters()):
        is_shared = getattr(parameter, "allreduce", True)
        n_ranks = context.dp if is_shared else context.groups.expt_dp.size()
        held_bytes += parameter.numel() * (BYTES_PER_PARAMETER + state_bytes / n_ranks)
    return held_bytes


def random_source(arch: Architecture) -> Source:
    return Source(arch=arch, directory=None, holds_mtp=False, router_dtype=None)
