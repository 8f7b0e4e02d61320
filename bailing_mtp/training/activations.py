"""What one microbatch needs on a rank: bytes that each layer keeps for its backward, and that its backward takes.

Kept is every storage that autograd saves, counted once (a view keeps the whole of what it looks at): tensors of a
layer's forward that its backward reads. Working are the largest tensors that the backward of a block makes and that
live at one time. Both follow from the sizes of the model, the kernels and the recompute mode; parameters and their
gradients' buffers are not part of it.

Letters in formulae: T tokens of the pack, s of this rank's sequence shard, h heads of this rank, H hidden size,
d and v channels of a key and a value head, n + r of an MLA key, A = s * k choices of experts, E experts of this rank,
F width, b bytes of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bailing_mtp.config import MtpConfig
from bailing_mtp.contracts.architecture import Architecture, LayerPlan
from bailing_mtp.losses.chunked import chunk_tokens_for
from bailing_mtp.losses.fused_head import fused_chunk_tokens
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.training.flops import KDA_CHUNK_TOKENS

FP32, INT64 = 4, 8
TWIN_KDA_VALUES = 49
"""fp32 values that the torch twin keeps for each key channel of a token and head, as autograd counts them."""
STREAM_GRADS = 3
"""Gradients of the residual stream that live at once: of a layer's output, of its branch, and their sum."""


