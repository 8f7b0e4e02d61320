"""What a run's largest rollout takes of a GPU, as the engine will take it: a part of the memory plan."""

import math

from bailing_mtp.config import GrpoConfig, RolloutConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.rollout.engine import MAX_TEMPLATES
from bailing_mtp.rollout.memory import MemoryPlan
from bailing_mtp.rollout.peer_room import peer_bytes
from bailing_mtp.rollout.reduced_head import read_draft_ids
from bailing_mtp.training.activations import FP32, PassSizes, layer_of
from bailing_mtp.training.memory_plan import GIB, RolloutBytes
from bailing_mtp.weights.names import Shard

from .session import DTYPES

LOGITS_IN_GRAPHS = 3
"""Memory that the graphs of decode steps share, in fp32 logits of all tokens that a full step feeds: 2.7 to 3.7 were
measured at 256 rows."""


def rollout_bytes(
    config: GrpoConfig, engine: RolloutConfig, passes: PassSizes, context: ParallelContext
) -> RolloutBytes:
    """Raises UserError naming rollout.memory_gb where that is too little."""
    assert engine.context_tokens is not None
    arch, dtype, samples = passes.arch, DTYPES[config.model.dtype], config.sampling.samples_per_prompt
    n_prompts = math.ceil(config.rl.prompts_per_rollout * config.rl.oversample)
    # A rollout of held-out prompts may be larger than one of training.
    most = engine.max_running if config.data.valid_path else -(-n_prompts // context.dp) * samples
    rows = min(engine.max_running, most)
    beside_bytes = peer_bytes(engine, context.tp, rows, arch.hidden_size, dtype)
    beside_bytes += _draft_rows_bytes(engine, arch, passes)
    plan = MemoryPlan.build(
        arch,
        Shard(context.tp, context.tp_rank, context.ep, context.ep_rank),
        engine.speculative_tokens,
        rows,
        min(MAX_TEMPLATES, n_prompts),
        engine.context_tokens,
        min(engine.block_tokens, engine.context_tokens),
        dtype,
        None if engine.memory_gb is None else int(engine.memory_gb * GIB),
        beside_bytes=beside_bytes,
    )
    fed_tokens = rows * (engine.speculative_tokens + 1)
    graphs = LOGITS_IN_GRAPHS * fed_tokens * arch.vocab_size // context.tp * FP32 if engine.cuda_graphs else 0
    # A prefill makes the tensors that a forward of training keeps, one block at a time.
    prefill = PassSizes(arch, passes.settings, engine.prefill_tokens, context.tp, context.ep)
    layers = [layer_of(prefill, layer) for layer in arch.trunk_plan()]
    working = max(block.kept + block.again for layer in layers for block in (layer.mixer, layer.mlp))
    return RolloutBytes(plan.total_bytes, graphs, working, stays=engine.keep_memory)


def _draft_rows_bytes(engine: RolloutConfig, arch: Architecture, passes: PassSizes) -> int:
    """Rows of the head that rollout.draft_vocabulary copies."""
    if engine.draft_vocabulary is None:
        return 0
    n_ids = len(read_draft_ids(engine.draft_vocabulary, arch.vocab_size))
    return -(-n_ids // passes.tp) * arch.hidden_size * passes.width
