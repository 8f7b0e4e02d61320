"""AdamW with 8-bit moments and no master weights (Dettmers et al., arXiv 2110.02861): torchao's, on DDP's gradients.

bf16 weights take each update by stochastic rounding, so that updates below their resolution are right on average.
Gradients stay where DDP accumulates them, in fp32. torchao compiles one update for each shape that it meets, so it is
given flat pieces of one size (training/pieces.py) instead of parameters. Parameters of fewer than SMALL elements
(norms, A_log, dt_bias) have fp32 moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, _get_param_groups, get_standard_config_overrides
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, copy_optimizer_param_metadata
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from torch import Tensor, nn

from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.pieces import BLOCK, Part, Piece, cut

PIECE_ELEMENTS = 2**25
"""Large enough that launches cost nothing beside memory traffic, small enough for a buffer of one piece."""
SMALL = 4096


class RankState(NamedTuple):
    """Elements start.. of a state that belongs to a parameter as this rank holds it."""

    parameter: nn.Parameter
    name: str
    start: int
    size: int
    """Of the whole state."""
    values: Tensor
    """A flat view."""


@dataclass(frozen=True)
class _Lane:
    """Parameters of one group and dtype, flat, and the pieces that they are updated in."""

    group: dict[str, Any]
    mains: list[Tensor]
    pieces: list[Piece]
    leaves: list[Tensor]
    """What torchao updates, for each piece: a view of a parameter, or the buffer that the packed pieces share."""


class PackedAdamW8bit(torch.optim.Optimizer):
    """`groups`: as torch.optim takes them, of tensors that `flat_main` made, all on one device.

    A tensor's fp32 `grad` must be there at every step. `group["step"]` counts updates.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, piece_elements: int) -> None:
        from torchao.optim import AdamW8bit

        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay, "step": 0})
        self._lanes = [lane for group in self.param_groups for lane in _lanes(group, piece_elements)]
        self._device = self._lanes[0].mains[0].device
        self._adam = AdamW8bit(
            [{"params": lane.leaves, "lr": self._scalar(config.lr)} for lane in self._lanes],
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            block_size=BLOCK,
            bf16_stochastic_round=True,
        )
        for lane in self._lanes:
            for leaf in lane.leaves:
                self._adam.state[leaf] = self._zero_state(leaf, lane.mains[0].numel() < SMALL)

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters, whose noise depends on nothing but the number of the update."""
        for group in self.param_groups:
            group["step"] += 1
        for lane, inner in zip(self._lanes, self._adam.param_groups, strict=True):
            inner["lr"].fill_(lane.group["lr"])
            inner["weight_decay"] = lane.group["weight_decay"]
        with _seeded(self._device, self.param_groups[0]["step"]), _compiled_on_gpu(self._device):
            for lane in self._lanes:
                self._step_in_place(lane)
                self._step_packed(lane)

    def set_steps(self, n_steps: int) -> None:
        """Count on from `n_steps` updates."""
        for group in self.param_groups:
            group["step"] = n_steps
        for state in self._adam.state.values():
            state["step"].fill_(n_steps)

    def rank_states(self) -> Iterator[RankState]:
        """Every element of the moments, as the codes and scales that stand for them."""
        for lane in self._lanes:
            for piece, leaf in zip(lane.pieces, lane.leaves, strict=True):
                for moment in ("exp_avg", "exp_avg_sq"):
                    state = self._adam.state[leaf][moment]
                    for part in piece.parts:
                        yield from _rank_states(lane.mains[part.index], part, moment, state)

    def _step_in_place(self, lane: _Lane) -> None:
        there = [(piece, leaf) for piece, leaf in zip(lane.pieces, lane.leaves, strict=True) if piece.in_place]
        for piece, leaf in there:
            (part,) = piece.parts
            leaf.grad = lane.mains[part.index].grad[part.start : part.stop]
        if there:
            self._adam.step()
        for _, leaf in there:
            leaf.grad = None

    def _step_packed(self, lane: _Lane) -> None:
        for piece, leaf in zip(lane.pieces, lane.leaves, strict=True):
            if piece.in_place:
                continue
            leaf.grad = torch.zeros_like(leaf, dtype=torch.float32)
            weights = [lane.mains[part.index][part.start : part.stop] for part in piece.parts]
            grads = [lane.mains[part.index].grad[part.start : part.stop] for part in piece.parts]
            torch._foreach_copy_(_places(leaf, piece), weights)
            torch._foreach_copy_(_places(leaf.grad, piece), grads)
            self._adam.step()
            torch._foreach_copy_(weights, _places(leaf, piece))
            leaf.grad = None

    def _zero_state(self, leaf: Tensor, is_small: bool) -> dict[str, Any]:
        from torchao.optim.subclass_8bit import OptimState8bit

        def zeros(signed: bool) -> Tensor:
            if is_small:
                return torch.zeros_like(leaf, dtype=torch.float32)
            state = OptimState8bit.zeros(leaf.shape, signed, BLOCK, self._device, torch.float32)
            # Elements that belong to no parameter stay zero whatever the scale of their block, also of a loaded one.
            state.codes.fill_(int(state.qmap.abs().argmin()))
            return state

        return {"step": self._scalar(0.0), "exp_avg": zeros(signed=True), "exp_avg_sq": zeros(signed=False)}

    def _scalar(self, value: float) -> Tensor:
        # On the device: a scalar of the host would put code for the host into the compiled update.
        return torch.tensor(value, dtype=torch.float32, device=self._device)


def build_adamw8bit(
    chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, context: ParallelContext
) -> ChainedOptimizer:
    """The optimizer of all chunks, with megatron-core's groups, gradient norms and clipping.

    Every gradient must be whole on this rank: dp = 1, of experts too (config.checks.check_optimizer).
    """
    groups = _get_param_groups(list(chunks), config, get_standard_config_overrides(config))
    flat = [{**group, "params": [flat_main(x) for x in group["params"]]} for group in groups]
    part = FP32Optimizer(PackedAdamW8bit(flat, config, PIECE_ELEMENTS), config, init_state_fn=None)
    part.grad_stats_parallel_group = context.groups.intra_dist_opt
    part.tp_group, part.expert_tp_group = context.groups.tp, context.groups.expt_tp
    return ChainedOptimizer([part])


def flat_main(parameter: nn.Parameter) -> Tensor:
    """A flat view of a parameter under DDP, with what megatron-core's optimizer wants to know of it."""
    main = parameter.detach().view(-1)
    copy_tensor_model_parallel_attributes(main, parameter)
    copy_optimizer_param_metadata(main, parameter)
    main.grad_dtype = torch.float32
    main.main_grad = parameter.main_grad.view(-1)
    main.parameter = parameter
    return main


