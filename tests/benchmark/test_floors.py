"""Bytes of each kernel at the sizes of ling3_tiny, written out by hand."""

import pytest

from recipes.bench_floors import Floors, floor_us
from tests.benchmark.sizes import architecture


@pytest.fixture(scope="module")
def floors() -> Floors:
    return Floors(architecture("ling3_tiny"), item_bytes=2)


def test_microseconds():
    assert floor_us(4_300_000, 4.3) == pytest.approx(1.0)
    assert floor_us(10**12, 2.0) == pytest.approx(500_000.0)


def test_delta_attention(floors: Floors):
    # 16 heads of 128: 1 MiB of state, 6144 convolution channels, 10256 projected values, 2048 outputs.
    state, record, window_row, token = 2 * 2**20, 3 * 16 * 128 * 4, 6144 * 2, (10256 + 2048) * 2
    weights = (6144 * 4 + 128) * 2 + (16 + 16 * 128) * 4
    assert floors.kda_verify(1, 1, 1) == state + 2 * record + 7 * window_row + token + weights
    assert floors.kda_verify(5, 3, 2) == 5 * (state + 5 * record + 9 * window_row + 3 * token) + weights


def test_latent_attention(floors: Floors):
    # A cached row is 512 + 64 values; a query is as wide, its output 512.
    assert floors.mla_verify(1, 1, 256) == 256 * 576 * 2 + 16 * (576 + 512) * 2
    assert floors.mla_verify(4, 3, 256) == 4 * (256 * 576 * 2 + 3 * 16 * (576 + 512) * 2)
    assert floors.write_latents(6) == 6 * 2 * 576 * 2
    assert floors.apply_rope(6, heads=16) == 6 * (2 * 16 * 64 * 2 + 64 * 4)


def test_around_latent_attention(floors: Floors):
    assert floors.cache_latents(3) == 3 * (2 * (512 + 64 + 256) * 2 + 64 * 4)
    assert floors.absorb_queries(3) == (16 * 128 * 512 + 3 * 16 * (192 + 576)) * 2 + 3 * 64 * 4
    assert floors.gated_values(3) == (16 * 128 * 512 + 3 * 16 * (512 + 1 + 128)) * 2
    assert floors.embed(3) == 3 * 2 * 1536 * 2
    assert floors.norm_pair(3) == 3 * 4 * 1536 * 2 + 2 * 1536 * 2


def test_mlp(floors: Floors):
    assert floors.rms_norm(3) == 3 * 2 * 1536 * 2 + 1536 * 2
    assert floors.add_rms_norm(3) == 3 * 4 * 1536 * 2 + 1536 * 2
    assert floors.swiglu(3, 512) == 3 * 3 * 512 * 2
    assert floors.route(2) == 128 * 1536 * 2 + 128 * 4 + 2 * (1536 * 2 + 8 * 12)
    assert floors.experts(2, touched=15) == 16 * 3 * 512 * 1536 * 2 + 2 * (3 * 1536 * 2 + 8 * 12)
    assert floors.linear(3, 1536, 1024) == (1536 * 1024 + 3 * (1536 + 1024)) * 2


def test_sampling(floors: Floors):
    assert floors.log_sum_exps(2) == 2 * (157184 * 4 + 12)
    assert floors.draw(2, with_residual=False) == 2 * 157184 * 4
    assert floors.draw(2, with_residual=True) == 2 * 2 * 157184 * 4
