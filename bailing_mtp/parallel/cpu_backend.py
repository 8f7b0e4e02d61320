"""What megatron-core 0.19 needs of `torch.cuda` on a machine without a GPU, in one place.

megatron-core asks `torch.cuda` for the current device, streams, events and RNG states, and names the
device "cuda" literally in its optimizer. On CPU with gloo all of that has a plain meaning; `install`
supplies it once per process. It refuses to run where a GPU is present, so no GPU run ever sees it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Event:
    """A CUDA event on a device where every operation is finished when its call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """A CUDA stream on a device that has only one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event if event is not None else _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def install() -> None:
    """Let megatron-core run on CPU tensors in this process. Calling it again changes nothing.

    Raises RuntimeError on a machine with a GPU.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU backend must not be installed on a machine with a GPU")
    if torch.cuda.Stream is _Stream:
        return
    _replace_cuda_calls()
    _replace_megatron_helpers()


def _replace_cuda_calls() -> None:
    cuda, stream = torch.cuda, _Stream()
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.current_device = lambda: _CPU
    cuda.current_stream = lambda *_, **__: stream
    cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = lambda *_, **__: None
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.random.get_rng_state = cuda.get_rng_state
    torch.Tensor.cuda = lambda self, *_, **__: self


def _replace_megatron_helpers() -> None:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # Forking the RNG tracker swaps the one CPU generator, which the tracker takes for an accident.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    token_dispatcher.maybe_move_tensor_to_cpu = _host_copy(token_dispatcher.maybe_move_tensor_to_cpu)


def _host_copy(on_gpu: Callable[..., Any]) -> Callable[..., Any]:
    # The original converts only CUDA tensors, so on CPU all-to-all got tensors for split sizes.
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and as_numpy and not tensor.is_cuda:
            return tensor.numpy()
        return on_gpu(tensor, as_numpy, record_stream)

    return maybe_move_tensor_to_cpu


class _LiteralCuda(TorchFunctionMode):
    """Reads the literal device "cuda" as the CPU, and answers `Tensor.type()` as a GPU tensor would."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextlib.contextmanager
def literal_cuda_is_cpu() -> Iterator[None]:
    """Scope for megatron-core code that writes device="cuda" (optimizer, gradient clipping)."""
    with _LiteralCuda():
        yield
