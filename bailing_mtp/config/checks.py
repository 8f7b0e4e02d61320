"""Checks of combinations that need the model's sizes or the world size. Pure; they raise ConfigError."""

import math
from dataclasses import dataclass

from .errors import raise_if_any


@dataclass(frozen=True, kw_only=True)
class LayoutSizes:
    """The sizes that are split over ranks. None = the model has no such layer."""

    num_attention_heads: int
    vocab_size: int
    intermediate_size: int | None = None
    """Width of the dense MLP."""
    moe_intermediate_size: int | None = None
    """Width of one routed expert."""
    shared_intermediate_size: int | None = None
    """Width of all shared experts together."""
    num_experts: int | None = None


def check_layout(sizes: LayoutSizes, *, tp: int, ep: int, world_size: int) -> int:
    """Check that tp, ep and the world size fit each other and the model; return dp = world_size / tp.

    Raises ConfigError that names each key, its value and the values that would do.
    """
    split_by_tp = {
        "num_attention_heads": sizes.num_attention_heads,
        "vocab_size": sizes.vocab_size,
        "intermediate_size": sizes.intermediate_size,
        "moe_intermediate_size": sizes.moe_intermediate_size,
        "shared expert width": sizes.shared_intermediate_size,
        "world size": world_size,
    }
    split_by_ep = {"num_experts": sizes.num_experts or 1, "world size": world_size}
    problems = _indivisible("parallel.tp", tp, split_by_tp) + _indivisible("parallel.ep", ep, split_by_ep)
    raise_if_any(problems)
    return world_size // tp


def check_optimizer(*, name: str, has_experts: bool, tp: int, ep: int, world_size: int) -> None:
    """Refuse 8-bit optimizer states where several ranks train the same parameters, experts among them."""
    copies = world_size // tp, world_size // ep if has_experts else 1
    if name != "adamw8bit" or copies == (1, 1):
        return
    only = f"parallel.tp={world_size}" + (f" parallel.ep={world_size}" if has_experts else "")
    raise_if_any(
        [
            f"optim.name: 'adamw8bit' needs every parameter on one rank alone (dp=1), and on {world_size} ranks "
            f"parallel.tp={tp} parallel.ep={ep} makes dp={copies[0]}, of experts {copies[1]}; allowed here: {only}; "
            "or one rank, or optim.name=adamw"
        ]
    )


def check_batch(*, tokens_per_step: int, microbatch_tokens: int, dp: int) -> int:
    """Return the microbatches per step of one data-parallel rank; ConfigError if they do not come out."""
    unit = microbatch_tokens * dp
    if tokens_per_step % unit:
        below, above = tokens_per_step // unit * unit, (tokens_per_step // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise_if_any(
            [
                f"train.tokens_per_step: {tokens_per_step} is not a multiple of "
                f"train.microbatch_tokens={microbatch_tokens} times dp={dp}; use {near}"
            ]
        )
    return tokens_per_step // unit


def check_mtp(
    *,
    mtp_layers: int,
    checkpoint: str | None = None,
    loss_scale: float | None = None,
    speculative_tokens: int = 0,
    allow_fresh: bool = False,
) -> None:
    """Refuse an MTP loss or speculation on a model without an MTP layer, before any weight is read.

    `mtp_layers` is num_nextn_predict_layers, or 0 where the checkpoint lacks the layer's tensors.
    `checkpoint` is checkpoint.load. `allow_fresh` is checkpoint.allow_fresh_mtp, which lets training
    start the layer from random weights; speculation may then use it only if it is trained.
    """
    if mtp_layers > 1:
        raise_if_any([f"num_nextn_predict_layers: {mtp_layers} is not supported; allowed: 0, 1"])
    trains = loss_scale is not None
    if mtp_layers == 1 or (allow_fresh and trains):
        return
    problems = []
    if trains:
        problems.append(f"mtp.loss_scale: {loss_scale:g} {_no_mtp(checkpoint)}; or set mtp.loss_scale=null")
    if speculative_tokens > 0:
        problems.append(
            f"rollout.speculative_tokens: {speculative_tokens} {_no_mtp(checkpoint)}; "
            "or set rollout.speculative_tokens=0"
        )
    raise_if_any(problems)


