"""Bytes that a whole decode step cannot avoid, with the experts that it really touches.

n rows of a step, k drafts, S = k + 1; E experts.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.samples import Prompt
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.rollout.requests import Limits
from bailing_mtp.weights.view import KdaWeights, LayerWeights, MoeWeights, WeightsView, tensors_of

FP32_BYTES = 4
STEPS = 3
"""Eager steps before the one that is looked at."""


class Touched(NamedTuple):
    """Distinct experts of this rank in each expert layer's pass of one step: the draft's passes, the trunk, the
    refresh."""

    drafts: tuple[int, ...]
    trunk: tuple[int, ...]
    refresh: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Of the trunk's layers."""
        return sum(self.trunk) / max(1, len(self.trunk))


def touched_experts(
    view: WeightsView,
    context: ParallelContext,
    prompts: Sequence[Prompt],
    k: int,
    kernels: ModuleType,
    kernels_name: Literal["torch", "triton"] = "triton",
) -> Touched:
    """Runs a few steps of these prompts, those of all replicas, eagerly, and counts in the last. Collective."""
    prompts, n_local = prompts[context.dp_rank :: context.dp], view.arch.num_experts or 0
    n_local //= context.ep
    seen: list[Tensor] = []

    def counted(*arguments: Tensor | int | float) -> tuple[Tensor, Tensor]:
        ids_Rk, weights_Rk = kernels.route(*arguments)
        seen.append(ids_Rk.clone())
        return ids_Rk, weights_Rk

    counting = ModuleType("counting")
    vars(counting).update({name: getattr(kernels, name) for name in kernels.__all__}, route=counted)
    config = RolloutConfig(speculative_tokens=k, max_running=len(prompts), kernels=kernels_name)
    engine = RolloutEngine(lambda: view, context, config, tell=lambda line: None, kernels=counting)
    tokens = max(len(prompt.prompt_ids) + prompt.sampling.max_new_tokens for prompt in prompts)
    session = engine.open(Limits(tokens, len(prompts), n_templates=0))
    for prompt in prompts:
        session.submit(prompt)
    # Prompts come in several prefills, with a step after each.
    while session.stats.prefilled_tokens < sum(len(prompt.prompt_ids) for prompt in prompts):
        session.step()
    for _ in range(STEPS):
        seen.clear()
        session.step()
    session.drain()
    engine.release()
    torch.cuda.empty_cache()
    first = context.ep_rank * n_local
    counts = [int(ids[(ids >= first) & (ids < first + n_local)].unique().numel()) for ids in seen]
    n_refresh = int(k > 0 and isinstance(view.mtp and view.mtp.layer.mlp, MoeWeights))
    n_drafts = (k - 1) * n_refresh if k else 0
    end = len(counts) - n_refresh
    return Touched(tuple(counts[:n_drafts]), tuple(counts[n_drafts:end]), tuple(counts[end:]))


class StepBytes:
    """Floors of one model's decode step on one rank."""

    def __init__(self, view: WeightsView, expert_slices: int = 1) -> None:
        """expert_slices: ranks that share the width of an expert."""
        self._view, self._arch, self._expert_slices = view, view.arch, expert_slices
        self._item_bytes = view.head_vH.element_size()

    def step(self, n: int, k: int, context_tokens: int, touched: Touched) -> int:
        """Dense weights once a pass, touched experts, the head once and once a draft, states in and out, latents."""
        view = self._view
        trunk = sum(_dense_bytes(layer) for layer in view.layers) + self._experts(touched.trunk)
        head = (1 + k) * _bytes(view.head_vH)
        mtp = 0
        if k and view.mtp is not None:
            passes = _dense_bytes(view.mtp.layer) + _bytes(view.mtp.eh_proj_H2H)
            mtp = k * passes + self._experts(touched.drafts) + self._experts(touched.refresh)
        return trunk + head + mtp + n * self._row(k, context_tokens)

    def _experts(self, counts: Sequence[int]) -> int:
        arch = self._arch
        width = arch.moe_intermediate_size // self._expert_slices
        return sum(counts) * 3 * arch.hidden_size * width * self._item_bytes

    def _row(self, k: int, context_tokens: int) -> int:
        """State read and written, and the cached latents that each pass attends to."""
        view, arch = self._view, self._arch
        n_kda = sum(isinstance(layer.mixer, KdaWeights) for layer in view.layers)
        heads = next((layer.mixer.A_log_h.numel() for layer in view.layers if isinstance(layer.mixer, KdaWeights)), 0)
        state = 2 * n_kda * heads * arch.kda_head_dim * arch.v_head_dim * FP32_BYTES
        latents = (len(view.layers) - n_kda + k) * context_tokens * (arch.kv_lora_rank + arch.qk_rope_head_dim)
        return state + latents * self._item_bytes


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dense_bytes(layer: LayerWeights) -> int:
    """Everything that a token of any routing reads."""
    total = sum(_bytes(tensor) for tensor in tensors_of(layer))
    if isinstance(layer.mlp, MoeWeights):
        total -= _bytes(layer.mlp.gate_up_e2FH) + _bytes(layer.mlp.down_eHF)
    return total
