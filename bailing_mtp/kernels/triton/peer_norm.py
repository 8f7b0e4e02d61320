"""Residual + the sum of every rank's part, and the norm of that, in one launch over peer memory.

Every rank writes its part into the mailboxes of the others, four bytes beside the number of the exchange in one word
of eight, and waits for theirs: words arrive whole, so that there is neither a barrier nor a second way across.

Shape legend: R rows, H channels, w words of four bytes of a row, W ranks. A mailbox holds a word of eight bytes for
each [2, W, rows, w]: two exchanges, each sender, each row. Who is in the next exchange of a row has had this one's
words from all others, and who is in the one after that knows that they have read his; so two are enough. A program
sends before it waits, and blocks start in ascending order on every GPU: the lowest row that is open anywhere runs
everywhere, so that more rows than fit a GPU at once wait for nothing that cannot start.

Source: the small-message protocol of NCCL ("LL"), https://arxiv.org/abs/2507.04786, section III.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from bailing_mtp.kernels.reference.peer_norm import Mailboxes

LIMIT_NS = tl.constexpr(1_800_000_000_000)
"""Half an hour, as the other collectives wait: ranks may compile or capture at different times."""


@triton.jit
def _send(address_w, packet_w):
    return tl.inline_asm_elementwise(
        "st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0;",
        "=r,l,l",
        [address_w, packet_w],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _look(address_w):
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.b64 $0, [$1];", "=l,l", [address_w], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _received(address_w, number):
    """Words of the exchange of this number, once all are there. A rank that never sends ends the program's process
    with an error of the device."""
    packet_w = _look(address_w)
    began_ns = globaltimer()
    while tl.min(((packet_w >> 32) == number).to(tl.int32), axis=0) == 0:
        packet_w = _look(address_w)
        if globaltimer() - began_ns > LIMIT_NS:
            tl.inline_asm_elementwise("trap; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return packet_w.to(tl.int32)


@triton.jit
def _values(word_w, HALVES: tl.constexpr):
    """fp32 of a row's words, in order: of one float each, or of two in bf16."""
    if HALVES:
        first_w = (word_w << 16).to(tl.float32, bitcast=True)
        second_w = (word_w & -65536).to(tl.float32, bitcast=True)
        return tl.interleave(first_w, second_w)
    else:
        return word_w.to(tl.float32, bitcast=True)


@triton.jit
def _exchange_add_norm(
    out,
    sum_out,
    x,
    part_words,
    weight,
    addresses,
    numbers,
    eps,
    rows,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    HALVES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Lanes past the end send the last word again.
    ids_w = tl.minimum(tl.arange(0, WORDS_PAD), WORDS - 1)
    number = tl.load(numbers + row) + 1
    own_w = tl.load(part_words + row * WORDS + ids_w)
    packet_w = (number.to(tl.int64) << 32) | (own_w.to(tl.int64) & 0xFFFFFFFF)
    half = (number & 1) * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            place_w = ((half + RANK) * rows + row) * WORDS + ids_w
            _send(tl.load(addresses + peer) + place_w * 8, packet_w)
    total_H = tl.zeros([H_PAD], tl.float32)
    for peer in tl.static_range(RANKS):
        word_w = own_w
        if peer != RANK:
            place_w = ((half + peer) * rows + row) * WORDS + ids_w
            word_w = _received(tl.load(addresses + RANK) + place_w * 8, number)
        total_H += _values(word_w, HALVES)
    # After a wait, so that every warp has read the number.
    tl.store(numbers + row, number)
    ids_H = tl.arange(0, H_PAD)
    in_H = ids_H < H
    x_H = tl.load(x + row * H + ids_H, mask=in_H, other=0.0).to(tl.float32)
    # Rounded where a sum by the group's library is.
    x_H += total_H.to(sum_out.dtype.element_ty).to(tl.float32)
    rounded_H = x_H.to(sum_out.dtype.element_ty)
    tl.store(sum_out + row * H + ids_H, rounded_H, mask=in_H)
    x_H = tl.where(in_H, rounded_H.to(tl.float32), 0.0)
    weight_H = tl.load(weight + ids_H, mask=in_H, other=0.0).to(tl.float32)
    normed_H = x_H * tl.rsqrt(tl.sum(x_H * x_H, axis=0) / H + eps) * weight_H
    tl.store(out + row * H + ids_H, normed_H.to(out.dtype.element_ty), mask=in_H)


def exchange_add_rms_norm(
    x_RH: Tensor, part_RH: Tensor, weight_H: Tensor, eps: float, mail: Mailboxes
) -> tuple[Tensor, Tensor]:
    """As kernels.reference.peer_norm.add_rms_norm_of_parts of all ranks' parts, of which this is one. All ranks call
    with as many rows, on one stream each."""
    (R, H), itemsize = x_RH.shape, x_RH.element_size()
    assert x_RH.is_contiguous() and part_RH.is_contiguous() and part_RH.shape == x_RH.shape
    assert part_RH.dtype == x_RH.dtype and x_RH.dtype in (torch.bfloat16, torch.float32)
    assert R <= mail.number_R.shape[0] and H * itemsize % 4 == 0
    words, halves = H * itemsize // 4, itemsize == 2
    words_pad = triton.next_power_of_2(words)
    out_RH, sum_RH = torch.empty_like(x_RH), torch.empty_like(x_RH)
    if R:
        _exchange_add_norm[(R,)](
            out_RH,
            sum_RH,
            x_RH,
            part_RH.view(torch.int32),
            weight_H,
            mail.addresses_W,
            mail.number_R,
            eps,
            mail.number_R.shape[0],
            H=H,
            H_PAD=2 * words_pad if halves else words_pad,
            WORDS=words,
            WORDS_PAD=words_pad,
            RANKS=mail.addresses_W.shape[0],
            RANK=mail.rank,
            HALVES=halves,
            num_warps=max(1, min(8, words_pad // 128)),
        )
    return sum_RH, out_RH
