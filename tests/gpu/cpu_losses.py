"""A tiny model trained on the CPU in fp32, for a GPU's losses to be held against: python -m tests.gpu.cpu_losses <file>

Writes the weights that it began with and the loss of every step. A process of its own: the CPU backend stands in for
torch.cuda, and random numbers differ between devices.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor

from bailing_mtp.config import MtpConfig, OptimConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.build import BuiltModel, build_model
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.objective import PretrainObjective
from bailing_mtp.training.state import build_state
from bailing_mtp.training.step import train_step
from bailing_mtp.weights.fresh import init_fresh
from bailing_mtp.weights.names import Shard
from tests.distributed.worlds import layout
from tests.model.test_presets import preset
from tests.mtp.models import pack

STEPS = 50


def architecture() -> Architecture:
    return dataclasses.replace(preset("tiny"), vocab_size=512)


def batches() -> list[TokenBatch]:
    return [pack((200, 56), vocab=64, seed=seed) for seed in range(STEPS)]


def tensors(built: BuiltModel) -> dict[str, Tensor]:
    """Parameters and expert biases."""
    return {
        f"{index}.{name}": tensor
        for index, module in enumerate(built.modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if "local_tokens" not in name
    }


def losses(built: BuiltModel, context: ParallelContext) -> list[float]:
    """The language model's loss at every step, with the joint MTP loss beside it."""
    state = build_state(built, context, OptimConfig(lr=1e-3), STEPS)
    objective = PretrainObjective(MtpConfig(loss_scale=0.3))
    return [train_step(state, [batch], objective).metrics["train/lm_loss"] for batch in batches()]


def main(target: Path) -> None:
    with layout(tp=1, ep=1) as context:
        settings = ModelSettings(torch.float32, torch.float32, expert_bias_rate=1e-3)
        built = build_model(architecture(), settings, context, with_mtp=True)
        init_fresh(built.trunk.arch, Shard(), built.trunk, built.mtp, seed=1)
        start = {name: tensor.detach().clone() for name, tensor in tensors(built).items()}
        torch.save({"weights": start, "losses": losses(built, context)}, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
