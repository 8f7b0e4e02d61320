"""The Triton kernels of a prefill, alone and inside a program."""

from types import SimpleNamespace

import pytest
import torch

from bailing_mtp.kernels.reference import prefill as twins
from bailing_mtp.kernels.triton import decode
from bailing_mtp.kernels.triton.experts_grouped import experts_grouped
from bailing_mtp.kernels.triton.kda_prefill import gated_norm, short_conv_qkv
from bailing_mtp.rollout.program import Program
from tests.distributed.worlds import layout
from tests.kernels.prefill_cases import check_gated_norm, check_many_experts, check_short_conv
from tests.rollout.program_rig import Rig, close, random_model

FP32 = torch.float32


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(("sizes", "taps"), [((64, 64, 64), 4), ((24, 24, 100), 2)])
def test_short_conv(sizes: tuple[int, int, int], taps: int, history: bool) -> None:
    check_short_conv(short_conv_qkv, "cpu", FP32, sizes, taps, history)


@pytest.mark.parametrize(("T", "h", "V"), [(37, 3, 24), (1, 2, 128)])
def test_gated_norm(T: int, h: int, V: int) -> None:
    check_gated_norm(gated_norm, "cpu", FP32, T, h, V)


def test_grouped_experts() -> None:
    check_many_experts(experts_grouped, "cpu", FP32, R=21, H=48, F=32)


def test_program_with_prefixes() -> None:
    mixed = SimpleNamespace(
        attend=twins.attend,
        experts=experts_grouped,
        gated_delta_rule=twins.gated_delta_rule,
        gated_norm=gated_norm,
        short_conv_qkv=short_conv_qkv,
    )
    with layout(tp=1, ep=1) as context:
        built = random_model(context, head_dim=8, v_head_dim=4, moe_intermediate_size=4)
        ours, theirs = (Rig.make(built, context) for _ in range(2))
        ours.program = Program(ours.program.view, ours.memory, context, decode, mixed)
        first, second, third = (theirs.tokens(n, seed=n) for n in (19, 7, 2))
        for parts in ([(2, 0, first[:2]), (0, 0, second)], [(2, 2, first[:11]), (1, 0, third)], [(2, 11, first)]):
            hidden, expected = (rig.prefill(parts) for rig in (ours, theirs))
            close(hidden, expected)
        for slot in (0, 1, 2):
            for kept, wanted in zip(ours.settled(slot), theirs.settled(slot), strict=True):
                close(kept, wanted)
