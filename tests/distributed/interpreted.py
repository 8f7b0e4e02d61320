"""Rollouts of two ranks by the Triton kernels under the interpreter, against the torch twins on the same ranks.

    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 -m tests.distributed.interpreted
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from bailing_mtp.config import RolloutConfig
from bailing_mtp.contracts.samples import Prompt, SamplingParams
from bailing_mtp.parallel.context import ParallelContext, init_distributed
from bailing_mtp.rollout.engine import RolloutEngine
from bailing_mtp.weights.view import WeightsView
from recipes.bench_case import Draw
from recipes.bench_weights import random_view
from tests.benchmark.sizes import smallest
from tests.distributed import worlds

LAYOUTS = ((2, 2), (1, 2))
KINDS = (SamplingParams(max_new_tokens=4, seed=5), SamplingParams(max_new_tokens=3, temperature=0.0))
DRAFTS = 2
DONE = "equal:"


def check(context: ParallelContext) -> None:
    """Tokens and log-probabilities. An odd number of prompts: in lock step one replica runs dry."""
    view = random_view(smallest(), Draw(context.device, torch.float32, context.rank), context.tp, context.ep)
    _share(view, context)
    prompts = [Prompt(prompt_ids=(3 + i, 5, 8)[: 1 + i % 3], index=i, sampling=KINDS[i % 2]) for i in range(3)]
    found = []
    for kernels in ("torch", "triton"):
        config = RolloutConfig(speculative_tokens=DRAFTS, kernels=kernels, max_running=2)
        engine = RolloutEngine(lambda: view, context, config, tell=lambda line: None)
        found.append([sample for group in engine.generate(prompts) for sample in group.samples])
    for ours, theirs in zip(*found, strict=True):
        assert ours.response_ids == theirs.response_ids
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=1e-4)


def _share(view: WeightsView, context: ParallelContext) -> None:
    """Ranks draw different numbers; what they hold in common is the first one's."""
    whole = random_view(smallest(), Draw(context.device, torch.float32, 0))
    for mine, theirs in zip(view.tensors(), whole.tensors(), strict=True):
        if mine.shape == theirs.shape:
            dist.broadcast(mine, src=0)


def main() -> None:
    torch.set_num_threads(1)
    init_distributed("cpu", timeout_s=60.0)
    for tp, ep in LAYOUTS:
        with worlds.layout(tp, ep) as context:
            check(context)
        if dist.get_rank() == 0:
            print(f"{DONE} tp{tp} ep{ep}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
