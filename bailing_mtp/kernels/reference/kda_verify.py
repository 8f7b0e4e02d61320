"""Kimi delta attention of one decode step with deferred commit, in plain torch.

A step feeds S tokens to each row, of which later only the first few are kept. The state is therefore not
advanced past them; their rank-1 updates are recorded instead, and the next step replays as many as were kept.
Records and convolution inputs are kept twice: a step reads the buffer of the slot's parity and writes the
other, since programs of one head must not overwrite what their siblings still replay.

Shape legend: n rows of the step, S tokens fed to each, R = n * S, N slots and one scratch slot, T records of
a step at most, W convolution taps, w = W - 1 + T window rows, X channels of q, k and v, Y columns of the fused
projection, h heads of this rank, D key size, V value size.

Source: Bailing V3 spec section 2.1.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bailing_mtp.kernels.reference.kda import NORM_EPS, kda_gate


class KdaLayerMemory(NamedTuple):
    """What one layer keeps of all slots; `kda_verify` writes the slots of its rows, in place."""

    state_NhVD: Tensor
    """fp32."""
    window_2NwX: Tensor
    """Raw convolution inputs: W - 1 before the step, then those that it fed."""
    decay_2NThD: Tensor
    """fp32 records: decay, normalised key, update."""
    key_2NThD: Tensor
    update_2NThV: Tensor


def kda_verify(
    projected_RY: Tensor,
    conv_XW: Tensor,
    A_log_h: Tensor,
    dt_bias_hD: Tensor,
    o_norm_V: Tensor,
    memory: KdaLayerMemory,
    count_N: Tensor,
    parity_N: Tensor,
    slots_n: Tensor,
    n_tokens: int,
    lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """Outputs of the mixer before its last projection, [R, h * V] in the dtype of `projected`, rows row-major.

    projected: q | k | v | f | g | beta of each token. Per row: replay the first `count` records of the slot's
    buffer into its state and write that once; then run the S tokens from there, recording each in the other
    buffer, together with the window of convolution inputs. States, gates and norms are fp32.
    Slots are distinct but for the scratch slot. The caller sets count and flips parity when all layers ran.
    """
    heads, key_dim, value_dim = (*A_log_h.shape, dt_bias_hD.shape[1], o_norm_V.shape[0])
    sizes = (conv_XW.shape[0], heads * key_dim, heads * value_dim, heads)
    projected_nSY = projected_RY.unflatten(0, (-1, n_tokens))
    qkv_nSX, f_nSx, g_nSx, beta_nSh = projected_nSY.split(sizes, dim=-1)
    slots_n = slots_n.long()
    source_n, count_n = parity_N[slots_n].long(), count_N[slots_n].long()

    qkv_nSX = _convolve(qkv_nSX, conv_XW, memory.window_2NwX, slots_n, source_n, count_n)
    q_nShD, k_nShD, v_nShV = _split_heads(qkv_nSX.float(), heads, key_dim, value_dim)
    q_nShD = _unit(q_nShD) * key_dim**-0.5
    k_nShD = _unit(k_nShD)
    decay_nShD = kda_gate(f_nSx.unflatten(-1, (heads, key_dim)), A_log_h, dt_bias_hD, lower_bound).exp()
    beta_nSh1 = beta_nSh.float().sigmoid().unsqueeze(-1)

    state_nhVD = _replay(memory, slots_n, source_n, count_n)
    memory.state_NhVD[slots_n] = state_nhVD
    outputs, target_n = [], 1 - source_n
    for s in range(n_tokens):
        key_nhD = k_nShD[:, s]
        state_nhVD = state_nhVD * decay_nShD[:, s].unsqueeze(-2)
        predicted_nhV = (state_nhVD @ key_nhD.unsqueeze(-1)).squeeze(-1)
        update_nhV = beta_nSh1[:, s] * (v_nShV[:, s] - predicted_nhV)
        state_nhVD = state_nhVD + update_nhV.unsqueeze(-1) * key_nhD.unsqueeze(-2)
        outputs.append((state_nhVD @ q_nShD[:, s].unsqueeze(-1)).squeeze(-1))
        memory.update_2NThV[target_n, slots_n, s] = update_nhV
    memory.decay_2NThD[target_n, slots_n, :n_tokens] = decay_nShD
    memory.key_2NThD[target_n, slots_n, :n_tokens] = k_nShD

    o_nShV = F.rms_norm(torch.stack(outputs, 1), o_norm_V.shape, o_norm_V.float(), norm_eps)
    o_nShV = o_nShV * g_nSx.unflatten(-1, (heads, value_dim)).float().sigmoid()
    return o_nShV.flatten(2).flatten(0, 1).to(projected_RY.dtype)


def _convolve(
    x_nSX: Tensor, conv_XW: Tensor, window_2NwX: Tensor, slots_n: Tensor, source_n: Tensor, count_n: Tensor
) -> Tensor:
    """Causal convolution and SiLU in x's dtype; the history is the W - 1 inputs before the uncommitted ones."""
    n_tokens, taps = x_nSX.shape[1], conv_XW.shape[1]
    row_nW = count_n.unsqueeze(1) + torch.arange(taps - 1, device=x_nSX.device)
    history = window_2NwX[source_n.unsqueeze(1), slots_n.unsqueeze(1), row_nW]
    window = torch.cat([history, x_nSX.to(history.dtype)], 1)
    window_2NwX[1 - source_n, slots_n, : taps - 1 + n_tokens] = window
    y_nSX = sum(window[:, tap : tap + n_tokens].float() * conv_XW[:, tap].float() for tap in range(taps))
    return F.silu(y_nSX).to(x_nSX.dtype)


def _replay(memory: KdaLayerMemory, slots_n: Tensor, source_n: Tensor, count_n: Tensor) -> Tensor:
    """States with the committed records added. Records past the count are never read into the result."""
    state_nhVD = memory.state_NhVD[slots_n]
    for t in range(memory.decay_2NThD.shape[2]):
        live = (t < count_n)[:, None, None]
        decay_nhD = torch.where(live, memory.decay_2NThD[source_n, slots_n, t], 1)
        key_nhD = torch.where(live, memory.key_2NThD[source_n, slots_n, t], 0)
        update_nhV = torch.where(live, memory.update_2NThV[source_n, slots_n, t], 0)
        state_nhVD = state_nhVD * decay_nhD.unsqueeze(-2) + update_nhV.unsqueeze(-1) * key_nhD.unsqueeze(-2)
    return state_nhVD


def _split_heads(x_nSX: Tensor, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x_nSX.split((heads * key_dim, heads * key_dim, heads * value_dim), dim=-1)
    return tuple(x.unflatten(-1, (heads, -1)) for x in (q, k, v))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
