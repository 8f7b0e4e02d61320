"""Every own Triton kernel at two small shapes against its twin, to be run under compute-sanitizer: make test-sanitize

python -m tests.gpu.sanitize [few|many]: the shapes of few rows, of many, or both. fp32, so that comparisons are tight.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bailing_mtp.kernels import prefill
from bailing_mtp.kernels.triton import decode, head, train
from bailing_mtp.kernels.triton.linear import linear
from tests.kernels import decode_cases, prefill_cases, sampling_cases, step_cases, train_cases

ROWS = {"few": 3, "many": 37}
FP32 = torch.float32

Case = tuple[str, Callable[[], None]]


def decode_passes(R: int) -> Iterator[Case]:
    """Attention, experts and the small pieces of a step. Few rows of kda_verify are one launch, many three."""
    on, many = (decode, "cuda", FP32), R > 3
    kda = {"rows": 70 if many else R, "slots": 73, "tokens": (1, 3), "h": 2, "D": 16, "V": 32, "lower_bound": -5.0}
    pages = {"S": 3, "h": 3, "block_tokens": 16, "max_blocks": 4, "C": 32 if many else 48, "r": 16}
    positions = (0, 15, 16) if many else (5, 37)
    experts = {"R": R, "k": 3, "H": 96, "F": 48, "E": 12}
    yield "kda_verify", partial(decode_cases.check_kda_verify, *on, **kda)
    yield "mla_verify", partial(decode_cases.check_mla_verify, *on, positions=positions, **pages)
    yield "mla_step", partial(step_cases.check_mla_step, *on, n=len(positions), k=24, v=40, Q=50, **pages)
    yield "latents", partial(decode_cases.check_write_latents, *on, T=R, x=48, block_tokens=16, max_blocks=4)
    yield "rope", partial(decode_cases.check_apply_rope, *on, T=R, h=3, r=16)
    yield "norms", partial(decode_cases.check_norms, *on, R=R, H=96)
    yield "norm_pair", partial(step_cases.check_norm_pair, *on, R=R, H=96)
    yield "swiglu", partial(decode_cases.check_swiglu, *on, R=R, F=80, limit=1.5)
    routing = {"R": R, "H": 96, "E": 16, "k": 4, "groups": 4, "kept": 2, "router_dtype": FP32}
    yield "route", partial(decode_cases.check_route, *on, **routing)
    part = {"first": 4, "n_local": 5, "width": (16, 40), "limit": 0.7}
    yield "experts, a part", partial(decode_cases.check_experts, *on, **experts, **part)
    yield "experts, shared", partial(decode_cases.check_experts, *on, **experts, shared_width=48, with_residual=True)
    yield "linears", partial(step_cases.check_linears, *on, R=R, H=96, sizes=(77, 30))
    yield "linear", partial(decode_cases.check_linear, linear, "cuda", FP32, R=min(R, 5), H=96, N=77)
    yield "embed", partial(step_cases.check_embed, *on, R=R, v=101, H=96)
    yield "step_rows", partial(step_cases.check_step_rows, decode, "cuda", slots=R + 3, n=R, blocks=5)


def decisions(R: int) -> Iterator[Case]:
    """Draws, verdict and bookkeeping."""
    on, ids = (decode, "cuda", FP32), {"v": 1001, "first_id": 3003}
    yield "log_sum_exps", partial(sampling_cases.check_log_sum_exps, *on, n=R, S=3, v=1001)
    yield "draw", partial(sampling_cases.check_draw, *on, n=R, **ids)
    for k in (0, 2):
        yield f"draw_fresh k={k}", partial(sampling_cases.check_draw_fresh, *on, n=R, k=k, **ids)
        # Its data holds every count of accepted drafts from 70 rows on.
        yield f"verdict k={k}", partial(sampling_cases.check_verdict, *on, n=70 if R > 3 else R, k=k, **ids)
        yield f"settle k={k}", partial(sampling_cases.check_settle, decode, "cuda", slots=R + 5, n=R, S=k + 1)
        yield f"slots k={k}", partial(sampling_cases.check_slots, *on, slots=R + 5, n=R, S=k + 1, H=96)


def training_and_prefill(R: int) -> Iterator[Case]:
    on, T = (train, "cuda", FP32), 4 * R
    for weighted in (False, True):
        swiglu = partial(train_cases.check_swiglu, *on, R=T, F=80, limit=1.5, weighted=weighted)
        yield f"weighted_swiglu {weighted}", swiglu
    yield "gated_norm", partial(train_cases.check_gated_norm, *on, T=T, h=3, V=32)
    yield "sum_choices", partial(train_cases.check_sum_choices, *on, T=T, k=3, H=96)
    yield "choose", partial(train_cases.check_choose, train, "cuda", R=T, E=16, k=4, groups=4, kept=2)
    yield "head", partial(train_cases.check_head, head, "cuda", FP32, t=T, v=1001, scale=1.3)
    conv = {"sizes": (32, 32, 64), "taps": 4, "history": R > 3}
    yield "short_conv", partial(prefill_cases.check_short_conv, prefill.short_conv_qkv, "cuda", FP32, **conv)


def main(which: list[str]) -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    n_failed = 0
    for size in which or list(ROWS):
        R = ROWS[size]
        for name, check in (*decode_passes(R), *decisions(R), *training_and_prefill(R)):
            try:
                check()
                torch.cuda.synchronize()
            except AssertionError as error:
                n_failed += 1
                print(f"FAILED {size} {name}: {str(error)[:160]}", flush=True)
            else:
                print(f"ok {size} {name}", flush=True)
    return n_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
