"""Choice of experts for decoding, in plain torch.

Shape legend: R rows, H hidden size, E experts, k experts per row.
"""

import torch
from torch import Tensor

BEST_PER_GROUP = 2


def route(
    x_RH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor,
    num_groups: int,
    groups_per_token: int,
    experts_per_token: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Expert ids [R, k] int64 and weights [R, k] fp32, which sum to `scaling` (Bailing V3 spec section 2.3).

    Scores are sigmoids of fp32 products. The bias takes part in the choice alone: the best k of the best
    groups, a group being worth the sum of its best two.
    """
    logits_RE = x_RH.float() @ weight_EH.float().t()
    return choose(logits_RE, bias_E, num_groups, groups_per_token, experts_per_token, scaling)


def choose(
    logits_RE: Tensor,
    bias_E: Tensor,
    num_groups: int,
    groups_per_token: int,
    experts_per_token: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The second half of `route`, from its fp32 products."""
    scores_RE = torch.sigmoid(logits_RE)
    selection_RE = scores_RE + bias_E.float()
    if num_groups > 1:
        grouped = selection_RE.unflatten(-1, (num_groups, -1))
        group_score = grouped.topk(BEST_PER_GROUP, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(group_score, dtype=torch.bool)
        chosen.scatter_(-1, group_score.topk(groups_per_token, dim=-1).indices, True)
        selection_RE = grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    ids_Rk = selection_RE.topk(experts_per_token, dim=-1).indices
    chosen_Rk = scores_RE.gather(-1, ids_Rk)
    return ids_Rk, chosen_Rk / (chosen_Rk.sum(-1, keepdim=True) + 1e-20) * scaling
