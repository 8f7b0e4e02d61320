"""Responses to prompts: python -m recipes.generate checkpoint.load=<dir> prompts=<file> output=<file> [overrides]"""

import sys
from pathlib import Path

from bailing_mtp.config import GenerateConfig, check_mtp

from .common import run


def main(config: GenerateConfig) -> None:
    # torch and megatron take seconds to import; mistakes in the config are reported before.
    from bailing_mtp.contracts.clock import WeightsClock
    from bailing_mtp.log import ProgressLine
    from bailing_mtp.rollout.engine import RolloutEngine
    from bailing_mtp.rollout.reduced_head import read_draft_ids
    from bailing_mtp.weights.names import Shard
    from bailing_mtp.weights.view import publish

    from .outputs import require_writable
    from .prompts import open_tokenizer, read_prompts
    from .samples_file import SampleFiles
    from .session import find_source, join_ranks, leave_ranks, make_model, rollout_notes

    source = find_source(config)
    drafts = config.rollout.speculative_tokens
    check_mtp(mtp_layers=int(source.holds_mtp), checkpoint=config.checkpoint.load, speculative_tokens=drafts)
    if config.rollout.draft_vocabulary is not None:
        read_draft_ids(config.rollout.draft_vocabulary, source.arch.vocab_size)
    tokenizer = open_tokenizer(config, source)
    prompts = read_prompts(config, source, tokenizer)
    require_writable("output", config.output)
    context = join_ranks(config, source.arch)
    built = make_model(config, source, context, with_mtp=drafts > 0)
    for module in built.modules:
        module.eval()
    shard, clock = Shard(context.tp, context.tp_rank, context.ep, context.ep_rank), WeightsClock()
    engine = RolloutEngine(
        lambda: publish(built.trunk, built.mtp, shard, clock),
        context,
        config.rollout,
        tokenizer,
        tell=rollout_notes(config.rollout, context),
    )
    files = SampleFiles(Path(config.output), tokenizer, context)
    line = ProgressLine(sys.stderr if context.is_writer else None)
    mine = sum(prompt.samples_per_prompt for prompt in prompts[context.dp_rank :: context.dp])

    def progress(stats) -> None:
        length = stats.summary()["accept_length"]
        drafted = f"  accept length {length:.2f}" if drafts and length else ""
        rate = stats.tokens / max(stats.seconds, 1e-9)
        line.show(
            f"samples {stats.samples}/{mine}{drafted}  {rate:,.0f} tokens/s", final=stats.samples == mine
        )

    groups = engine.generate(prompts, progress=progress, on_sample=files.add)
    summary = engine.stats.summary()
    files.finish(groups, summary)
    if context.is_writer:
        print(
            f"generate: {summary['samples']:,} samples, {summary['tokens']:,} tokens in {summary['seconds']:.1f} s "
            f"({summary['tokens_per_second']:,.0f} tokens/s), accept length "
            f"{summary['accept_length'] or 1.0:.3f}, written to {config.output}"
        )
    engine.release()
    leave_ranks()


if __name__ == "__main__":
    run(main, GenerateConfig, "generate")
