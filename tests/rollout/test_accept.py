"""Rejection sampling: decisions by hand, and the law of what is kept, on a vocabulary of eight."""

import math

import pytest
import torch

from bailing_mtp.kernels.reference import noise
from bailing_mtp.rollout.accept import Drafts, accept, no_drafts, token_log_probs
from bailing_mtp.rollout.distribution import Distribution, StepRules, process
from tests.rollout.helpers import ALL_RULES, chi_square_p, noise_keys, settings

DRAWS = 20_000
V = 8
# Hand-made and far apart; one table per position, and the second position's depends on nothing.
P = torch.tensor([
    [2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 0.3],
    [-1.0, 2.0, 0.2, 0.1, 1.0, 0.0, -3.0, 0.5],
    [0.0, 0.4, -2.0, 1.5, 0.1, 0.9, 0.3, -0.7],
    [1.0, 0.0, 0.0, 0.0, 2.0, -1.0, 0.5, 0.2],
])  # fmt: skip
Q = torch.tensor([
    [-1.0, 2.0, 0.5, 1.0, -0.5, 0.0, 1.5, 0.3],
    [2.0, -1.0, 0.2, 0.1, 0.5, 0.3, 1.0, -0.5],
    [1.0, 0.4, 2.0, -1.5, 0.1, 0.2, 0.3, 0.7],
])  # fmt: skip


def one_hot(*tokens: int) -> Distribution:
    logits = torch.full((len(tokens), V), -math.inf)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    zero = torch.zeros(len(tokens))
    return Distribution(logits, zero, zero, torch.ones(len(tokens), dtype=torch.bool))


def greedy_drafts(*tokens: int) -> Drafts:
    q = one_hot(*tokens)
    return Drafts(torch.tensor([tokens]), q.logits[None], q.lse[None])


