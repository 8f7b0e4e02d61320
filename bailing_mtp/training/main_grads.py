"""The first gradient of a step is written into DDP's fp32 buffer, later ones are added.

megatron-core clears the buffer before every step and then adds each gradient to it, which moves 14 bytes a parameter
for a bf16 gradient where writing it moves 6. That stays where its fused weight gradients add to the buffer themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn


def watch_first_gradients(chunk: DistributedDataParallel) -> None:
    """Once, when DDP has been built: the hooks run before DDP's, whenever they were put on."""
    for parameter in chunk.params_with_grad:
        parameter.main_grad_is_old = False
        if not chunk.config.gradient_accumulation_fusion:
            parameter.register_post_accumulate_grad_hook(_write_first)


def begin_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Make the next gradient of every parameter the first of a step."""
    for chunk in chunks:
        if chunk.config.gradient_accumulation_fusion:
            chunk.zero_grad_buffer()
            continue
        for parameter in chunk.params_with_grad:
            parameter.main_grad_is_old, parameter.grad_added_to_main_grad = True, False
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            bucket_group.reset()


def clear_untouched(chunks: Iterable[DistributedDataParallel]) -> None:
    """Zero what the step's backward passes did not reach."""
    for chunk in chunks:
        for parameter in chunk.params_with_grad:
            if parameter.main_grad_is_old:
                parameter.main_grad.zero_()
                parameter.main_grad_is_old = False


def _write_first(parameter: nn.Parameter) -> None:
    # DDP's hook, which comes next, adds the gradient unless it is told that this has been done.
    parameter.grad_added_to_main_grad = parameter.main_grad_is_old
    if parameter.main_grad_is_old:
        # Between two dtypes copy_ moves one element at a time; this moves several.
        torch._foreach_copy_([parameter.main_grad], [parameter.grad])
        parameter.main_grad_is_old = False
