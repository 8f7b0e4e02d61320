"""Between host and device without waiting: values go out through pinned memory, results come back behind an event.

On a CPU both are plain tensors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bailing_mtp.contracts import batch


def to_device(values: Sequence[object] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Host values on the device; the copy is queued, nothing waits for it."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return batch.to_device(host, device)


def all_to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """int64 tensors of the host on the device, in one queued copy."""
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    assert flat.dtype is torch.int64
    parts = to_device(flat, device).split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


class Pending:
    """Device values on their way to the host; the source may change as soon as this is made."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._arrived_s = 0.0
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event(enable_timing=True)
            self._arrived.record()
        else:
            self._host = values.clone()
            self._arrived_s = time.monotonic()

    def wait(self) -> Tensor:
        """The values, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host

    def seconds_since(self, earlier: Pending) -> float:
        """Between the arrivals of two that were waited for: what the device, or on a CPU this process, took."""
        if self._arrived is None or earlier._arrived is None:
            return self._arrived_s - earlier._arrived_s
        return earlier._arrived.elapsed_time(self._arrived) / 1000
