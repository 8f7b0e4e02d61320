"""Bytes that each decode kernel cannot avoid: every input read once, every output written once.

What a kernel keeps between its own launches is not counted, nor are indices of a few bytes per row.

n rows of a step, S tokens fed to each, R = n * S.
"""

from dataclasses import dataclass

from bailing_mtp.contracts.architecture import Architecture

FP32_BYTES = 4
CHOICE_BYTES = 8 + FP32_BYTES
"""Expert id and weight of an assignment."""


def floor_us(n_bytes: int, tb_per_s: float) -> float:
    """Microseconds for `n_bytes` at a bandwidth in 10^12 bytes per second."""
    return n_bytes / (tb_per_s * 1e6)


@dataclass(frozen=True)
class Floors:
    """Floors in bytes for one model on one GPU. item_bytes: of a weight or activation."""

    arch: Architecture
    item_bytes: int

    def kda_verify(self, n: int, S: int, replayed: int) -> int:
        """State read and written, `replayed` records read and S written, windows, projections, weights."""
        arch, heads = self.arch, self.arch.num_heads
        d_k, d_v, taps = arch.kda_head_dim, arch.v_head_dim, arch.conv_kernel
        channels = heads * (2 * d_k + d_v)
        state = 2 * heads * d_k * d_v * FP32_BYTES
        records = (replayed + S) * heads * (2 * d_k + d_v) * FP32_BYTES
        window = (2 * (taps - 1) + S) * channels * self.item_bytes
        tokens = S * (sum(arch.kda_in_rows) + heads * d_v) * self.item_bytes
        weights = (channels * taps + d_v) * self.item_bytes + heads * (1 + d_k) * FP32_BYTES
        return n * (state + records + window + tokens) + weights

    def mla_verify(self, n: int, S: int, context_tokens: int) -> int:
        """The rows of each sequence once, whatever the number of heads and tokens; queries and outputs."""
        rank, rope, heads = self.arch.kv_lora_rank, self.arch.qk_rope_head_dim, self.arch.num_heads
        return n * (context_tokens * (rank + rope) + S * heads * (2 * rank + rope)) * self.item_bytes

    def write_latents(self, R: int) -> int:
        return 2 * R * (self.arch.kv_lora_rank + self.arch.qk_rope_head_dim) * self.item_bytes

    def apply_rope(self, R: int, heads: int) -> int:
        """Values in and out, and a cosine and a sine of each pair."""
        return R * self.arch.qk_rope_head_dim * (2 * heads * self.item_bytes + FP32_BYTES)

    def cache_latents(self, R: int) -> int:
        """Latent rows and query latents in and out."""
        arch = self.arch
        values = arch.kv_lora_rank + arch.qk_rope_head_dim + (arch.q_lora_rank or 0)
        return R * (2 * values * self.item_bytes + arch.qk_rope_head_dim * FP32_BYTES)

    def absorb_queries(self, R: int) -> int:
        """The key up-projection; queries in, as wide as cached rows out."""
        arch, heads = self.arch, self.arch.num_heads
        weight = heads * arch.qk_nope_head_dim * arch.kv_lora_rank
        values = heads * (arch.qk_head_dim + arch.kv_lora_rank + arch.qk_rope_head_dim)
        return (weight + R * values) * self.item_bytes + R * arch.qk_rope_head_dim * FP32_BYTES

    def gated_values(self, R: int) -> int:
        """The value up-projection; latent outputs and gates in, values out."""
        arch, heads = self.arch, self.arch.num_heads
        weight = heads * arch.v_head_dim * arch.kv_lora_rank
        return (weight + R * heads * (arch.kv_lora_rank + 1 + arch.v_head_dim)) * self.item_bytes

    def embed(self, R: int) -> int:
        return 2 * R * self.arch.hidden_size * self.item_bytes

    def norm_pair(self, R: int) -> int:
        return (4 * R + 2) * self.arch.hidden_size * self.item_bytes

    def rms_norm(self, R: int) -> int:
        return (2 * R + 1) * self.arch.hidden_size * self.item_bytes

    def add_rms_norm(self, R: int) -> int:
        return (4 * R + 1) * self.arch.hidden_size * self.item_bytes

    def swiglu(self, R: int, width: int) -> int:
        return 3 * R * width * self.item_bytes

    def route(self, R: int) -> int:
        """Router weight and bias, rows, choices."""
        arch = self.arch
        experts = arch.num_experts * (arch.hidden_size * self.item_bytes + FP32_BYTES)
        return experts + R * (arch.hidden_size * self.item_bytes + arch.experts_per_token * CHOICE_BYTES)

    def experts(self, R: int, touched: int) -> int:
        """The three matrices of each touched expert and of the shared one; rows, residuals, sums, choices."""
        arch = self.arch
        widths = touched * arch.moe_intermediate_size + (arch.shared_intermediate_size or 0)
        rows = 3 * arch.hidden_size * self.item_bytes + arch.experts_per_token * CHOICE_BYTES
        return widths * 3 * arch.hidden_size * self.item_bytes + R * rows

    def linear(self, R: int, inputs: int, outputs: int) -> int:
        return (inputs * outputs + R * (inputs + outputs)) * self.item_bytes

    def log_sum_exps(self, R: int) -> int:
        """fp32 logits; a temperature and two results of each row."""
        return R * (self.arch.vocab_size + 3) * FP32_BYTES

    def draw(self, n: int, with_residual: bool) -> int:
        """fp32 logits of the rows drawn from, and of their drafts where a residual is drawn."""
        return n * self.arch.vocab_size * FP32_BYTES * (1 + with_residual)
