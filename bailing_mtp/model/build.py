"""Build the trunk and, when asked for, the MTP layer; count parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.model.mtp import MtpLayer
from bailing_mtp.model.settings import ModelSettings, check_fp8_device
from bailing_mtp.model.trunk import BailingModel
from bailing_mtp.parallel.context import ParallelContext


@dataclass(frozen=True)
class BuiltModel:
    """Modules with unfilled parameters; the weights package fills them."""

    trunk: BailingModel
    mtp: MtpLayer | None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.trunk,) if self.mtp is None else (self.trunk, self.mtp)


def build_model(
    arch: Architecture, settings: ModelSettings, context: ParallelContext, with_mtp: bool
) -> BuiltModel:
    """Allocate this rank's shards on its device.

    with_mtp asks for the MTP layer; ValueError if the architecture has none. Raises UserError where this GPU does
    not have the FP8 recipe of the settings.
    """
    check_fp8_device(settings.fp8, context.device)
    trunk = BailingModel(arch, settings, context)
    return BuiltModel(trunk, MtpLayer(arch, settings, context) if with_mtp else None)


def count_parameters(*modules: nn.Module) -> int:
    """Elements of all parameters and expert biases of this rank (an expert bias is a stored tensor too)."""
    count = 0
    for module in modules:
        count += sum(parameter.numel() for parameter in module.parameters())
        count += sum(buffer.numel() for name, buffer in module.named_buffers() if name.endswith("expert_bias"))
    return count


def build_on_meta(arch: Architecture, settings: ModelSettings, context: ParallelContext) -> BuiltModel:
    """The whole model without memory (device "meta"), to count and plan."""
    # On a context of a GPU every parameter would be made there, whatever the default device is.
    context = dataclasses.replace(context, device=torch.device("meta"))
    with context.device:
        return build_model(arch, settings, context, with_mtp=arch.num_mtp_layers > 0)
