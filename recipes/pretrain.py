"""Pretrain on packed documents: python -m recipes.pretrain [overrides]"""

from bailing_mtp.config import PretrainConfig, check_batch

from .common import run


def main(config: PretrainConfig) -> None:
    # torch and megatron take seconds to import; mistakes in the config are reported before.
    from bailing_mtp.training.flops import training_flops
    from bailing_mtp.training.objective import PretrainObjective
    from bailing_mtp.training.state import build_state

    from .checkpoints import RunCheckpoints, tell_fresh_mtp
    from .documents import open_documents
    from .loop import train
    from .memory import watch_memory
    from .report import Report
    from .resume import continue_run
    from .session import find_source, join_ranks, leave_ranks, make_model, require_mtp

    source = require_mtp(find_source(config, resumes=True), config, config.mtp.loss_scale)
    context = join_ranks(config, source.arch)
    memory = watch_memory(config, source, context)
    microbatches = check_batch(
        tokens_per_step=config.train.tokens_per_step,
        microbatch_tokens=config.train.microbatch_tokens,
        dp=context.dp,
    )
    splits = open_documents(config, source, context, microbatches * context.dp)
    built = make_model(
        config,
        source,
        context,
        with_mtp=config.mtp.loss_scale is not None,
        recompute=config.train.recompute,
        expert_bias_rate=config.optim.expert_bias_rate,
        fused_weight_gradients=config.optim.fused == "apex",
    )
    state = build_state(built, context, config.optim, config.train.steps)
    if source.resumes:
        continue_run(source, state, splits.train)
    objective = PretrainObjective(config.mtp)
    mtp_depth = 0 if config.mtp.loss_scale is None else config.mtp.depth
    flops = training_flops(source.arch, mtp_depth, config.mtp.detach)
    report = Report(config, "pretrain", context, memory, flops, config.train.steps, state.step)
    if source.fresh_mtp:
        tell_fresh_mtp(config, source, context, report)
    checkpoints = RunCheckpoints(config, source, state, splits.train, config.train.steps)
    evaluation = PretrainObjective(config.mtp, depths=config.train.eval_depth)
    train(state, splits.train, objective, config.train, report, splits.valid, checkpoints, evaluation)
    checkpoints.say_how_to_export()
    leave_ranks()


if __name__ == "__main__":
    run(main, PretrainConfig, "pretrain")
