"""Sections of the training recipes: model, layout, data, steps, optimizer, checkpoints, MTP loss, logs."""

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from .errors import raise_if_any
from .section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    UnitFloat,
)


class ModelConfig(Section):
    """What is built, in which dtype, with which kernels. Every choice is explicit; nothing falls back."""

    name: Text = "checkpoint"
    """Label for logs; the name of the file under conf/model."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of parameters and activations (A_log, dt_bias and the expert bias stay fp32)."""
    backend: Literal["local", "te"] = "local"
    """Linears, norms and grouped experts in training: this package's own, or transformer-engine's (wired against its
    documented interface, not run on hardware)."""
    fp8: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """How transformer-engine scales FP8 tensors (mxfp8 needs a Blackwell GPU): linears and experts of the trunk; null =
    none. Weights stay in dtype; router, KDA, attention, heads and the MTP layer compute without FP8."""
    attention: Literal["sdpa", "flash"] = "sdpa"
    """Softmax attention of the MLA layers in training: torch's, or flash-attn's."""
    kda: Literal["torch", "fla"] = "torch"
    """Chunked KDA in training: the torch twin (any device), or fla's Triton kernels (GPU only)."""
    experts: Literal["loop", "grouped"] = "loop"
    """Experts in training: one after the other, or one grouped GEMM (sizes must be multiples of 16 bytes)."""
    kernels: Literal["torch", "triton"] = "torch"
    """Element-wise pieces of training (SwiGLU, gated norm, routing, log-probabilities of the head): torch, or this
    package's Triton kernels (GPU only)."""
    architecture: dict[str, JsonValue] | None = None
    """Sizes under the key names of an HF config.json; null = read from checkpoint.load."""

    @model_validator(mode="after")
    def _backend_fits(self) -> Self:
        problems = []
        if self.backend == "te" and self.experts == "loop":
            problems.append("model.backend: 'te' has no loop over experts; set model.experts=grouped")
        if self.fp8 is not None and self.backend != "te":
            problems.append(f"model.fp8: {self.fp8!r} needs model.backend=te")
        if self.fp8 is not None and self.dtype != "bf16":
            problems.append(f"model.fp8: {self.fp8!r} needs model.dtype=bf16, the dtype of its results")
        raise_if_any(problems)
        return self


class ParallelConfig(Section):
    """Layout of the ranks. Data parallel size is world size / tp; sequence parallel follows tp > 1."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    ep: PositiveInt = 1
    """Expert-parallel ranks (whole experts; expert-tensor-parallel size is 1)."""


class DataConfig(Section):
    """Where documents come from and how they become token ids."""

    path: Text
    """JSONL file, a directory of them, or reasoning_gym:<task>[,<task>...] (generated, no file)."""
    seq_tokens: PositiveInt = 4096
    """Longest document in tokens; a longer one is cut into documents of at most this length."""
    tokenizer: Text | None = None
    """tokenizer.json or a directory that holds it; null = that of checkpoint.load, else a byte-level BPE
    trained on the data."""
    vocab_size: PositiveInt = 4096
    """Entries of the BPE that is trained when there is no tokenizer."""
    valid_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of the documents, the last ones, that is held out of training, evaluated or not."""
    bad_lines: Literal["fail", "skip"] = "fail"
    """A line that cannot be read: stop and name file and line, or leave it out and count it."""


class DialogueDataConfig(Section):
    """Where conversations or preference pairs come from and how they become token ids."""

    path: Text
    """JSONL file, a directory of them, or (sft) reasoning_gym:<task>[,<task>...] (generated, no file)."""
    seq_tokens: PositiveInt = 4096
    """Longest conversation, or row of a pair, in tokens; data.too_long says what happens to a longer one."""
    too_long: Literal["cut", "skip"] = "cut"
    """Cut a too long one at its end, or leave it out; counted either way."""
    chat_template: Text | None = None
    """File of a Jinja chat template, or plain (texts as they are written); null = the tokenizer's own."""
    tokenizer: Text | None = None
    """tokenizer.json or a directory that holds it; null = that of checkpoint.load."""
    valid_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of the conversations or pairs, the last ones, that is held out of training, evaluated or not."""
    bad_lines: Literal["fail", "skip"] = "fail"
    """A line that cannot be read: stop and name file and line, or leave it out and count it."""


class PromptDataConfig(Section):
    """Where prompts come from and how they become token ids."""

    path: Text
    """JSONL file or a directory of them, {"prompt" or "messages", "answer", ...}, or reasoning_gym:<task>[,<task>...]
    (generated, no file)."""
    seq_tokens: PositiveInt = 4096
    """Longest prompt and response together, in tokens; a prompt that leaves no room for
    sampling.max_new_tokens is left out and counted."""
    valid_path: Text | None = None
    """Prompts of another source, or other problems of a generator, that train.eval_every evaluates; those that
    data.path holds too are left out and counted."""
    chat_template: Text | None = None
    """File of a Jinja chat template, or plain (texts as they are written); null = the tokenizer's own."""
    tokenizer: Text | None = None
    """tokenizer.json or a directory that holds it; null = that of checkpoint.load."""
    bad_lines: Literal["fail", "skip"] = "fail"
    """A line that cannot be read: stop and name file and line, or leave it out and count it."""