def _lanes(group: dict[str, Any], piece_elements: int) -> Iterator[_Lane]:
    by_kind: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for main in group["params"]:
        by_kind.setdefault((main.dtype, main.numel() < SMALL), []).append(main)
    for mains in by_kind.values():
        pieces = cut([main.numel() for main in mains], piece_elements)
        packed_elements = max((piece.size for piece in pieces if not piece.in_place), default=0)
        buffer = torch.zeros(packed_elements, dtype=mains[0].dtype, device=mains[0].device)
        leaves = []
        for piece in pieces:
            (index, start, stop, _), *_ = piece.parts
            leaf = (mains[index][start:stop] if piece.in_place else buffer).detach()
            leaf.grad_dtype = torch.float32
            leaves.append(leaf)
        yield _Lane(group, mains, pieces, leaves)


def _places(flat: Tensor, piece: Piece) -> list[Tensor]:
    return [flat[part.begin : part.begin + part.stop - part.start] for part in piece.parts]


def _rank_states(main: Tensor, part: Part, moment: str, state: Tensor) -> Iterator[RankState]:
    n, size = part.stop - part.start, main.numel()
    if not hasattr(state, "codes"):
        yield RankState(main.parameter, moment, part.start, size, state[part.begin : part.begin + n])
        return
    yield RankState(main.parameter, f"{moment}.codes", part.start, size, state.codes[part.begin : part.begin + n])
    first, n_blocks = part.begin // BLOCK, -(-n // BLOCK)
    scales = state.scale[first : first + n_blocks]
    yield RankState(main.parameter, f"{moment}.scales", part.start // BLOCK, -(-size // BLOCK), scales)


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the device's generator begins at `seed`; afterwards it is where it was. All ranks draw the same, so
    that what tensor-parallel ranks hold in common stays equal."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _compiled_on_gpu(device: torch.device) -> contextlib.AbstractContextManager[None]:
    # On the CPU a C++ compiler would take longer than small models train.
    return contextlib.nullcontext() if device.type == "cuda" else torch.compiler.set_stance("force_eager")
