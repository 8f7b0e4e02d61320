"""How much of a model a training benchmark can hold on every rank."""

from bailing_mtp.config import BenchmarkConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.model.build import BuiltModel, build_on_meta
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.activations import FP32
from bailing_mtp.training.memory_plan import GIB, count_model, optimizer_states

from .session import Source, model_settings


def cut_to_memory(config: BenchmarkConfig, arch: Architecture, context: ParallelContext, memory: int) -> Architecture:
    """The same model with as many whole layer groups as leave `reserve_gb` beside weights and optimizer."""

    def with_layers(n: int) -> Architecture:
        return Architecture.from_hf(dict(arch.hf_config) | {"num_hidden_layers": n}, "model.architecture")

    if config.layers is not None:
        return with_layers(config.layers)
    settings, room = model_settings(config.model, random_source(arch)), memory - config.reserve_gb * GIB
    for n in range(arch.num_layers, arch.layer_group_size, -arch.layer_group_size):
        if _held_bytes(config, build_on_meta(with_layers(n), settings, context), context) <= room:
            return with_layers(n)
    return with_layers(arch.layer_group_size)


def _held_bytes(config: BenchmarkConfig, built: BuiltModel, context: ParallelContext) -> int:
    """Weights, gradients and optimizer states of this rank, as a run's memory plan counts them."""
    counts = count_model(built.modules)
    states = optimizer_states(counts, config.optim, context.dp, context.world_size // context.ep)
    return counts.weight_bytes + counts.trained * FP32 + sum(states)


def random_source(arch: Architecture) -> Source:
    return Source(arch=arch, directory=None, holds_mtp=False, router_dtype=None)
