"""The decode kernel set in Triton, by the names of kernels.reference.decode."""

from bailing_mtp.kernels.reference.kda_verify import KdaLayerMemory
from bailing_mtp.kernels.reference.mla_verify import rope_table
from bailing_mtp.kernels.triton.experts import experts
from bailing_mtp.kernels.triton.kda_verify import kda_verify
from bailing_mtp.kernels.triton.latents import apply_rope, write_latents
from bailing_mtp.kernels.triton.mla_verify import mla_verify
from bailing_mtp.kernels.triton.norm import add_rms_norm, rms_norm
from bailing_mtp.kernels.triton.router import route
from bailing_mtp.kernels.triton.sampling import draw, log_sum_exps
from bailing_mtp.kernels.triton.swiglu import swiglu

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
