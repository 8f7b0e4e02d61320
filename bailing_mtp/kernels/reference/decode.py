"""The decode kernel set in plain torch: what a rollout calls, by the names of its GPU counterpart."""

from bailing_mtp.kernels.reference.experts import SharedExpert, experts, swiglu
from bailing_mtp.kernels.reference.kda_verify import KdaLayerMemory, kda_verify
from bailing_mtp.kernels.reference.linear import linear, linears
from bailing_mtp.kernels.reference.mla_step import absorb_queries, cache_latents, gated_values
from bailing_mtp.kernels.reference.mla_verify import apply_rope, mla_verify, rope_table, write_latents
from bailing_mtp.kernels.reference.norm import add_rms_norm, rms_norm
from bailing_mtp.kernels.reference.router import route
from bailing_mtp.kernels.reference.rows import embed, norm_pair, step_rows
from bailing_mtp.kernels.reference.sampling import draw, draw_fresh, log_sum_exps
from bailing_mtp.kernels.reference.settle import commit, keep_hidden, read_slots, settle
from bailing_mtp.kernels.reference.verdict import block_log_probs, count_accepted, draft_log_probs

__all__ = [
    "KdaLayerMemory",
    "SharedExpert",
    "absorb_queries",
    "add_rms_norm",
    "apply_rope",
    "block_log_probs",
    "cache_latents",
    "commit",
    "count_accepted",
    "draft_log_probs",
    "draw",
    "draw_fresh",
    "embed",
    "experts",
    "gated_values",
    "kda_verify",
    "keep_hidden",
    "linear",
    "linears",
    "log_sum_exps",
    "mla_verify",
    "norm_pair",
    "read_slots",
    "rms_norm",
    "rope_table",
    "route",
    "settle",
    "step_rows",
    "swiglu",
    "write_latents",
]
