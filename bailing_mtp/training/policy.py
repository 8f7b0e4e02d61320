"""The policy-gradient objective on rollout samples: GRPO per token or GSPO per sequence, optional KL, MTP loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bailing_mtp.config import MtpConfig, RlConfig
from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.losses.documents import document_sums
from bailing_mtp.losses.grpo import Clip, PolicyTerms, kl_k3, sequence_terms, token_terms, truncated_weights
from bailing_mtp.model.replay import RouteReplay
from bailing_mtp.training.objective import LossTerms, PretrainObjective
from bailing_mtp.training.state import TrainState

TOKENS = "sites_depth0"
SAMPLES = "samples"
ROUTES = "routes"


@dataclass(frozen=True)
class PolicyObjective:
    """Batches must be PolicyBatch. `temperature` is the sampling temperature of the rollouts.

    grpo: sum over response tokens / all response tokens of the step. gspo: sum over samples / all samples. The KL
    term, per token, is divided by tokens in both. With rl.truncate_importance batches bring `old_logprob_T`, with
    rl.routing_replay `routes_TLk`.
    """

    rl: RlConfig
    mtp: MtpConfig
    temperature: float = 1.0
    chunk_tokens: int | None = None

    @property
    def _tokens(self) -> PretrainObjective:
        return PretrainObjective(self.mtp, chunk_tokens=self.chunk_tokens)

    def count(self, batch: TokenBatch) -> dict[str, int]:
        valid_T = batch.shift(0).valid_T
        n_samples = int((document_sums(valid_T.float(), valid_T, batch.layout) > 0).sum())
        counts = {SAMPLES: n_samples, **self._tokens.count(batch)}
        if self.rl.routing_replay:
            assert isinstance(batch, PolicyBatch), "routing replay needs rollout samples"
            assert batch.routes_TLk is not None or not n_samples, "rl.routing_replay needs recorded routes"
            counts[ROUTES] = 0 if batch.routes_TLk is None else int((batch.routes_TLk >= 0).sum())
        return counts

    def denominators(self) -> dict[str, str]:
        per = TOKENS if self.rl.loss == "grpo" else SAMPLES
        names = {"policy/loss": per, "policy/ratio": per, "policy/clipped": per, "policy/entropy": TOKENS}
        names["rollout/logprob_gap"] = TOKENS
        if self.rl.kl_coef > 0:
            names["policy/kl"] = TOKENS
        if self.rl.routing_replay:
            names["rollout/route_agreement"] = ROUTES
        return names | self._tokens.mtp_denominators()

    def __call__(self, state: TrainState, batch: TokenBatch, counts: Mapping[str, float]) -> LossTerms:
        assert isinstance(batch, PolicyBatch), "policy losses need rollout log-probabilities"
        replay = RouteReplay.of(batch.routes_TLk, state.context) if self.rl.routing_replay else None
        heads = self._tokens.heads(state, batch, self.temperature, with_entropy=True, replay=replay)
        log_prob_T, valid_T = heads.log_prob_T, batch.shift(0).valid_T
        rollout_T = batch.at_sites(batch.rollout_logprob_T)
        terms, kept = self._policy_terms(batch, log_prob_T, rollout_T, valid_T)
        sums = {name: _sum(values, kept) for name, values in zip(("loss", "ratio", "clipped"), terms, strict=True)}
        per = TOKENS if self.rl.loss == "grpo" else SAMPLES
        total = sums["loss"] / max(1.0, counts[per])
        sums = {f"policy/{name}": value.detach() for name, value in sums.items()}
        sums["policy/entropy"] = _sum(heads.entropy_T, valid_T)
        sums["rollout/logprob_gap"] = _sum((log_prob_T.detach() - rollout_T).abs(), valid_T)
        if self.rl.routing_replay:
            # Read before the backward pass, whose recomputed forwards count again.
            agreed = torch.zeros((), device=log_prob_T.device) if replay is None else replay.n_agreed()
            sums["rollout/route_agreement"] = agreed
        if self.rl.kl_coef > 0:
            assert batch.reference_logprob_T is not None, "rl.kl_coef needs reference log-probabilities"
            kl = _sum(kl_k3(log_prob_T, batch.at_sites(batch.reference_logprob_T)), valid_T)
            total = total + self.rl.kl_coef * kl / max(1.0, counts[TOKENS])
            sums["policy/kl"] = kl.detach()
        mtp = self._tokens.mtp_loss(heads, batch, counts)
        return LossTerms(total, sums) if mtp is None else LossTerms(total + mtp.total, sums | mtp.sums)

    def _policy_terms(
        self, batch: PolicyBatch, log_prob_T: Tensor, rollout_T: Tensor, valid_T: Tensor
    ) -> tuple[PolicyTerms, Tensor]:
        """The terms, and which of their entries count."""
        clip, advantage_T = Clip(self.rl.clip_low, self.rl.clip_high), batch.at_sites(batch.advantage_T)
        old_T, weight_T = rollout_T, torch.ones_like(log_prob_T)
        if self.rl.truncate_importance is not None:
            assert batch.old_logprob_T is not None, "rl.truncate_importance needs the trainer's own log-probabilities"
            old_T = batch.at_sites(batch.old_logprob_T)
            weight_T = truncated_weights(old_T, rollout_T, self.rl.truncate_importance)
        if self.rl.loss == "grpo":
            terms = token_terms(log_prob_T, old_T, advantage_T, clip)
            return terms._replace(loss=terms.loss * weight_T), valid_T
        n_sites_N = document_sums(torch.ones_like(log_prob_T), valid_T, batch.layout)
        advantage_N = document_sums(advantage_T, valid_T, batch.layout) / n_sites_N.clamp(min=1.0)
        weight_N = document_sums(weight_T, valid_T, batch.layout) / n_sites_N.clamp(min=1.0)
        terms = sequence_terms(log_prob_T, old_T, advantage_N, valid_T, batch.layout, clip)
        return terms._replace(loss=terms.loss * weight_N), n_sites_N > 0


def _sum(values: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, values, 0.0).sum()
