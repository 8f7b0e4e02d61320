"""Where the time of a training step goes: by part of the model, and by kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.losses.heads import HeadOptions, chosen_chunk_tokens, head_outputs
from bailing_mtp.training.state import TrainState

PARTS = {
    "KdaMixer": "kda", "GatedMla": "attention", "GroupedMoeLayer": "experts", "MoELayer": "experts",
    "SwiGluMlp": "dense mlp", "RmsNorm": "norms",
}  # fmt: skip
KERNELS_SHOWN = 30


class _Spans:
    """CUDA events around modules, forward and backward."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], torch.cuda.Event] = {}
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, module: nn.Module, way: str) -> None:
        self._open[(id(module), way)] = self._now()

    def end(self, module: nn.Module, way: str, part: str) -> None:
        begun = self._open.pop((id(module), way), None)
        if begun is not None:
            self._spans.append((part, begun, self._now()))

    def seconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for part, begun, ended in self._spans:
            totals[part] = totals.get(part, 0.0) + begun.elapsed_time(ended) / 1e3
        return totals

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def _watched(state: TrainState, spans: _Spans) -> Iterator[None]:
    handles = []
    for layer in state.trunk_module.decoder.layers:
        for module in (layer.input_layernorm, layer.self_attention, layer.pre_mlp_layernorm, layer.mlp):
            part = PARTS[type(module).__name__]

            def forward_pre(module: nn.Module, *_: Any) -> None:
                spans.begin(module, "forward")

            def forward(module: nn.Module, *_: Any, part: str = part) -> None:
                spans.end(module, "forward", part)

            def backward_pre(module: nn.Module, *_: Any) -> None:
                spans.begin(module, "backward")

            def backward(module: nn.Module, *_: Any, part: str = part) -> None:
                spans.end(module, "backward", part)

            handles += [
                module.register_forward_pre_hook(forward_pre),
                module.register_forward_hook(forward),
                module.register_full_backward_pre_hook(backward_pre),
                module.register_full_backward_hook(backward),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def part_seconds(state: TrainState, passes: Callable[[], object]) -> dict[str, float]:
    """Seconds of forward and backward by part of the trunk's layers, in one run of `passes`.

    The events also count waits for the host, if there are any.
    """
    spans = _Spans()
    with _watched(state, spans):
        passes()
    return spans.seconds()


def head_seconds(state: TrainState, batch: TokenBatch, timed: Callable[[Callable[[], object]], float]) -> float:
    """Seconds of the trunk's head and loss alone, forward and backward."""
    weight_vH, kernels = state.trunk_module.head_weight, state.trunk_module.head_kernels
    batch = batch.to(weight_vH.device)
    hidden_TH = torch.randn(batch.layout.n_tokens, weight_vH.shape[1], device=weight_vH.device, dtype=weight_vH.dtype)
    group = state.context.tp_group if state.context.tp > 1 else None
    leaf_vH = weight_vH.detach().requires_grad_()
    options = HeadOptions(chosen_chunk_tokens(weight_vH.shape[0], kernels), kernels=kernels)

    def run() -> None:
        leaf_vH.grad = None
        outputs = head_outputs(hidden_TH.requires_grad_(), (), leaf_vH, batch, group, options)
        outputs.log_prob_T.mean().backward()

    return timed(run)


def kernel_table(run: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels of one run that take the most time: name, calls, milliseconds."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        run()
        torch.cuda.synchronize()
    kernels = [x for x in recorded.key_averages() if x.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda x: -x.self_device_time_total)
    total_ms = sum(x.self_device_time_total for x in kernels) / 1e3
    rows = [
        {"kernel": x.key, "calls": x.count, "ms": round(x.self_device_time_total / 1e3, 3)}
        for x in kernels[:KERNELS_SHOWN]
    ]
    return [{"kernel": "all", "calls": sum(x.count for x in kernels), "ms": round(total_ms, 3)}, *rows]
