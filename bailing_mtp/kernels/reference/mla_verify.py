"""Absorbed latent attention over a paged cache, for the tokens of one decode step, in plain torch.

Shape legend: n rows of the step, S tokens fed to each, h heads of this rank, C latent rank, r rotary size,
x = C + r values of a cached row, B blocks and one scratch block, b tokens of a block, M blocks of a table,
L = M * b cached positions, T tokens.

Source: Bailing V3 spec section 2.2; the absorbed form follows from k_nope = W_uk c and v = W_uv c.
"""

import torch
from torch import Tensor


def rope_table(position_T: Tensor, dim: int, theta: float) -> Tensor:
    """Cosines and sines [T, 2, dim / 2] in fp32: angle = position * theta^(-2i / dim)."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=position_T.device)
    angle = position_T.float()[:, None] * torch.pow(theta, -pairs / dim)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def apply_rope(x_Thr: Tensor, table: Tensor) -> Tensor:
    """Rotate adjacent pairs (2i, 2i + 1) of the last dimension; computed in fp32, in x's dtype."""
    cos, sin = table[:, 0, None, :], table[:, 1, None, :]
    even, odd = x_Thr.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x_Thr.dtype)


def write_latents(
    rows_Tx: Tensor, latents_Bbx: Tensor, block_table_TM: Tensor, position_T: Tensor
) -> None:
    """Write each token's latent row into the cache, in place.

    block_table_TM holds each token's own table. Positions past its end go to the scratch block, the last of
    the cache.
    """
    block_tokens, scratch = latents_Bbx.shape[1], latents_Bbx.shape[0] - 1
    entry_T, entries = position_T // block_tokens, block_table_TM.shape[1]
    block_T = block_table_TM.gather(1, entry_T.clamp(max=entries - 1).unsqueeze(1)).squeeze(1).long()
    block_T = torch.where(entry_T < entries, block_T, scratch)
    latents_Bbx[block_T, position_T % block_tokens] = rows_Tx.to(latents_Bbx.dtype)


def mla_verify(
    q_nShx: Tensor,
    latents_Bbx: Tensor,
    block_table_nM: Tensor,
    position_n: Tensor,
    scale: float,
    latent_rank: int,
) -> Tensor:
    """Attention of S consecutive tokens of each row to its cache: latent outputs [n, S, h, C] in q's dtype.

    q is absorbed: C values against the latents, r against the rotated keys. Token s of a row stands at
    position_n + s, its own latent row is already in the cache, and it sees the positions up to its own.
    What the cache holds at later positions, also NaN, does not matter. Softmax is fp32.
    """
    n, S = q_nShx.shape[:2]
    wide = torch.promote_types(q_nShx.dtype, torch.float32)
    cached_nLx = latents_Bbx[block_table_nM.long()].flatten(1, 2).to(wide)
    L = cached_nLx.shape[1]
    index_L = torch.arange(L, device=q_nShx.device)
    last_nS = position_n.unsqueeze(1) + torch.arange(S, device=q_nShx.device)
    seen_nSL = index_L <= last_nS.unsqueeze(-1)
    cached_nLx = torch.where(seen_nSL[:, -1].unsqueeze(-1), cached_nLx, 0)
    scores = torch.einsum("nshx,nlx->nshl", q_nShx.to(wide), cached_nLx) * scale
    weights = scores.masked_fill(~seen_nSL.unsqueeze(2), -torch.inf).softmax(-1)
    return torch.einsum("nshl,nlc->nshc", weights, cached_nLx[..., :latent_rank]).to(q_nShx.dtype)
