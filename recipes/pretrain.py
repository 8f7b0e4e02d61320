"""Pretrain on packed documents: python -m recipes.pretrain [overrides]"""

from pathlib import Path

from bailing_mtp.config import PretrainConfig, check_batch, check_mtp

from .common import run


def main(config: PretrainConfig) -> None:
    # torch and megatron take seconds to import; mistakes in the config are reported before.
    from bailing_mtp.training.metrics import MetricsFile
    from bailing_mtp.training.objective import PretrainObjective
    from bailing_mtp.training.state import build_state

    from .documents import open_documents
    from .loop import train
    from .session import find_source, join_ranks, leave_ranks, make_model

    source = find_source(config)
    check_mtp(
        mtp_layers=int(source.holds_mtp), checkpoint=config.checkpoint.load, loss_scale=config.mtp.loss_scale
    )
    context = join_ranks(config, source.arch)
    microbatches = check_batch(
        tokens_per_step=config.train.tokens_per_step,
        microbatch_tokens=config.train.microbatch_tokens,
        dp=context.dp,
    )
    loader = open_documents(config, source, context, microbatches * context.dp)
    built = make_model(
        config,
        source,
        context,
        with_mtp=config.mtp.loss_scale is not None,
        recompute=config.train.recompute,
        expert_bias_rate=config.optim.expert_bias_rate,
    )
    state = build_state(built, context, config.optim, config.train.steps)
    objective = PretrainObjective(config.mtp)
    metrics = MetricsFile(Path(config.run_dir) / "metrics.jsonl") if context.is_writer else None
    train(state, loader, objective, config.train, metrics)
    leave_ranks()


if __name__ == "__main__":
    run(main, PretrainConfig, "pretrain")
