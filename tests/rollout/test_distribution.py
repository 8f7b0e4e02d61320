"""Processed distributions against the same rules written out by hand."""

import math

import pytest
import torch

from bailing_mtp.rollout.distribution import RowSettings, StepRules, process
from tests.rollout.helpers import ALL_RULES, settings

LOGITS = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, -2.0, 0.5, -0.5])


def by_hand(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, banned: tuple[int, ...] = ()
) -> list[float]:
    """Probabilities of one row, token by token, in plain Python."""
    weights = {
        x: math.exp(float(logit) / temperature) for x, logit in enumerate(logits) if x not in banned
    }
    total = sum(weights.values())
    order = sorted(weights, key=lambda x: (-weights[x], x))
    kept, mass = [], 0.0
    for rank, x in enumerate(order):
        if (top_k and rank >= top_k) or (top_p < 1 and mass > top_p):
            break
        kept.append(x)
        mass += weights[x] / total
    kept_total = sum(weights[x] for x in kept)
    return [weights[x] / kept_total if x in kept else 0.0 for x in range(len(logits))]


def probabilities(logits_rv: torch.Tensor, rows: RowSettings, rules: StepRules = ALL_RULES) -> torch.Tensor:
    found = process(logits_rv, rows, rules, None)
    return (found.logits - found.lse.unsqueeze(-1)).exp()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 1.0])
def test_against_hand(temperature: float, top_k: int, top_p: float):
    row = settings(1, temperature, top_k, top_p, suppress=(1, 5))
    expected = by_hand(LOGITS, temperature, top_k, top_p, banned=(1, 5))
    torch.testing.assert_close(probabilities(LOGITS[None], row)[0], torch.tensor(expected), atol=1e-6, rtol=0)


def test_without_rules_it_is_the_tempered_softmax_and_the_logits_stay():
    logits = LOGITS.repeat(2, 1)
    before = logits.clone()
    for rules in (StepRules(), ALL_RULES):
        found = probabilities(logits, settings(2, 0.7), rules)
        torch.testing.assert_close(found, (before / 0.7).softmax(-1))
        assert torch.equal(logits, before)


def test_ties_go_to_the_lower_id():
    assert probabilities(LOGITS[None], settings(1, top_k=2))[0, 2] == 0
    assert probabilities(torch.zeros(1, 8), settings(1, top_k=3))[0].tolist()[:3] == pytest.approx([1 / 3] * 3)
    assert probabilities(torch.zeros(1, 8), settings(1, temperature=0))[0].tolist() == [1.0] + [0.0] * 7


def test_top_p_takes_mass_before_top_k_and_keeps_the_token_that_crosses():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (probabilities(logits, settings(1, top_p=0.39)) > 0).tolist() == [[True, False, False, False]]
    assert (probabilities(logits, settings(1, top_p=0.41)) > 0).tolist() == [[True, True, False, False]]
    # Renormalised after top-k, 0.3 / 0.7 would pass 0.8 and keep a third token out all the same: k decides.
    assert (probabilities(logits, settings(1, top_k=2, top_p=0.8)) > 0).sum() == 2


def test_top_p_is_of_the_exclusive_prefix():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert (probabilities(logits, settings(1, top_p=0.5)) > 0).tolist() == [[True, True, False]]


def test_rows_with_other_settings_mix():
    rows = [settings(1, 0.0), settings(1, 0.5), settings(1, top_k=2), settings(1, top_p=0.3), settings(1)]
    mixed = RowSettings(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    logits = LOGITS.repeat(5, 1)
    together = probabilities(logits, mixed)
    alone = torch.cat([probabilities(LOGITS[None], row) for row in rows])
    assert torch.equal(together, alone)


def test_stop_ids_are_masked_until_min_new_per_row_and_column():
    rows = settings(2, min_new=3, index=1, stop=(4, -1)).spread(3)
    found = probabilities(torch.zeros(6, 8), rows)
    assert rows.response_index.tolist() == [1, 2, 3, 1, 2, 3]
    assert (found[:, 4] > 0).tolist() == [False, False, True] * 2
    torch.testing.assert_close(found[0, 0], torch.tensor(1 / 7))


def test_pads_mask_nothing():
    assert (probabilities(torch.zeros(1, 8), settings(1, min_new=3)) > 0).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_kept_mass_ties_processed_to_tempered(temperature: float):
    found = process(LOGITS[None], settings(1, temperature, 4, 0.8, suppress=(1,)), ALL_RULES, None)
    kept = found.logits[0].isfinite()
    processed = (found.logits - found.lse[:, None])[0, kept]
    tempered = (LOGITS / temperature).log_softmax(-1)[kept]
    torch.testing.assert_close(processed + found.kept_logmass, tempered)
    assert found.kept_logmass < 0
    plain = process(LOGITS[None], settings(1, temperature), StepRules(), None)
    assert plain.kept_logmass == 0
    assert process(LOGITS[None], settings(1, 0.0), ALL_RULES, None).kept_logmass.isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rules", [StepRules(), ALL_RULES])
def test_a_broken_row_is_told_and_harms_no_other(bad: float, rules: StepRules):
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    found = process(logits, settings(3, suppress=(2,)), rules, None)
    assert found.finite.tolist() == [True, False, True]
    assert not found.logits.isnan().any() and found.lse.isfinite().all()
    torch.testing.assert_close((found.logits[1] - found.lse[1]).exp().sum(), torch.tensor(1.0))
    all_minus_inf = process(torch.full((1, 8), -math.inf), settings(1), rules, None)
    assert not all_minus_inf.finite and all_minus_inf.lse.isfinite()
