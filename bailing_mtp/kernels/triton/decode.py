"""The decode kernel set in Triton, by the names of kernels.reference.decode."""

from bailing_mtp.kernels.reference.experts import SharedExpert
from bailing_mtp.kernels.reference.kda_verify import KdaLayerMemory
from bailing_mtp.kernels.reference.mla_verify import rope_table
from bailing_mtp.kernels.triton.experts import experts
from bailing_mtp.kernels.triton.kda_verify import kda_verify
from bailing_mtp.kernels.triton.latents import apply_rope, write_latents
from bailing_mtp.kernels.triton.linear import linear
from bailing_mtp.kernels.triton.linears import linears
from bailing_mtp.kernels.triton.mla_step import absorb_queries, cache_latents, gated_values
from bailing_mtp.kernels.triton.mla_verify import mla_verify
from bailing_mtp.kernels.triton.norm import add_rms_norm, rms_norm
from bailing_mtp.kernels.triton.router import route
from bailing_mtp.kernels.triton.rows import embed, norm_pair, step_rows
from bailing_mtp.kernels.triton.sampling import draw, draw_fresh, log_sum_exps
from bailing_mtp.kernels.triton.settle import commit, keep_hidden, read_slots, settle
from bailing_mtp.kernels.triton.swiglu import swiglu
from bailing_mtp.kernels.triton.verdict import block_log_probs, count_accepted, draft_log_probs

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
