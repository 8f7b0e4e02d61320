"""Train a policy on its own rollouts: python -m recipes.grpo checkpoint.load=<dir> data.path=<jsonl> [overrides]"""

from bailing_mtp.config import GrpoConfig

from .common import run


def main(config: GrpoConfig) -> None:
    # torch and megatron take seconds to import; mistakes in the config are reported before.
    from bailing_mtp.rollout.engine import RolloutEngine

    from .backlog import Backlog
    from .heldout import HeldOut
    from .judge import Judge
    from .policy import engine_config, find_policy, open_policy
    from .policy_prompts import open_prompts
    from .progress import RunProgress
    from .session import join_ranks, leave_ranks, rollout_notes
    from .stop_signal import StopSignal
    from .update import update

    source = find_policy(config)
    opened = open_prompts(config, source)
    tokenizer, prompts = opened.tokenizer, opened.train
    context = join_ranks(config, source.arch)
    rl, backlog = config.rl, Backlog(prompts, config.rl)
    settings, tell = engine_config(config, opened), rollout_notes(config.rollout, context)
    policy = open_policy(config, source, context, backlog, settings)
    state = policy.state
    engine = RolloutEngine(
        policy.publish, context, settings, tokenizer, tell=tell, records_routes=rl.routing_replay
    )
    progress = RunProgress(config, source, policy, opened, backlog)
    with Judge(rl, context, tokenizer.decode) as judge, StopSignal(context, engine.release) as stop:
        held_out = HeldOut(config, opened.valid, engine, judge)
        progress.start(held_out)
        while state.step < config.train.steps:
            done = update(config, policy, engine, backlog, judge, progress)
            progress.log(done.rollouts, done.minibatches, done.results, held_out, stop)
    progress.close()
    engine.release()
    leave_ranks()


if __name__ == "__main__":
    run(main, GrpoConfig, "grpo")