@dataclass(frozen=True)
class PassSizes:
    """One microbatch on one rank."""

    arch: Architecture
    settings: ModelSettings
    tokens: int
    """Of the pack, over all tensor-parallel ranks (T)."""
    tp: int = 1
    ep: int = 1

    @property
    def width(self) -> int:
        """Bytes of an activation (b)."""
        return self.settings.dtype.itemsize

    @property
    def shard_tokens(self) -> int:
        """Tokens of this rank's sequence shard (s)."""
        return -(-self.tokens // self.tp)

    @property
    def heads(self) -> int:
        return self.arch.num_heads // self.tp

    @property
    def stream_bytes(self) -> int:
        """One [s, H] tensor of the residual stream."""
        return self.shard_tokens * self.arch.hidden_size * self.width

    @property
    def norm_bytes(self) -> int:
        """What a norm keeps beside its input: the inverse root of every row."""
        return self.shard_tokens * FP32


class Block(NamedTuple):
    """A mixer or an MLP with its norm and its residual branch, bytes."""

    kept: int
    """From its forward to its backward."""
    working: int
    """Of its backward."""
    again: int = 0
    """What selective recompute makes in the backward, beside `kept`."""


class Layer(NamedTuple):
    """A trunk layer, bytes."""

    mixer: Block
    mlp: Block
    input: int
    """Its input, all that full recompute keeps."""


def layer_of(sizes: PassSizes, plan: LayerPlan) -> Layer:
    """A layer without full recompute; what it keeps includes its input."""
    mixer = kda_block(sizes) if plan.mixer == "kda" else mla_block(sizes)
    mlp = dense_block(sizes, sizes.arch.intermediate_size) if plan.mlp == "dense" else moe_block(sizes, plan)
    # Each block keeps the residual stream before it, which its norm reads, and what the norm gives.
    beside = 2 * sizes.stream_bytes + sizes.norm_bytes
    return Layer(_with(mixer, beside, sizes), _with(mlp, beside, sizes), sizes.stream_bytes)


def _with(block: Block, kept: int, sizes: PassSizes) -> Block:
    return Block(block.kept + kept, block.working + STREAM_GRADS * sizes.stream_bytes, block.again)


def kda_block(sizes: PassSizes) -> Block:
    """The mixer between its norm and its residual sum."""
    arch, T, b, h = sizes.arch, sizes.tokens, sizes.width, sizes.heads
    d, v, chunk = arch.kda_head_dim, arch.v_head_dim, KDA_CHUNK_TOKENS
    projected, output = T * sum(arch.kda_in_rows) // sizes.tp * b, T * h * v * b
    weight_grads = (sum(arch.kda_in_rows) // sizes.tp + h * v) * arch.hidden_size * b
    if sizes.settings.kda == "fla":
        # Normalised q and k with their inverse norms, v and the gate's input each made contiguous; beta in fp32; the
        # two lower triangles of a chunk. Everything else fla computes again.
        inside = T * h * ((3 * d + v) * b + 3 * FP32 + 2 * chunk * b) + output
        states = 2 * -(-T // chunk) * h * d * v * b
        again_in_kernel = T * h * (d * FP32 + (3 * d + 2 * v) * b)
        gradients = T * h * (6 * d * FP32 + 2 * chunk * FP32 + 2 * v * b)
        working = states + again_in_kernel + gradients
    else:
        inside = T * h * d * TWIN_KDA_VALUES * FP32 + output
        working = inside
    if sizes.settings.kernels == "torch":
        # The output norm of torch's functions: its input in fp32, if that is another one, what it gives, the gate.
        inside += T * h * v * FP32 * (2 + (b < FP32))
    working = max(working, 2 * projected + weight_grads)
    if sizes.settings.recompute == "selective":
        return Block(projected + output, working, inside)
    return Block(projected + output + inside, working)


def mla_block(sizes: PassSizes) -> Block:
    """The mixer between its norm and its residual sum."""
    arch, T, s, b, h = sizes.arch, sizes.tokens, sizes.shard_tokens, sizes.width, sizes.heads
    d, v, n, rank = arch.qk_head_dim, arch.v_head_dim, arch.qk_nope_head_dim, arch.kv_lora_rank
    low = s * (2 * rank + arch.qk_rope_head_dim) * b + sizes.norm_bytes
    if arch.q_lora_rank is not None:
        low += s * 2 * arch.q_lora_rank * b + sizes.norm_bytes
    # Queries, keys, the kv_b output that values lie in, the output at the keys' width; gate, log-sum-exp.
    attention = T * h * ((3 * d + n + v) * b + b + FP32)
    gated = T * h * v * b
    # Padded values, output and gradient, three gradients, and those of the queries once more in fp32.
    working = T * h * d * (6 * b + FP32)
    return Block(low + attention + gated, working)


def dense_block(sizes: PassSizes, width: int) -> Block:
    """SwiGLU: gate and up, and their product."""
    T, b, f = sizes.tokens, sizes.width, width // sizes.tp
    kept = T * 3 * f * b
    if sizes.settings.kernels == "torch":
        kept += T * f * b  # silu(gate)
    return Block(kept, T * 3 * f * b + 3 * f * sizes.arch.hidden_size * b)


def moe_block(sizes: PassSizes, plan: LayerPlan) -> Block:
    """Router, routed experts and the shared one."""
    arch, s, b, H = sizes.arch, sizes.shard_tokens, sizes.width, sizes.arch.hidden_size
    assert arch.num_experts is not None
    experts, k, F = arch.num_experts // sizes.ep, arch.experts_per_token, arch.moe_intermediate_size
    A = s * k
    shared = dense_block(sizes, arch.shared_intermediate_size) if arch.shared_intermediate_size else Block(0, 0)
    # Logits, the ids and scores of the choices, their sum.
    router = s * (arch.num_experts * FP32 + k * (INT64 + FP32) + FP32)
    inputs, hidden, product = A * H * b, A * 2 * F * b, A * F * b
    weight_grads = experts * 3 * F * H * b
    if sizes.settings.experts == "grouped" and sizes.settings.backend == "local":
        # On the ranks that a token goes to, with all of its choices; experts that are all here get it once.
        rows = s * ranks_of_a_token(arch, sizes.ep)
        received = rows * H * b if sizes.ep > 1 else 0
        # Where each choice of each row went, and weights; where each token was sent.
        places = rows * k * 3 * INT64 + A * FP32 + (s * sizes.ep * 2 * INT64 if sizes.ep > 1 else 0)
        working = weight_grads + product + hidden + inputs + received
        if sizes.settings.recompute == "selective":
            return Block(router + shared.kept + hidden + places + received, working, inputs + product)
        return Block(router + shared.kept + hidden + places + inputs + product, working)
    # megatron-core's dispatcher and a SwiGLU of torch's functions.
    limits = 0 if plan.swiglu_limit is None else 2
    kept = inputs + hidden + (3 + limits) * product + s * arch.num_experts * (3 * FP32 + 2)
    return Block(router + shared.kept + kept, weight_grads + 2 * (inputs + hidden))


def ranks_of_a_token(arch: Architecture, ep: int) -> int:
    """At most: as many as hold one of its experts, which lie in its groups."""
    groups = arch.num_groups
    ranks_of_a_group = -(-ep // groups) + (ep % groups > 0 and groups % ep > 0)
    return min(ep, arch.experts_per_token, arch.groups_per_token * ranks_of_a_group)


def rope_bytes(sizes: PassSizes) -> int:
    """Cosines and sines of every token."""
    return sizes.tokens * sizes.arch.qk_rope_head_dim * FP32


def mtp_blocks(sizes: PassSizes, depth: int) -> tuple[Block, ...]:
    """The MTP layer at one depth (from 0), in the order of its forward. It is never recomputed as a whole."""
    mixer, mlp, _ = layer_of(sizes, sizes.arch.mtp_plan())
    if depth:
        # Joined with the chain's rows the output is as wide as the values are.
        narrower = sizes.tokens * sizes.heads * (sizes.arch.qk_head_dim - sizes.arch.v_head_dim) * sizes.width
        mixer = mixer._replace(kept=mixer.kept - narrower, working=mixer.working + chain_bytes(sizes))
    # The embedding, and both norms joined; the last norm's input. What each depth gives is counted with the heads.
    joined = Block(3 * sizes.stream_bytes + 2 * sizes.norm_bytes + rope_bytes(sizes), 5 * sizes.stream_bytes)
    return joined, mixer, mlp, Block(sizes.stream_bytes + sizes.norm_bytes, 2 * sizes.stream_bytes)


def chain_bytes(sizes: PassSizes) -> int:
    """fp32 tensors of the backward of a chain's attention, at depths beyond the first."""
    arch = sizes.arch
    return sizes.tokens * sizes.heads * FP32 * (4 * arch.qk_head_dim + 3 * arch.v_head_dim)


def head_block(sizes: PassSizes, n_depths: int, is_soft: bool) -> Block:
    """The streams that the head reads, and its logits in chunks (losses.fused_head, losses.chunked)."""
    T, b, H, v = sizes.tokens, sizes.width, sizes.arch.hidden_size, sizes.arch.vocab_size // sizes.tp
    streams = (1 + n_depths) * T * H * b
    if sizes.tp > 1:
        streams += (n_depths > 0) * sizes.stream_bytes  # the shard, beside the gathered whole
    # Per row log-sum-exps, what is read off the logits, the target and the site.
    values = T * ((5 + 5 * n_depths) * FP32 + 2 * (1 + n_depths) * INT64)
    if sizes.settings.kernels == "triton":
        logits = min(T, fused_chunk_tokens(v)) * v * FP32
        gradient = logits * b // FP32
        # With soft targets the trunk's logits stay while a depth's gradient is made.
        chunks = max(logits * (1 + (n_depths > 0)), gradient + logits * (2 if is_soft and n_depths else 1))
    else:
        logits = min(T, chunk_tokens_for(v)) * v * FP32
        chunks = (3 + 3 * n_depths) * logits
    # The head's weight gradient is summed in fp32 and rounded once.
    weight_grad = v * H * FP32
    return Block(streams + values, streams + weight_grad + max(chunks, v * H * b))


def backward_peak(blocks: list[Block]) -> int:
    """Most bytes at a time while the backward walks from the last block to the first."""
    alive, peak = sum(block.kept for block in blocks), 0
    for block in reversed(blocks):
        peak = max(peak, alive + block.again + block.working)
        alive -= block.kept
    return peak


def whole_layer_again(layer: Layer) -> Block:
    """A layer under full recompute: its backward makes all that the layer would keep."""
    return Block(layer.input, backward_peak([layer.mixer, layer.mlp]) - layer.input)


@dataclass(frozen=True)
class PassBytes:
    """Forward and backward of one microbatch, parameters and gradient buffers left out."""

    kept: int
    """When the forward has ended."""
    peak: int


def pass_bytes(sizes: PassSizes, mtp: MtpConfig) -> PassBytes:
    """Of the training losses: language model (or policy, preference) and, with mtp.loss_scale, the MTP depths."""
    n_depths = 0 if mtp.loss_scale is None else mtp.depth
    layers = [layer_of(sizes, plan) for plan in sizes.arch.trunk_plan()]
    if sizes.settings.recompute == "full":
        trunk = [whole_layer_again(layer) for layer in layers]
    else:
        trunk = [block for layer in layers for block in (layer.mixer, layer.mlp)]
    # The table of rotations, token ids, and the norm after the last layer.
    trunk.append(Block(sizes.stream_bytes + sizes.norm_bytes + rope_bytes(sizes), 2 * sizes.stream_bytes))
    depths = [block for depth in range(n_depths) for block in mtp_blocks(sizes, depth)]
    blocks = [*trunk, *depths, head_block(sizes, n_depths, mtp.objective == "soft")]
    # The MTP depths give the embedding a gradient, which waits for that of the trunk.
    waiting = sizes.arch.vocab_size // sizes.tp * sizes.arch.hidden_size * sizes.width
    waiting = 0 if mtp.detach or not n_depths else waiting
    return PassBytes(sum(block.kept for block in blocks), max(backward_peak(blocks), waiting + backward_peak(trunk)))