def check_replay(expert_layers: int) -> None:
    """Refuse routing replay for a model that routes nothing."""
    if not expert_layers:
        raise_if_any(["rl.routing_replay: true needs expert layers and the model has none; allowed here: false"])


def check_mtp_divisor(*, loss_scale: float | None, detach: bool, main_loss: str) -> None:
    """Refuse a joint MTP loss beside a loss that is a mean over sequences or pairs, called `main_loss`.

    The MTP loss is a mean over tokens; on shared weights the two have no common divisor, so the strength of one
    relative to the other would change with the length of the responses. Detached, they share no weight.
    """
    if loss_scale is not None and not detach:
        raise_if_any(
            [
                f"mtp.detach: false with {main_loss}: its loss is divided by sequences, the MTP loss by tokens; "
                "use mtp.detach=true, or mtp.loss_scale=null"
            ]
        )


def check_eval_depth(eval_depth: int | None, loss_scale: float | None) -> None:
    """Refuse evaluated MTP depths where no MTP layer is built."""
    if eval_depth is not None and loss_scale is None:
        raise_if_any([f"train.eval_depth: {eval_depth} needs an MTP loss; set mtp.loss_scale, or leave it null"])


def check_graphs(*, cuda_graphs: bool, kernels: str) -> None:
    """Refuse graphs of the torch kernels: some of these read routing on the host."""
    if cuda_graphs and kernels != "triton":
        raise_if_any(
            [
                f"rollout.cuda_graphs: true needs rollout.kernels=triton, and it is {kernels}; "
                "or set rollout.cuda_graphs=false"
            ]
        )


def check_tp_sum(*, tp_sum: str, kernels: str, tp: int) -> None:
    """Refuse sums over peer memory where nothing is summed, or nothing is Triton's."""
    problems = []
    if tp_sum == "peer" and kernels != "triton":
        problems.append(
            f"rollout.tp_sum: 'peer' needs rollout.kernels=triton, and it is {kernels}; or set rollout.tp_sum=library"
        )
    if tp_sum == "peer" and tp == 1:
        problems.append("rollout.tp_sum: 'peer' sums over parallel.tp ranks, and that is 1; allowed here: library")
    raise_if_any(problems)


def check_drafts(*, speculative_tokens: int, adaptive: bool, draft_vocabulary: str | None) -> None:
    """Refuse settings of drafts where there are none."""
    if speculative_tokens:
        return
    asked = []
    if adaptive:
        asked.append("rollout.adaptive: true needs rollout.speculative_tokens > 0; or set rollout.adaptive=false")
    if draft_vocabulary is not None:
        asked.append(
            f"rollout.draft_vocabulary: {draft_vocabulary!r} needs rollout.speculative_tokens > 0; "
            "or set rollout.draft_vocabulary=null"
        )
    raise_if_any(asked)


def _no_mtp(checkpoint: str | None) -> str:
    if checkpoint is None:
        return "needs an MTP layer and model.architecture has none; set its num_nextn_predict_layers to 1"
    return (
        f"needs an MTP layer and {checkpoint} has none; load its -base checkpoint, or graft that one's "
        f"layer: python -m recipes.doctor checkpoint.load={checkpoint} graft_from=<base dir> target=<new dir>"
    )


def _indivisible(key: str, ranks: int, sizes: dict[str, int | None]) -> list[str]:
    present = {name: size for name, size in sizes.items() if size is not None}
    offenders = [f"{name}={size}" for name, size in present.items() if size % ranks]
    if not offenders:
        return []
    common = math.gcd(*present.values())
    allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    return [f"{key}: {ranks} does not divide {', '.join(offenders)}; allowed here: {allowed}"]
