"""The decode kernel set in plain torch: what a rollout calls, by the names of its GPU counterpart."""

from bailing_mtp.kernels.reference.experts import experts, swiglu
from bailing_mtp.kernels.reference.kda_verify import KdaLayerMemory, kda_verify
from bailing_mtp.kernels.reference.mla_verify import apply_rope, mla_verify, rope_table, write_latents
from bailing_mtp.kernels.reference.norm import add_rms_norm, rms_norm
from bailing_mtp.kernels.reference.router import route
from bailing_mtp.kernels.reference.sampling import draw, log_sum_exps

__all__ = [
    "KdaLayerMemory",
    "add_rms_norm",
    "apply_rope",
    "draw",
    "experts",
    "kda_verify",
    "log_sum_exps",
    "mla_verify",
    "rms_norm",
    "rope_table",
    "route",
    "swiglu",
    "write_latents",
]
