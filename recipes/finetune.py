"""What sft and dpo do once data and model stand: optimizer, resume, objective, loop."""

from bailing_mtp.config import DpoConfig, SftConfig
from bailing_mtp.model.build import BuiltModel
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.flops import training_flops
from bailing_mtp.training.objective import Objective
from bailing_mtp.training.state import build_state

from .checkpoints import RunCheckpoints, tell_fresh_mtp
from .documents import Splits
from .loop import train
from .memory import MemoryWatch
from .report import Report
from .resume import continue_run
from .session import Source, leave_ranks, make_model


def make_trained_model(config: SftConfig | DpoConfig, source: Source, context: ParallelContext) -> BuiltModel:
    """The filled model, with the MTP layer if its loss is on."""
    return make_model(
        config,
        source,
        context,
        with_mtp=config.mtp.loss_scale is not None,
        recompute=config.train.recompute,
        expert_bias_rate=config.optim.expert_bias_rate,
        fused_weight_gradients=config.optim.fused == "apex",
    )


def fine_tune(
    config: SftConfig | DpoConfig,
    verb: str,
    source: Source,
    context: ParallelContext,
    memory: MemoryWatch,
    built: BuiltModel,
    splits: Splits,
    objective: Objective,
    evaluation: Objective | None = None,
) -> None:
    """Train to the end, or go on from the run's last checkpoint, and leave the ranks."""
    state = build_state(built, context, config.optim, config.train.steps)
    if source.resumes:
        continue_run(source, state, splits.train)
    mtp_depth = 0 if config.mtp.loss_scale is None else config.mtp.depth
    flops = training_flops(source.arch, mtp_depth, config.mtp.detach)
    report = Report(config, verb, context, memory, flops, config.train.steps, state.step)
    if source.fresh_mtp:
        tell_fresh_mtp(config, source, context, report)
    checkpoints = RunCheckpoints(config, source, state, splits.train, config.train.steps)
    train(state, splits.train, objective, config.train, report, splits.valid, checkpoints, evaluation)
    checkpoints.say_how_to_export()
    leave_ranks()
