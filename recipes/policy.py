"""What grpo trains: a policy on own rollouts, the prompts they begin with, the weights they are drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bailing_mtp.config import ConfigError, GrpoConfig, RolloutConfig, check_mtp, check_replay, show
from bailing_mtp.contracts.policy import PolicyBatch
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.model.trunk import BailingModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rl.samples import PolicyRow, pack_rows
from bailing_mtp.rollout.reduced_head import read_draft_ids
from bailing_mtp.training.policy_scores import with_logprobs
from bailing_mtp.training.state import TrainState, build_state
from bailing_mtp.weights.view import WeightsView, publish

from .memory import MemoryWatch, watch_memory
from .policy_prompts import Prompts
from .resume import Position, continue_run, shard_of
from .session import Source, find_source, make_model, require_mtp


def find_policy(config: GrpoConfig) -> Source:
    """Where the policy comes from. Raises UserError where an MTP loss or drafts find no MTP layer, routing replay no
    experts, or the file of rollout.draft_vocabulary no use."""
    source = require_mtp(find_source(config, resumes=True), config, config.mtp.loss_scale)
    if config.mtp.loss_scale is None:
        check_mtp(
            mtp_layers=int(source.holds_mtp),
            checkpoint=config.checkpoint.load,
            speculative_tokens=config.rollout.speculative_tokens,
        )
    if config.rollout.draft_vocabulary is not None:
        read_draft_ids(config.rollout.draft_vocabulary, source.arch.vocab_size)
    if config.rl.routing_replay:
        check_replay(source.arch.n_expert_layers)
    _require_same_reference(config, source)
    return source


def _require_same_reference(config: GrpoConfig, source: Source) -> None:
    """Refuse to continue with another model in the place of the reference. Raises ConfigError."""
    if not source.resumes or config.rl.kl_coef == 0:
        return
    assert source.sharded is not None
    before, now = source.sharded.state["config"]["checkpoint"]["load"], config.checkpoint.load
    if _place(before) != _place(now):
        raise ConfigError(
            f"checkpoint.load: was {show(before)} when {source.directory} was written, now {show(now)}; with "
            f"rl.kl_coef={config.rl.kl_coef:g} it is also the reference model of the whole run, so it must stay"
        )


def _place(directory: str | None) -> Path | None:
    return None if directory is None else Path(directory).resolve()


def engine_config(config: GrpoConfig, prompts: Prompts) -> RolloutConfig:
    """rollout.*, with room for the longest of all prompts, so that every rollout has the same memory and graphs."""
    longest = max(loader.longest_tokens for loader in (prompts.train, prompts.valid) if loader is not None)
    needed = longest + config.sampling.max_new_tokens
    return config.rollout.model_copy(update={"context_tokens": config.rollout.context_tokens or needed})


@dataclass(frozen=True)
class Policy:
    """The model in training, its MTP layer (frozen where mtp.loss_scale is null) and the reference model."""

    config: GrpoConfig
    state: TrainState
    built: BuiltModel
    reference: BailingModel | None
    """The trunk before the first step; only where rl.kl_coef > 0."""
    memory: MemoryWatch

    def publish(self) -> WeightsView:
        """The weights as they are now; nothing is copied."""
        state = self.state
        return publish(self.built.trunk, self.built.mtp, shard_of(state.context), state.clock)

    def minibatches(self, rows: Sequence[PolicyRow]) -> list[list[PolicyBatch]]:
        """This rank's microbatches of each optimizer step on one rollout, with all log-probabilities that the loss
        compares with: those of the weights as they are before the first of these steps.
        """
        config, context = self.config, self.state.context
        rl, temperature = config.rl, config.sampling.temperature
        found = []
        for first in range(rl.minibatches):
            # Dealt like cards: every minibatch has samples of every prompt.
            packs = pack_rows(rows[first :: rl.minibatches], config.train.microbatch_tokens, context.dp)
            batches = packs[context.dp_rank]
            if rl.truncate_importance is not None:
                batches = with_logprobs(batches, "old_logprob_T", self.built.trunk, context, temperature)
            if self.reference is not None:
                batches = with_logprobs(batches, "reference_logprob_T", self.reference, context, temperature)
            found.append(batches)
        return found


def open_policy(
    config: GrpoConfig, source: Source, context: ParallelContext, data: Position, engine: RolloutConfig
) -> Policy:
    """The policy at the run's start, or where its last checkpoint left it; `data` is then put there, too.

    engine: as engine_config gives it. Raises UserError, before anything is loaded, where memory will not suffice.
    """
    memory = watch_memory(config, source, context, engine)
    trains_mtp = config.mtp.loss_scale is not None
    built = make_model(
        config,
        source,
        context,
        with_mtp=trains_mtp or config.rollout.speculative_tokens > 0,
        recompute=config.train.recompute,
        expert_bias_rate=config.optim.expert_bias_rate,
        fused_weight_gradients=config.optim.fused == "apex",
    )
    state = build_state(built, context, config.optim, config.train.steps, trains_mtp=trains_mtp)
    reference = None
    if config.rl.kl_coef > 0:
        # Of the run's start, also where the policy itself comes from the run's last checkpoint.
        reference = make_model(config, find_source(config), context, with_mtp=False).trunk
        reference.requires_grad_(False)
    if source.resumes:
        continue_run(source, state, data)
    return Policy(config, state, built, reference, memory)
