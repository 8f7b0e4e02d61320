"""The arms of what=train, and the figures and the line of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bailing_mtp.config import MtpConfig
from bailing_mtp.contracts.architecture import Architecture
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch

HEADING = (
    f"{'mtp':<18} {'recompute':<10} {'tokens':>6} {'step ms':>8} {'fwd+bwd':>8} {'tokens/s':>9} {'TFLOP/s':>8} "
    f"{'MFU':>6} {'peak GiB':>8} {'act GiB':>8} {'loss':>7} {'MTP cost':>8} {'MTP act':>8}"
)


@dataclass(frozen=True)
class Arm:
    """One line of the table."""

    name: str
    mtp: MtpConfig
    recompute: str
    tokens: int
    trained_share: float = 1.0
    """Share of every document, its end, that is trained on."""


@dataclass(frozen=True)
class Figure:
    mtp: str
    recompute: str
    tokens: int
    step_ms: float
    forward_backward_ms: float
    tokens_per_second: float
    """Of whole steps, the optimizer included, over all ranks."""
    model_tflops_per_s: float
    """Of one GPU."""
    mfu: float | None
    peak_gib: float
    activation_gib: float
    """Peak of the passes above what lay on the device before them: weights, gradients and optimizer states."""
    loss: float
    mtp_cost: float | None = None
    """Share of the tokens/s of the same arm without an MTP loss that this one's takes; None for an arm without."""
    mtp_activation_gib: float | None = None
    """What the MTP loss adds to that arm's activation_gib."""


def arms(tokens: tuple[int, ...]) -> Iterator[Arm]:
    """The first token count with every MTP loss and recompute, then the others with the main ones. Arms that follow
    each other share a model where they can."""
    off, joint = MtpConfig(), MtpConfig(loss_scale=0.3)
    detached, deep = MtpConfig(loss_scale=0.3, detach=True), MtpConfig(loss_scale=0.3, depth=2)
    first, *others = tokens
    yield Arm("off", off, "none", first)
    yield Arm("off, half", off, "none", first, 0.5)
    yield Arm("joint", joint, "none", first)
    yield Arm("detached, half", detached, "none", first, 0.5)
    yield Arm("joint depth 2", deep, "none", first)
    for recompute in ("selective", "full"):
        yield Arm("off", off, recompute, first)
        yield Arm("joint", joint, recompute, first)
    for name, mtp in (("off", off), ("joint", joint)):
        for count in others:
            yield Arm(name, mtp, "none", count)


def without_mtp(arm: Arm) -> Arm:
    """The arm that `arm` is compared with."""
    name = "off" if arm.trained_share == 1.0 else "off, half"
    return replace(arm, name=name, mtp=MtpConfig())


def compared(figure: Figure, plain: Figure) -> Figure:
    """`figure` with what its MTP loss costs beside `plain`."""
    return replace(
        figure,
        mtp_cost=1.0 - figure.tokens_per_second / plain.tokens_per_second,
        mtp_activation_gib=figure.activation_gib - plain.activation_gib,
    )


def pack(arch: Architecture, tokens: int, trained_share: float) -> TokenBatch:
    """Three documents of different lengths, random ids."""
    lengths = (tokens * 3 // 8, tokens // 2, tokens - tokens * 3 // 8 - tokens // 2)
    layout = PackedLayout.build(lengths)
    ids = torch.randint(0, arch.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    length_T = layout.document_end_T - torch.repeat_interleave(layout.cu_seqlens[:-1], torch.tensor(lengths))
    return TokenBatch(ids, layout.position_ids_T >= (1 - trained_share) * length_T, layout)


def line(x: Figure) -> str:
    """One line under HEADING."""
    mfu = "" if x.mfu is None else f"{x.mfu:.1%}"
    cost = "" if x.mtp_cost is None else f"{x.mtp_cost:>8.1%} {x.mtp_activation_gib:>8.2f}"
    return (
        f"{x.mtp:<18} {x.recompute:<10} {x.tokens:>6} {x.step_ms:>8.1f} {x.forward_backward_ms:>8.1f} "
        f"{x.tokens_per_second:>9.0f} {x.model_tflops_per_s:>8.1f} {mfu:>6} {x.peak_gib:>8.1f} "
        f"{x.activation_gib:>8.2f} {x.loss:>7.3f} {cost}"
    ).rstrip()
