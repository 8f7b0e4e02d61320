"""Train on preference pairs: python -m recipes.dpo checkpoint.load=<dir> data.path=<jsonl>"""

from bailing_mtp.config import DpoConfig, check_batch

from .common import run


def main(config: DpoConfig) -> None:
    # torch and megatron take seconds to import; mistakes in the config are reported before.
    import functools

    from bailing_mtp.data.dialogues import PairLoader
    from bailing_mtp.training.preference import DpoObjective

    from .dialogues import open_pairs
    from .documents import Splits
    from .finetune import fine_tune, make_trained_model
    from .memory import watch_memory
    from .reference import open_reference
    from .session import find_source, join_ranks, require_mtp

    source = require_mtp(find_source(config, resumes=True), config, config.mtp.loss_scale)
    context = join_ranks(config, source.arch)
    memory = watch_memory(config, source, context)
    microbatches = check_batch(
        tokens_per_step=config.train.tokens_per_step,
        microbatch_tokens=config.train.microbatch_tokens,
        dp=context.dp,
    )
    shards = open_pairs(config, source, context)
    built = make_trained_model(config, source, context)
    # Before the optimizer exists: the policy is still its own reference.
    reference = open_reference(config, source, shards, built, context)
    loader = functools.partial(
        PairLoader,
        shards,
        reference.logprobs_N,
        reference.key,
        config.train.microbatch_tokens,
        config.data.seq_tokens,
        context.dp_rank,
        context.dp,
        microbatches * context.dp,
        config.seed,
        valid_fraction=config.data.valid_fraction,
    )
    splits = Splits(loader("train"), loader("valid") if config.train.eval_every is not None else None)
    fine_tune(config, "dpo", source, context, memory, built, splits, DpoObjective(config.dpo, config.mtp))


if __name__ == "__main__":
    run(main, DpoConfig, "dpo")
