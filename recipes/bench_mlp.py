"""Benchmark cases of norms, projections of few rows, and the mixture of experts.

Shape legend: R rows, H hidden size, N outputs, F width, E experts, k experts per row.
"""

import math

import torch
from torch import Tensor

from bailing_mtp.kernels.reference import decode as twin
from bailing_mtp.kernels.triton.linear import MOST_OUTPUTS, MOST_ROWS

from .bench_case import TOLERANCE, Call, Case, Draw, Workload, differing_rows, worst_error

FLIPPED_ROWS = 0.01
"""Share of rows that may choose other experts than the twin, since scores differ by rounding."""


def mlp_cases(load: Workload, n: int, S: int) -> list[Case]:
    """All kernels outside attention and sampling, at one shape."""
    arch, R = load.arch, n * S
    cases = [
        Case("rms_norm", n, S, lambda draw: _rms_norm(load, draw, R)),
        Case("add_rms_norm", n, S, lambda draw: _add_rms_norm(load, draw, R)),
    ]
    widths = {"dense": arch.intermediate_size, "shared": arch.shared_intermediate_size}
    for name, width in widths.items():
        if width is not None:
            cases.append(Case(f"swiglu {name}", n, S, lambda draw, width=width: _swiglu(load, draw, R, width)))
    if arch.num_experts is not None:
        cases.append(Case("route", n, S, lambda draw: _route(load, draw, R)))
        cases.append(Case("experts", n, S, lambda draw: _experts(load, draw, R)))
    for name, (inputs, outputs) in _projections(load).items():
        if R <= MOST_ROWS and (R == 1 or outputs <= MOST_OUTPUTS):
            sizes = (R, inputs, outputs)
            cases.append(Case(f"linear {name}", n, S, lambda draw, sizes=sizes: _linear(load, draw, *sizes)))
    return cases


def _projections(load: Workload) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of projections of different shape; more rows of them go to the library's product."""
    arch, shared = load.arch, load.arch.shared_intermediate_size
    shapes = {
        "kda in": (arch.hidden_size, sum(arch.kda_in_rows)),
        "kda out": (arch.num_heads * arch.v_head_dim, arch.hidden_size),
    }
    if shared is not None:
        shapes |= {"shared up": (arch.hidden_size, 2 * shared), "shared down": (shared, arch.hidden_size)}
    return shapes


def _rms_norm(load: Workload, draw: Draw, R: int) -> Call:
    H, eps = load.arch.hidden_size, load.arch.rms_norm_eps
    x_RH, weight_H = draw.normal(R, H), 1 + draw.normal(H, scale=0.2)

    def run() -> Tensor:
        return load.kernels.rms_norm(x_RH, weight_H, eps)

    def error() -> float:
        return worst_error([run()], [twin.rms_norm(x_RH, weight_H, eps)])

    return Call(run, error, load.floors.rms_norm(R), TOLERANCE[draw.dtype])


def _add_rms_norm(load: Workload, draw: Draw, R: int) -> Call:
    H, eps = load.arch.hidden_size, load.arch.rms_norm_eps
    x_RH, delta_RH, weight_H = draw.normal(R, H), draw.normal(R, H), 1 + draw.normal(H, scale=0.2)

    def run() -> tuple[Tensor, Tensor]:
        return load.kernels.add_rms_norm(x_RH, delta_RH, weight_H, eps)

    def error() -> float:
        return worst_error(run(), twin.add_rms_norm(x_RH, delta_RH, weight_H, eps))

    return Call(run, error, load.floors.add_rms_norm(R), TOLERANCE[draw.dtype])


def _swiglu(load: Workload, draw: Draw, R: int, width: int) -> Call:
    gate_RF, up_RF = draw.normal(R, 2 * width).chunk(2, dim=-1)

    def run() -> Tensor:
        return load.kernels.swiglu(gate_RF, up_RF, None)

    def error() -> float:
        return worst_error([run()], [twin.swiglu(gate_RF, up_RF, None)])

    return Call(run, error, load.floors.swiglu(R, width), TOLERANCE[draw.dtype])


def _route(load: Workload, draw: Draw, R: int) -> Call:
    arch, H, E = load.arch, load.arch.hidden_size, load.arch.num_experts
    tensors = (draw.normal(R, H), draw.normal(E, H, scale=H**-0.5), draw.normal(E, scale=0.1, dtype=torch.float32))
    numbers = (arch.num_groups, arch.groups_per_token, arch.experts_per_token, arch.routed_scaling_factor)

    def run() -> tuple[Tensor, Tensor]:
        return load.kernels.route(*tensors, *numbers)

    def error() -> float:
        (ids_Rk, weights_Rk), (their_ids_Rk, their_weights_Rk) = run(), twin.route(*tensors, *numbers)
        flipped_R = differing_rows(ids_Rk, their_ids_Rk)
        if flipped_R.double().mean().item() > FLIPPED_ROWS:
            return math.inf
        return worst_error([weights_Rk[~flipped_R]], [their_weights_Rk[~flipped_R]])

    return Call(run, error, load.floors.route(R), TOLERANCE[torch.float32])


def _experts(load: Workload, draw: Draw, R: int) -> Call:
    arch, H, E = load.arch, load.arch.hidden_size, load.arch.num_experts
    width, k = arch.moe_intermediate_size, arch.experts_per_token
    x_RH, ids_Rk = draw.normal(R, H), draw.choices(R, E, k)
    gate_up_E2FH, down_EHF = draw.normal(E, 2 * width, H, scale=H**-0.5), draw.normal(E, H, width, scale=width**-0.5)
    shared, shared_width = None, arch.shared_intermediate_size
    if shared_width is not None:
        shared_up = draw.normal(2 * shared_width, H, scale=H**-0.5)
        shared_down = draw.normal(H, shared_width, scale=shared_width**-0.5)
        shared = twin.SharedExpert(shared_up, shared_down, None, (0, shared_width))
    arguments = (
        x_RH, ids_Rk, draw.uniform(R, k), gate_up_E2FH, down_EHF, 0, (0, width), None, shared, draw.normal(R, H)
    )  # fmt: skip

    def run() -> Tensor:
        return load.kernels.experts(*arguments)

    def error() -> float:
        return worst_error([run()], [twin.experts(*arguments)])

    return Call(run, error, load.floors.experts(R, ids_Rk.unique().numel()), TOLERANCE[draw.dtype])


def _linear(load: Workload, draw: Draw, R: int, inputs: int, outputs: int) -> Call:
    x_RH, weight_NH = draw.normal(R, inputs), draw.normal(outputs, inputs, scale=inputs**-0.5)

    def run() -> Tensor:
        return load.kernels.linear(x_RH, weight_NH)

    def error() -> float:
        return worst_error([run()], [twin.linear(x_RH, weight_NH)])

    return Call(run, error, load.floors.linear(R, inputs, outputs), TOLERANCE[draw.dtype])