def draw(
    n: int, k: int, temperature: float, top_k: int, top_p: float, seed: int, argmax_drafts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """n rows verified at once: accepted counts, tokens, and the processed p [S, V] and q [k, V] of every row."""
    rules = StepRules(truncates=top_k > 0 or top_p < 1, greedy=argmax_drafts)
    keys, position = noise_keys(n, seed), torch.full((n,), 11)
    target = process(P[: k + 1], settings(k + 1, temperature, top_k, top_p), rules, None)
    draft = process(Q[:k], settings(k, 0.0 if argmax_drafts else temperature, top_k, top_p), rules, None)
    tokens = torch.stack(
        [
            (draft.logits[j] + noise.gumbel(keys, position + 1 + j, noise.DRAFT, 0, V)).argmax(-1)
            for j in range(k)
        ],
        dim=-1,
    )
    drafts = Drafts(tokens, draft.logits.expand(n, k, V), draft.lse.expand(n, k))
    rows = Distribution(*(field.repeat(n, *[1] * (field.dim() - 1)) for field in target))
    found = accept(rows, drafts, keys, position, None)
    p, q = ((d.logits - d.lse.unsqueeze(-1)).exp() for d in (target, draft))
    return found.n_accepted_n, found.tokens_nS, p, q


@pytest.mark.parametrize(
    ("drafts", "best", "n_accepted", "tokens"),
    [
        ((1, 2), (1, 2, 3), 2, [1, 2, 3]),
        ((1, 2), (1, 4, 3), 1, [1, 4]),
        ((1, 2), (5, 2, 3), 0, [5]),
    ],
)
def test_greedy_by_hand(drafts: tuple, best: tuple, n_accepted: int, tokens: list[int]):
    found = accept(one_hot(*best), greedy_drafts(*drafts), noise_keys(1), torch.tensor([4]), None)
    assert int(found.n_accepted_n) == n_accepted
    assert found.tokens_nS[0, : n_accepted + 1].tolist() == tokens


def test_a_draft_that_q_could_not_draw_is_rejected():
    target = process(torch.zeros(2, V), settings(2), StepRules(), None)
    drafts = Drafts(torch.tensor([[3]]), one_hot(2).logits[None], torch.zeros(1, 1))
    for seed in range(20):
        found = accept(target, drafts, noise_keys(1, seed), torch.tensor([4]), None)
        assert int(found.n_accepted_n) == 0 and int(found.tokens_nS[0, 0]) != 2


def test_equal_distributions_accept_always():
    n = 5000
    target = process(P[:2].repeat(n, 1), settings(2 * n), StepRules(), None)
    keys, position = noise_keys(n), torch.full((n,), 3)
    logits, lse = target.logits.view(n, 2, V)[:, :1], target.lse.view(n, 2)[:, :1]
    tokens = (logits[:, 0] + noise.gumbel(keys, position + 1, noise.DRAFT, 0, V)).argmax(-1, keepdim=True)
    found = accept(target, Drafts(tokens, logits, lse), keys, position, None)
    assert (found.n_accepted_n == 1).all()


def test_nothing_left_of_p_minus_q_takes_the_largest_p():
    # The draft has no mass under q, so it is rejected, and p - q is zero everywhere.
    drafts = Drafts(torch.tensor([[3]]), one_hot(6).logits[None], torch.zeros(1, 1))
    found = accept(one_hot(6, 1), drafts, noise_keys(1), torch.tensor([4]), None)
    assert int(found.n_accepted_n) == 0 and found.tokens_nS[0, 0] == 6


def test_no_drafts_draw_from_p():
    n = DRAWS
    target = process(P[:1].repeat(n, 1), settings(n, 0.7), StepRules(), None)
    found = accept(target, no_drafts(n, V, P.device), noise_keys(n, 3), torch.full((n,), 7), None)
    counts = torch.bincount(found.tokens_nS[:, 0], minlength=V)
    assert chi_square_p(counts, (P[0] / 0.7).softmax(-1)) > 0.01


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.8), (5, 0.9)])
@pytest.mark.parametrize("argmax_drafts", [False, True])
def test_the_first_two_tokens_follow_the_target(
    temperature: float, top_k: int, top_p: float, argmax_drafts: bool
):
    k = 3
    n_accepted, tokens, p, q = draw(DRAWS, k, temperature, top_k, top_p, seed=5, argmax_drafts=argmax_drafts)
    first = torch.bincount(tokens[:, 0], minlength=V)
    assert chi_square_p(first, p[0]) > 0.01
    # Rows whose block ended with the first token draw the second from its own distribution, as a next step does.
    n = len(tokens)
    plain = (p[1].log() + noise.gumbel(noise_keys(n, seed=99), torch.full((n,), 50), noise.FRESH, 0, V)).argmax(-1)
    second = torch.where(n_accepted >= 1, tokens[:, 1], plain)
    joint = torch.bincount(tokens[:, 0] * V + second, minlength=V * V).view(V, V)
    assert chi_square_p(joint, p[0][:, None] * p[1][None]) > 0.01
    expected_reject = 1 - float(torch.minimum(p[0], q[0]).sum())
    rejected = float((n_accepted == 0).float().mean())
    assert abs(rejected - expected_reject) < 4 * math.sqrt(0.25 / n)


def test_recovered_and_bonus_tokens_follow_their_own_laws():
    n_accepted, tokens, p, q = draw(40_000, 2, 1.0, 0, 1.0, seed=8)
    residual = (p[0] - q[0]).clamp(min=0)
    recovered = torch.bincount(tokens[n_accepted == 0, 0], minlength=V)
    assert chi_square_p(recovered, residual / residual.sum()) > 0.01
    bonus = torch.bincount(tokens[n_accepted == 2, 2], minlength=V)
    assert chi_square_p(bonus, p[2]) > 0.01


def test_log_probs_are_those_of_each_columns_own_row():
    logits = P[:3].clone()
    rows = settings(3, 0.5, top_k=4)
    target = process(logits, rows, ALL_RULES, None)
    tokens = torch.tensor([[0, 1, 3]])
    found = token_log_probs(logits, target, tokens, None)
    at = (torch.arange(3), tokens[0])
    torch.testing.assert_close(found.raw_nS[0], logits.log_softmax(-1)[at])
    tempered = (logits / 0.5).log_softmax(-1)
    torch.testing.assert_close(found.processed_nS[0] + found.kept_logmass_nS[0], tempered[at])
    best = (logits / 0.5).topk(4).values.logsumexp(-1)
    torch.testing.assert_close(found.processed_nS[0], (logits / 0.5)[at] - best)
