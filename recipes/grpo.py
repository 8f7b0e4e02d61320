"""Train a policy on its own rollouts: python -m recipes.grpo checkpoint.load=<dir> data.path=<jsonl> [overrides]"""

from bailing_mtp.config import GrpoConfig

from .common import run


def main(config: GrpoConfig) -> None:
    # torch and megatron take seconds to import; mistakes in the config are reported before.
    from bailing_mtp.rl.advantages import advantages
    from bailing_mtp.rollout.engine import RolloutEngine
    from bailing_mtp.training.policy import PolicyObjective
    from bailing_mtp.training.step import train_step

    from .judge import Judge
    from .policy import engine_config, find_policy, open_policy, open_prompts
    from .progress import RunProgress
    from .rollouts import Rollouts
    from .session import join_ranks, leave_ranks

    source = find_policy(config)
    tokenizer, prompts = open_prompts(config, source)
    context = join_ranks(config, source.arch)
    policy = open_policy(config, source, context, prompts)
    state, rl = policy.state, config.rl
    settings = engine_config(config, prompts)
    engine = RolloutEngine(policy.publish, context, settings, tokenizer, records_routes=rl.routing_replay)
    objective = PolicyObjective(rl, config.mtp, config.sampling.temperature)
    progress = RunProgress(config, source, policy, prompts, tokenizer)
    with Judge(rl, context, tokenizer.decode) as judge:
        while state.step < config.train.steps:
            rollouts = Rollouts(config)
            with progress.rolling():
                while not rollouts.is_enough:
                    with rollouts.timed("switch"):
                        drawn = prompts.draw(rl.prompts_per_rollout)
                        groups = engine.generate(drawn, prompts.rollouts, progress.watch(engine, rollouts))
                    with rollouts.timed("reward"):
                        scores = judge.score(groups)
                    rollouts.add(groups, scores, advantages(scores.rewards, rl.advantage), engine.stats)
                progress.compare(rollouts, groups)
            with rollouts.timed("train"):
                minibatches = policy.minibatches(rollouts.rows())
                results = [train_step(state, batches, objective) for batches in minibatches]
            progress.log(rollouts, minibatches, results)
    progress.close()
    leave_ranks()


if __name__ == "__main__":
    run(main, GrpoConfig, "grpo")