class TrainConfig(Section):
    """Length and size of the run. All token counts include padding."""

    steps: PositiveInt
    """Optimizer steps."""
    tokens_per_step: PositiveInt = 32768
    """Tokens per optimizer step over all data-parallel ranks; a multiple of microbatch_tokens * dp."""
    microbatch_tokens: PositiveInt = 4096
    """Tokens of one packed forward and backward on one data-parallel rank; at least data.seq_tokens."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward: none; KDA between its projections and, with model.backend=local, the
    inputs and SwiGLU of grouped experts; or whole layers."""
    log_every: PositiveInt = 1
    """Steps between two lines of metrics.jsonl."""
    eval_every: PositiveInt | None = None
    """Steps between two evaluations on held-out documents, with one after the last step; null = none."""
    eval_steps: PositiveInt = 4
    """Steps' worth of held-out tokens per evaluation."""
    eval_depth: PositiveInt | None = None
    """MTP depths that evaluations look at; null = those that are trained, mtp.depth."""


class PolicyTrainConfig(Section):
    """Length of the run. How many tokens a step has follows from the rollouts."""

    steps: PositiveInt
    """Optimizer steps, rl.minibatches of them for each rollout."""
    microbatch_tokens: PositiveInt = 4096
    """Most tokens of one packed forward and backward on one data-parallel rank; at least data.seq_tokens."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward."""
    eval_every: PositiveInt | None = None
    """Steps between two evaluations on data.valid_path, a multiple of rl.minibatches, with one before the first
    step and one after the last; null = none."""
    eval_samples: PositiveInt = 1
    """Samples of each held-out prompt, drawn with the same noise in every evaluation."""


class OptimConfig(Section):
    """AdamW, its schedule and the router's bias update."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw: fp32 moments, and fp32 master weights of bf16 parameters: 12 bytes a parameter. adamw8bit: 8-bit moments
    (torchao's), no master weights, stochastic rounding of bf16 weights: 2 bytes; with dp = 1 only, of experts too."""
    lr: PositiveFloat = 3e-4
    """Learning rate after warm-up."""
    min_lr_ratio: UnitFloat = 0.1
    """Last learning rate / lr (cosine and wsd)."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """Course of the learning rate after warm-up; wsd = constant, then linear decay."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0."""
    decay_steps: PositiveInt | None = None
    """Steps of decay; null = all after warm-up for cosine, a fifth of the run for wsd."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; norms, biases, A_log and dt_bias are exempt."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: PositiveFloat | None = 1.0
    """Largest gradient norm of the trunk, and of the MTP layer, each clipped by its own; null = no clipping."""
    fused: Literal["none", "apex"] = "none"
    """Kernels of the update, gradient norms and clipping, and of weight gradients added in the GEMM that makes them:
    torch's, or those of NVIDIA apex (wired against its documented interface, not run on hardware)."""
    offload: Literal["none", "cpu"] = "none"
    """Where optimizer states (moments, fp32 master weights) are but during an optimizer step: on the device, or in
    host memory, out of the way of activations and of a rollout's caches."""
    expert_bias_rate: NonNegativeFloat = 1e-3
    """Step of the router's load-balancing bias per optimizer step; 0 = frozen."""

    @model_validator(mode="after")
    def _pieces_fit(self) -> Self:
        problems = []
        if self.fused == "apex" and self.name != "adamw":
            problems.append(f"optim.fused: 'apex' updates with optim.name=adamw only, not {self.name}; allowed: none")
        if self.fused == "apex" and self.offload == "cpu":
            # It counts updates for all parameters together, and offloaded ones come in slices.
            problems.append("optim.fused: 'apex' needs optim.offload=none; allowed with cpu: none")
        if self.name == "adamw8bit" and self.offload == "cpu":
            problems.append(
                "optim.offload: 'cpu' is not supported with optim.name=adamw8bit, whose states stay on the device; "
                "allowed here: none"
            )
        raise_if_any(problems)
        return self


class CheckpointConfig(Section):
    """What is read at start and what is written to <run_dir>/checkpoints."""

    load: Text | None = None
    """HF checkpoint directory, or a sharded checkpoint of this package; null = random weights."""
    save_every: PositiveInt | None = None
    """Steps between two checkpoints; null = one, after the last step."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; older ones are deleted."""
    resume: Literal["auto", "never"] = "auto"
    """auto = continue from the newest checkpoint of run_dir, if it has one."""
    allow_fresh_mtp: bool = False
    """Start the MTP layer from random weights when the checkpoint has none."""


class MtpConfig(Section):
    """The MTP training loss: total = lm + loss_scale * sum_d depth_decay**(d-1) * loss_d."""

    loss_scale: PositiveFloat | None = None
    """Weight of the MTP loss; null = off. A checkpoint's own factor is never used."""
    objective: Literal["hard", "soft"] = "hard"
    """Cross-entropy to the token of the data, or to the trunk's own detached distribution."""
    detach: bool = False
    """true = only the MTP layer learns from the MTP loss; false = trunk, embedding and head learn too."""
    depth: PositiveInt = 1
    """Tokens ahead that are trained by unrolling the one layer."""
    depth_decay: Fraction = 0.7
    """Weight of depth d+1 relative to depth d."""


class LogConfig(Section):
    """Where metrics go beside <run_dir>/metrics.jsonl; rank 0 only."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases mode; offline writes <run_dir>/wandb and needs no network."""
    project: Text = "bailing_mtp"
    """Weights & Biases project."""
