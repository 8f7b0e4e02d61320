"""Fine-tune on conversations, responses only: python -m recipes.sft checkpoint.load=<dir> data.path=<jsonl>"""

from bailing_mtp.config import SftConfig, check_batch

from .common import run


def main(config: SftConfig) -> None:
    # torch and megatron take seconds to import; mistakes in the config are reported before.
    from bailing_mtp.training.objective import PretrainObjective

    from .dialogues import open_conversations
    from .finetune import fine_tune, make_trained_model
    from .memory import watch_memory
    from .session import find_source, join_ranks, require_mtp

    source = require_mtp(find_source(config, resumes=True), config, config.mtp.loss_scale)
    context = join_ranks(config, source.arch)
    memory = watch_memory(config, source, context)
    microbatches = check_batch(
        tokens_per_step=config.train.tokens_per_step,
        microbatch_tokens=config.train.microbatch_tokens,
        dp=context.dp,
    )
    splits = open_conversations(config, source, context, microbatches * context.dp)
    built = make_trained_model(config, source, context)
    evaluation = PretrainObjective(config.mtp, depths=config.train.eval_depth)
    objective = PretrainObjective(config.mtp)
    fine_tune(config, "sft", source, context, memory, built, splits, objective, evaluation)


if __name__ == "__main__":
    run(main, SftConfig, "sft")
