"""Element-wise pieces of a training layer with their gradients, in plain torch.

Shape legend: R rows, F width of an expert, V channels of a head, T tokens, k experts per token,
A = T * k assignments, H hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bailing_mtp.kernels.reference.router import choose

__all__ = ["choose", "gated_norm", "gated_norm_grad", "sum_choices", "weighted_swiglu", "weighted_swiglu_grad"]


def weighted_swiglu(gate_up_R2F: Tensor, weights_R: Tensor | None, limit: float | None) -> Tensor:
    """silu(gate) * up of the two halves, times the row's weight; [R, F] in gate_up's dtype, computed in fp32.

    With a limit L: min(silu(gate), L) * clamp(up, -L, L) (Bailing V3 spec section 1, SwiGLU limits).
    """
    gate_RF, up_RF = gate_up_R2F.to(_wide(gate_up_R2F)).chunk(2, dim=-1)
    gate_RF = F.silu(gate_RF)
    if limit is not None:
        gate_RF, up_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit)
    act_RF = gate_RF * up_RF
    if weights_R is not None:
        act_RF = act_RF * weights_R.unsqueeze(-1)
    return act_RF.to(gate_up_R2F.dtype)


def weighted_swiglu_grad(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None, limit: float | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `weighted_swiglu` for gate_up, in its dtype, and for the weights (fp32), if there are any."""
    wide = _wide(gate_up_R2F)
    gate_RF, up_RF = gate_up_R2F.to(wide).chunk(2, dim=-1)
    grad_RF, sigmoid_RF = grad_RF.to(wide), gate_RF.sigmoid()
    silu_RF, slope_RF = gate_RF * sigmoid_RF, sigmoid_RF * (1 + gate_RF * (1 - sigmoid_RF))
    if limit is not None:
        slope_RF = torch.where(silu_RF <= limit, slope_RF, 0.0)
        passes_RF = up_RF.abs() <= limit
        silu_RF, up_RF = silu_RF.clamp(max=limit), up_RF.clamp(-limit, limit)
    weights_grad_R = None
    if weights_R is not None:
        weights_grad_R = (grad_RF * silu_RF * up_RF).sum(-1)
        grad_RF = grad_RF * weights_R.unsqueeze(-1)
    up_grad_RF = grad_RF * silu_RF
    if limit is not None:
        up_grad_RF = torch.where(passes_RF, up_grad_RF, 0.0)
    return torch.cat((grad_RF * up_RF * slope_RF, up_grad_RF), dim=-1).to(gate_up_R2F.dtype), weights_grad_R


def gated_norm(x_ThV: Tensor, gate_ThV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head's channels, times sigmoid(gate); in x's dtype, computed in fp32."""
    wide = _wide(x_ThV)
    normed_ThV = F.rms_norm(x_ThV.to(wide), weight_V.shape, weight_V.to(wide), eps)
    return (normed_ThV * gate_ThV.to(wide).sigmoid()).to(x_ThV.dtype)


def gated_norm_grad(
    grad_ThV: Tensor, x_ThV: Tensor, gate_ThV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gated_norm` for x, gate and weight, each in its tensor's dtype."""
    wide = _wide(x_ThV)
    grad_ThV, wide_ThV, weight_wide_V = grad_ThV.to(wide), x_ThV.to(wide), weight_V.to(wide)
    sigmoid_ThV = gate_ThV.to(wide).sigmoid()
    inverse_Th1 = (wide_ThV.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed_ThV, through_ThV = wide_ThV * inverse_Th1, grad_ThV * sigmoid_ThV
    gate_grad_ThV = grad_ThV * normed_ThV * weight_wide_V * sigmoid_ThV * (1 - sigmoid_ThV)
    weight_grad_V = (through_ThV * normed_ThV).flatten(0, -2).sum(0)
    scaled_ThV = through_ThV * weight_wide_V
    x_grad_ThV = inverse_Th1 * (scaled_ThV - normed_ThV * (scaled_ThV * normed_ThV).mean(-1, keepdim=True))
    return x_grad_ThV.to(x_ThV.dtype), gate_grad_ThV.to(gate_ThV.dtype), weight_grad_V.to(weight_V.dtype)


def sum_choices(y_AH: Tensor, place_Tk: Tensor) -> Tensor:
    """Sum of the rows y[place[t, 0]], ..., y[place[t, k-1]] of every token, added in fp32; [T, H] in y's dtype.

    A place past the last row counts as nothing.
    """
    rows_TkH = F.pad(y_AH, (0, 0, 0, 1))[place_Tk.clamp(max=y_AH.shape[0])]
    return rows_TkH.to(_wide(y_AH)).sum(1).to(y_AH.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
