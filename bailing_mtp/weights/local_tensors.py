"""From the name table to a module's own tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bailing_mtp.weights.names import ParamMaps, Piece


def local_tensors(module: nn.Module, maps: ParamMaps) -> dict[str, Tensor]:
    """The module's parameters and mapped buffers by name, proven to be what the table describes.

    Raises RuntimeError when the module and the table differ: a parameter that no checkpoint tensor fills
    would keep its random start.
    """
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    wanted_buffers = {name for name, param in maps.items() if param.is_buffer}
    unmapped = sorted(set(parameters) - (set(maps) - wanted_buffers))
    absent = sorted((set(maps) - wanted_buffers - set(parameters)) | (wanted_buffers - set(buffers)))
    if unmapped or absent:
        raise RuntimeError(
            f"{type(module).__name__}: not in the name table: {unmapped}; not in the module: {absent}"
        )
    tensors = {name: (buffers if name in wanted_buffers else parameters)[name].detach() for name in maps}
    for name, param in maps.items():
        _check(name, tensors[name], param.shape, param.keep_fp32)
        filled = sum(math.prod(piece.held_shape) for piece in param.pieces)
        assert filled == tensors[name].numel(), (
            f"{name}: its pieces fill {filled} of {tensors[name].numel()} elements"
        )
    return tensors


def piece_view(tensor: Tensor, piece: Piece) -> Tensor:
    """The part of a local tensor that one HF tensor fills, as a view in the local shape."""
    view = tensor
    for dim, start, stop in piece.lands:
        view = view.narrow(dim, start, stop - start)
    return view


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], keep_fp32: bool) -> None:
    problems = []
    if tuple(tensor.shape) != shape:
        problems.append(f"is {list(tensor.shape)}, the name table says {list(shape)}")
    if keep_fp32 and tensor.dtype != torch.float32:
        problems.append(f"is {tensor.dtype}, it must stay torch.float32")
    if tensor.is_meta:
        problems.append("is on the meta device")
    if problems:
        raise RuntimeError(f"{name}: " + "; ".join(problems))
