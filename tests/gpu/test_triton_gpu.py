"""The Triton decode kernels against their twins on a GPU: the same comparisons at real sizes, fp32 and bf16."""

import pytest
import torch

from tests.kernels import decode_cases as cases
from tests.kernels import sampling_cases, step_cases

pytestmark = pytest.mark.gpu

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(scope="module")
def kernels():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from bailing_mtp.kernels.triton import decode

    return decode


@pytest.fixture(autouse=True)
def exact_matmul():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h", "D", "V", "bound"), [(16, 128, 128, -5.0), (2, 64, 32, None)])
@pytest.mark.parametrize("rows", [5, 200])
def test_kda_verify(kernels, dtype, h, D, V, bound, rows) -> None:
    """Few rows are one launch, many are three."""
    cases.check_kda_verify(
        kernels,
        "cuda",
        dtype,
        rows=rows,
        slots=rows + 30,
        tokens=(1, 3, 5, 2),
        h=h,
        D=D,
        V=V,
        lower_bound=bound,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 2, 3, 5])
def test_mla_verify(kernels, dtype, S) -> None:
    shapes = {"S": S, "h": 16, "C": 512, "r": 64, "block_tokens": 64, "max_blocks": 20}
    cases.check_mla_verify(kernels, "cuda", dtype, positions=(0, 1, 63, 64, 500, 1275), **shapes)
    many = tuple((37 * i) % 1200 for i in range(200))
    cases.check_mla_verify(kernels, "cuda", dtype, positions=many, **shapes)
    cases.check_mla_verify(
        kernels, "cuda", dtype, positions=(5, 100), S=S, h=3, C=48, r=16, block_tokens=16, max_blocks=7
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_and_norms(kernels, dtype) -> None:
    cases.check_write_latents(kernels, "cuda", dtype, T=300, x=576, block_tokens=64, max_blocks=5)
    cases.check_apply_rope(kernels, "cuda", dtype, T=300, h=16, r=64)
    cases.check_apply_rope(kernels, "cuda", dtype, T=300, h=1, r=64)
    for R, H in ((1, 1536), (700, 1536), (13, 96)):
        cases.check_norms(kernels, "cuda", dtype, R=R, H=H)
    for limit in (None, 1.5):
        cases.check_swiglu(kernels, "cuda", dtype, R=77, F=4608, limit=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("router_dtype", DTYPES)
def test_route(kernels, dtype, router_dtype) -> None:
    for R in (1, 17, 700):
        cases.check_route(
            kernels, "cuda", dtype, R=R, H=1536, E=128, k=8, groups=8, kept=4, router_dtype=router_dtype
        )
    cases.check_route(
        kernels, "cuda", dtype, R=33, H=200, E=30, k=6, groups=5, kept=3, router_dtype=router_dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R", [1, 4, 16, 200, 300, 768])
def test_experts(kernels, dtype, R) -> None:
    cases.check_experts(kernels, "cuda", dtype, R=R, k=8, H=1536, F=512, E=32)
    cases.check_experts(
        kernels, "cuda", dtype, R=R, k=3, H=200, F=96, E=12, first=4, n_local=5, width=(32, 80), limit=0.7
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R", [1, 4, 16, 70, 256])
def test_shared_expert_and_residual(kernels, dtype, R) -> None:
    sizes = {"R": R, "k": 8, "H": 1536, "F": 512, "with_residual": True}
    cases.check_experts(kernels, "cuda", dtype, E=128, shared_width=512, **sizes)
    part = {"E": 32, "first": 8, "n_local": 16, "limit": 0.9, "shared_limit": 0.7, **sizes}
    cases.check_experts(kernels, "cuda", dtype, shared_width=704, **part)
    cases.check_experts(kernels, "cuda", dtype, shared_width=512, shared_channels=(256, 512), **part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_around_the_mixers(kernels, dtype) -> None:
    for R in (1, 3, 4, 16, 70, 256, 300):
        step_cases.check_linears(kernels, "cuda", dtype, R=R, H=1536, sizes=(576, 16, 256))
    step_cases.check_linears(kernels, "cuda", dtype, R=9, H=200, sizes=(77, 30))
    step_cases.check_embed(kernels, "cuda", dtype, R=300, v=1001, H=1536)
    step_cases.check_norm_pair(kernels, "cuda", dtype, R=300, H=1536)
    step_cases.check_step_rows(kernels, "cuda", slots=300, n=256, blocks=70)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "S"), [(1, 1), (5, 3), (64, 1), (200, 3)])
def test_around_latent_attention(kernels, dtype, n, S) -> None:
    step_cases.check_mla_step(
        kernels, "cuda", dtype, n=n, S=S, h=16, k=128, v=128, C=512, r=64, Q=256, block_tokens=64, max_blocks=9
    )
    step_cases.check_mla_step(
        kernels, "cuda", dtype, n=n, S=S, h=3, k=24, v=40, C=48, r=16, Q=100, block_tokens=16, max_blocks=5
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(kernels, dtype) -> None:
    from bailing_mtp.kernels.triton.linear import linear

    for R in (1, 3, 4, 5):
        for H, N in ((1536, 10256), (2048, 1536), (512, 1536), (200, 77)):
            cases.check_linear(linear, "cuda", dtype, R=R, H=H, N=N)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampling(kernels, dtype) -> None:
    for n, S, v in ((1, 1, 157184), (23, 3, 157184), (9, 1, 1001)):
        sampling_cases.check_log_sum_exps(kernels, "cuda", dtype, n=n, S=S, v=v)
    for n, v, first in ((3, 157184, 0), (64, 78592, 78592), (40, 1001, 3003)):
        sampling_cases.check_draw(kernels, "cuda", dtype, n=n, v=v, first_id=first)
        for k in (0, 1, 2, 4):
            sampling_cases.check_draw_fresh(kernels, "cuda", dtype, n=n, k=k, v=v, first_id=first)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_verdicts_and_slots(kernels, k) -> None:
    for n, v, first in ((1, 157184, 0), (64, 78592, 78592), (200, 1001, 3003)):
        sampling_cases.check_verdict(kernels, "cuda", torch.float32, n=n, k=k, v=v, first_id=first)
    for n in (3, 300):
        sampling_cases.check_settle(kernels, "cuda", slots=400, n=n, S=k + 1)
    sampling_cases.check_slots(kernels, "cuda", torch.bfloat16, slots=300, n=256, S=k + 1, H=1536)


def test_repeated_runs_are_bit_equal(kernels) -> None:
    draw, R = cases.Draw("cuda", torch.bfloat16, 5), 200
    ids = torch.stack([draw.permutation(128)[:8] for _ in range(R)])
    weights = draw.normal(R, 8, dtype=torch.float32).abs()
    x, gate_up = draw.normal(R, 1536), draw.normal(128, 1024, 1536, scale=0.03)
    down = draw.normal(128, 1536, 512, scale=0.04)
    q, latents = draw.normal(R, 3, 16, 576), draw.normal(1001, 64, 576)
    table, position = draw.permutation(1000).view(R, 5).to(torch.int32), draw.integers(0, 300, R)

    def once() -> list[torch.Tensor]:
        return [
            kernels.experts(x, ids, weights, gate_up, down, 0, (0, 512), None),
            kernels.experts(x[:4], ids[:4], weights[:4], gate_up, down, 0, (0, 512), None),
            kernels.mla_verify(q, latents, table, position, 0.07, 512),
            kernels.mla_verify(q[:2], latents, table[:2], position[:2], 0.07, 512),
        ]

    first = once()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))
