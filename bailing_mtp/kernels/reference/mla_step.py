"""Latent attention of a decode step but for the attention itself, in plain torch.

Token s of row i stands at position_n[i] + s. Rotations come from a table of all positions; a position past
its end, which lies past every block table, takes its last row.

Shape legend: n rows of the step, S tokens fed to each, R = n * S, h heads of this rank, d = k + r query size
(no-position and rotary parts), C latent rank, x = C + r values of a cached row, Q query rank, v value size,
B blocks and one scratch block, b tokens of a block, M blocks of a table, P positions.

Source: Bailing V3 spec section 2.2.
"""

import torch
from torch import Tensor

from bailing_mtp.kernels.reference.mla_verify import apply_rope, write_latents
from bailing_mtp.kernels.reference.norm import rms_norm


def cache_latents(
    kv_Rx: Tensor,
    kv_norm_C: Tensor,
    q_RQ: Tensor | None,
    q_norm_Q: Tensor | None,
    eps: float,
    rope_P: Tensor,
    latents_Bbx: Tensor,
    block_table_nM: Tensor,
    position_n: Tensor,
) -> Tensor | None:
    """Normalise and rotate the latent rows and write them into the cache; returns the normalised queries' latents.

    rope_P: [P, 2, r / 2], as `rope_table`. Positions past a row's table go to the scratch block, the last one.
    """
    C, tokens = kv_norm_C.shape[0], kv_Rx.shape[0] // position_n.shape[0]
    position_R = _positions(position_n, tokens)
    latent_RC, k_R1r = rms_norm(kv_Rx[:, :C], kv_norm_C, eps), kv_Rx[:, None, C:]
    k_Rr = apply_rope(k_R1r, _rotations(rope_P, position_R)).squeeze(1)
    table_RM = block_table_nM.repeat_interleave(tokens, dim=0)
    write_latents(torch.cat((latent_RC, k_Rr), dim=-1), latents_Bbx, table_RM, position_R)
    return None if q_RQ is None else rms_norm(q_RQ, q_norm_Q, eps)


def absorb_queries(q_Rhd: Tensor, key_up_hkC: Tensor, rope_P: Tensor, position_n: Tensor) -> Tensor:
    """Queries against cached rows, [n, S, h, x]: through the key up-projection, and rotated."""
    tokens = q_Rhd.shape[0] // position_n.shape[0]
    q_Rhk, q_Rhr = q_Rhd.split((key_up_hkC.shape[1], 2 * rope_P.shape[2]), dim=-1)
    q_Rhr = apply_rope(q_Rhr, _rotations(rope_P, _positions(position_n, tokens)))
    q_Rhx = torch.cat((torch.einsum("rhk,hkc->rhc", q_Rhk, key_up_hkC), q_Rhr), dim=-1)
    return q_Rhx.unflatten(0, (-1, tokens))


def gated_values(o_nShC: Tensor, value_up_hvC: Tensor, gate_Rh: Tensor) -> Tensor:
    """Latent outputs through the value up-projection, times the sigmoid of each head's gate: [R, h * v]."""
    o_Rhv = torch.einsum("rhc,hvc->rhv", o_nShC.flatten(0, 1), value_up_hvC)
    return (o_Rhv * gate_Rh.sigmoid().unsqueeze(-1)).flatten(1)


def _positions(position_n: Tensor, tokens: int) -> Tensor:
    return (position_n.unsqueeze(1) + torch.arange(tokens, device=position_n.device)).flatten()


def _rotations(rope_P: Tensor, position_R: Tensor) -> Tensor:
    return rope_P[position_R.clamp(max=rope_P.shape[0] - 1)]
