"""The torch twins of the decode kernels against what they stand for, written out plainly."""

import pytest
import torch
import torch.nn.functional as F

from bailing_mtp.kernels.reference import experts as expert_kernels
from bailing_mtp.kernels.reference import kda
from bailing_mtp.kernels.reference.experts import experts, swiglu
from bailing_mtp.kernels.reference.kda_verify import KdaLayerMemory, kda_verify
from bailing_mtp.kernels.reference.mla_verify import apply_rope, mla_verify, rope_table, write_latents
from bailing_mtp.kernels.reference.norm import add_rms_norm, rms_norm
from bailing_mtp.kernels.reference.prefix_attention import prefix_causal_attention
from bailing_mtp.kernels.reference.router import route

HEADS, KEY, VALUE, TAPS, RECORDS, SLOTS = 2, 6, 4, 4, 3, 5
ROWS = (HEADS * KEY, HEADS * KEY, HEADS * VALUE, HEADS * KEY, HEADS * VALUE, HEADS)
BOUND, EPS = -5.0, 1e-6


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Layer:
    """Weights of one linear-attention layer, and the mixer over a whole sequence, token by token."""

    def __init__(self) -> None:
        self.conv = torch.randn(sum(ROWS[:3]), TAPS) * 0.5
        self.a_log, self.dt_bias = torch.randn(HEADS) * 0.3, torch.randn(HEADS, KEY)
        self.o_norm = 1 + 0.2 * torch.randn(VALUE)

    def whole(self, projected_TY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [T, h * V] and the final state [h, D, V] of one sequence."""
        tokens = projected_TY.shape[0]
        cu_seqlens, lengths = torch.tensor([0, tokens]), (tokens,)
        qkv, f, g, beta = projected_TY.split((sum(ROWS[:3]), *ROWS[3:]), dim=-1)
        q, k, v = kda.short_conv(qkv, self.conv, cu_seqlens).split(ROWS[:3], dim=-1)
        gate = kda.kda_gate(f.unflatten(-1, (HEADS, KEY)), self.a_log, self.dt_bias, BOUND)
        q, k = (x.unflatten(-1, (HEADS, KEY)) for x in (q, k))
        o, state = kda.recurrent_kda(
            q, k, v.unflatten(-1, (HEADS, VALUE)), gate, beta.sigmoid(), cu_seqlens, lengths, output_final_state=True
        )
        o = F.rms_norm(o, (VALUE,), self.o_norm, EPS) * g.unflatten(-1, (HEADS, VALUE)).sigmoid()
        return o.flatten(1), state[0]

    def verify(self, fed_nSY: torch.Tensor, memory: KdaLayerMemory, numbers: torch.Tensor, slots: list[int]):
        n_tokens = fed_nSY.shape[1]
        out = kda_verify(
            fed_nSY.flatten(0, 1), self.conv, self.a_log, self.dt_bias, self.o_norm, memory,
            numbers[0], numbers[1], torch.tensor(slots), n_tokens, BOUND, EPS,
        )  # fmt: skip
        return out.unflatten(0, (-1, n_tokens))


def empty_memory() -> KdaLayerMemory:
    """Records are NaN; states and windows are those of empty sequences."""
    key = (2, SLOTS, RECORDS, HEADS, KEY)
    window = torch.full((2, SLOTS, TAPS - 1 + RECORDS, sum(ROWS[:3])), torch.nan)
    window[0, :, : TAPS - 1] = 0
    nan = [torch.full(shape, torch.nan) for shape in (key, key, (*key[:-1], VALUE))]
    return KdaLayerMemory(torch.zeros(SLOTS, HEADS, VALUE, KEY), window, *nan)


def test_kda_verify_equals_the_plain_recurrence():
    """Random accept counts, changing S, rows that change places and skip steps."""
    layer, memory = Layer(), empty_memory()
    numbers = torch.zeros(2, SLOTS, dtype=torch.int32)
    kept = {slot: torch.empty(0, sum(ROWS)) for slot in range(SLOTS)}
    for slots, n_tokens in (([0, 3, 4], 3), ([4, 0], 1), ([3], 2), ([3, 4, 1], 3), ([0, 1, 3, 4], 2)):
        fed = torch.randn(len(slots), n_tokens, sum(ROWS))
        untouched = [x.clone() for x in memory]
        out = layer.verify(fed, memory, numbers, slots)
        for row, slot in enumerate(slots):
            expected, _ = layer.whole(torch.cat((kept[slot], fed[row])))
            torch.testing.assert_close(out[row], expected[len(kept[slot]) :], atol=1e-5, rtol=1e-5)
            _, state = layer.whole(kept[slot]) if len(kept[slot]) else (None, torch.zeros(HEADS, KEY, VALUE))
            torch.testing.assert_close(memory.state_NhVD[slot], state.transpose(1, 2), atol=1e-5, rtol=1e-5)
            count = int(torch.randint(1, n_tokens + 1, ()))
            kept[slot] = torch.cat((kept[slot], fed[row, :count]))
            numbers[0, slot], numbers[1, slot] = count, 1 - numbers[1, slot]
        for idle in set(range(SLOTS)) - set(slots):
            for ours, before in zip(memory, untouched, strict=True):
                at = idle if ours is memory.state_NhVD else (slice(None), idle)
                assert torch.equal(ours[at].nan_to_num(9), before[at].nan_to_num(9))


def test_kda_verify_writes_the_other_buffer_only():
    layer, memory = Layer(), empty_memory()
    numbers = torch.zeros(2, SLOTS, dtype=torch.int32)
    layer.verify(torch.randn(1, 2, sum(ROWS)), memory, numbers, [2])
    numbers[:, 2] = torch.tensor([2, 1])
    before = [x.clone() for x in memory]
    layer.verify(torch.randn(1, 3, sum(ROWS)), memory, numbers, [2])
    for ours, old in list(zip(memory, before, strict=True))[1:]:
        assert torch.equal(ours[1].nan_to_num(9), old[1].nan_to_num(9))
        assert bool(ours[0, 2].isfinite().all())


def test_mla_verify_equals_attention_over_each_sequence():
    heads, rank, rope, block, scale = 3, 6, 2, 4, 0.3
    cache = torch.full((9, block, rank + rope), torch.nan)
    table = torch.tensor([[5, 2, 8], [0, 7, 1], [8, 8, 8]], dtype=torch.int32)
    position, n_tokens = torch.tensor([0, 6, 0]), 3
    sequences = [torch.randn(int(p) + n_tokens, rank + rope) for p in position]
    for row, rows in enumerate(sequences):
        tables = table[row].expand(len(rows), -1)
        write_latents(rows, cache, tables, torch.arange(len(rows)))
    q = torch.randn(3, n_tokens, heads, rank + rope)
    out = mla_verify(q, cache, table, position, scale, rank)
    for row, rows in enumerate(sequences[:2]):
        for s in range(n_tokens):
            seen = rows[: int(position[row]) + s + 1]
            weights = (q[row, s] @ seen.t() * scale).softmax(-1)
            torch.testing.assert_close(out[row, s], weights @ seen[:, :rank])


def test_write_latents_past_the_table_goes_to_scratch():
    cache, rows = torch.zeros(4, 2, 3), torch.randn(4, 3)
    table = torch.tensor([[1, 0]], dtype=torch.int32).expand(4, -1)
    write_latents(rows, cache, table, torch.tensor([3, 0, 4, 101]))
    expected = torch.zeros_like(cache)
    expected[0, 1], expected[1, 0], expected[3, 0], expected[3, 1] = rows
    assert torch.equal(cache, expected)


def test_rope_rotates_pairs_by_position():
    x, theta = torch.randn(2, 1, 4), 100.0
    out = apply_rope(x, rope_table(torch.tensor([0, 3]), 4, theta))
    pairs = torch.view_as_complex(x[1, 0].view(2, 2))
    turned = pairs * torch.polar(torch.ones(2), 3 * theta ** -torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(out[0], x[0])
    torch.testing.assert_close(out[1, 0], torch.view_as_real(turned).flatten())


def test_norms():
    x, delta, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    expected = (x + delta) / ((x + delta).square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    total, normed = add_rms_norm(x, delta, weight, EPS)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(rms_norm(total, weight, EPS), expected)


def test_route_by_hand():
    """Four groups of two; the bias decides the choice and not the weights."""
    logits = torch.tensor([[0.0, 1.0, 3.0, -9.0, 1.5, 1.4, 2.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9])
    ids, weights = route(torch.eye(1), logits.t(), bias, 4, 2, 3, 2.5)
    # Scores .5 .73 | .95 .00 | .82 .80 | .88 .50+.9: the last two groups win, their best three are 7, 6, 4.
    assert ids.tolist() == [[7, 6, 4]]
    chosen = logits[0, [7, 6, 4]].sigmoid()
    torch.testing.assert_close(weights[0], 2.5 * chosen / chosen.sum())
    ids, _ = route(torch.eye(1), logits.t(), torch.zeros(8), 1, 1, 3, 1.0)
    assert ids.tolist() == [[2, 6, 4]]


@pytest.mark.parametrize("limit", [None, 0.4])
@pytest.mark.parametrize("run", ["_one_by_one", "_grouped"])
def test_experts_of_ranks_and_slices_add_up(monkeypatch, limit, run):
    monkeypatch.setattr(expert_kernels, "_one_by_one", getattr(expert_kernels, run))
    rows, hidden, width, n_experts, k = 7, 8, 16, 6, 2
    x, ids = torch.randn(rows, hidden), torch.stack([torch.randperm(n_experts)[:k] for _ in range(rows)])
    weights = torch.rand(rows, k)
    gate_up, down = torch.randn(n_experts, 2 * width, hidden), torch.randn(n_experts, hidden, width)
    expected = torch.zeros(rows, hidden)
    for row in range(rows):
        for choice in range(k):
            e = ids[row, choice]
            gate, up = (gate_up[e] @ x[row]).chunk(2)
            expected[row] += weights[row, choice] * (down[e] @ swiglu(gate, up, limit))
    total = torch.zeros_like(expected)
    for first in (0, 3):
        for part in ((0, 4), (4, width)):
            own = slice(first, first + 3)
            total += experts(x, ids, weights, gate_up[own], down[own], first, part, limit)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


def test_swiglu_clamps_what_the_spec_says():
    gate, up = torch.tensor([5.0, -5.0, 1.0]), torch.tensor([3.0, -3.0, 0.5])
    expected = torch.tensor([2.0 * 2.0, F.silu(torch.tensor(-5.0)) * -2.0, F.silu(torch.tensor(1.0)) * 0.5])
    torch.testing.assert_close(swiglu(gate, up, 2.0), expected)
    torch.testing.assert_close(swiglu(gate, up, None), F.silu(gate) * up)


def test_prefix_attention_is_the_end_of_whole_attention():
    lengths, key_lengths, heads = (3, 1, 4), (5, 1, 4), 2
    k, v = torch.randn(sum(key_lengths), heads, 6), torch.randn(sum(key_lengths), heads, 4)
    q = torch.randn(sum(lengths), heads, 6)
    out = prefix_causal_attention(q, k, v, lengths, key_lengths, 0.5)
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), out.split(lengths), strict=True)
    for q_part, k_part, v_part, o_part in parts:
        before = len(k_part) - len(q_part)
        for t in range(len(q_part)):
            seen = before + t + 1
            weights = (torch.einsum("hd,xhd->hx", q_part[t], k_part[:seen]) * 0.5).softmax(-1)
            torch.testing.assert_close(o_part[t], torch.einsum("hx,xhv->hv", weights, v_part[:seen]))
