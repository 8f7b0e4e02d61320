"""Log-probabilities of given tokens: python -m recipes.score checkpoint.load=<dir> input=<file> output=<file>"""

import sys
from pathlib import Path

from bailing_mtp.config import ScoreConfig

from .common import run

PACK_TOKENS = 8192
"""Tokens of one forward; a longer document is a pack of its own."""


def main(config: ScoreConfig) -> None:
    if config.report == "acceptance":
        from .acceptance import report_acceptance

        report_acceptance(config)
        return
    # torch and megatron take seconds to import; mistakes in the config are reported before.
    from bailing_mtp.log import ProgressLine
    from bailing_mtp.training.scoring import score_batch

    from .outputs import require_writable
    from .scores import Result, pack_documents, read_input, write_output
    from .session import find_source, join_ranks, leave_ranks, make_model

    source = find_source(config)
    documents = read_input(Path(config.input), source.arch.vocab_size)
    require_writable("output", config.output)
    context = join_ranks(config, source.arch)
    built = make_model(config, source, context, with_mtp=source.holds_mtp)
    for module in built.modules:
        module.eval()
    packs = pack_documents(documents, PACK_TOKENS)
    logit_width = source.arch.vocab_size if config.write_logits else 0
    result = Result(documents, with_mtp=source.holds_mtp, vocab_size=logit_width)
    line = ProgressLine(sys.stderr if context.is_writer else None)
    # Data-parallel ranks share the packs. Expert-parallel ranks work together on every forward, so all make the
    # same number of them: a rank without a pack repeats the last one, and its result is not used.
    for first in range(0, len(packs), context.dp):
        mine = min(first + context.dp_rank, len(packs) - 1)
        scores = score_batch(built, packs[mine].batch, context, with_logits=config.write_logits)
        if first + context.dp_rank < len(packs):
            result.put(packs[mine], scores)
        done = min(first + context.dp, len(packs))
        line.show(f"scored {done}/{len(packs)} packs", final=done == len(packs))
    result.join(context)
    if context.is_writer:
        write_output(Path(config.output), result)
        print(f"score: {result.summary()}, written to {config.output}")
    context.barrier()
    leave_ranks()


if __name__ == "__main__":
    run(main, ScoreConfig, "score")
