"""Vocabulary arithmetic on several tensor-parallel ranks: every rank compares its shard with the whole."""

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bailing_mtp.parallel import collectives, vocab
from tests.distributed.cases_fused_head import check_fused_head

TOKENS, ROWS_PER_RANK, HIDDEN, CHUNK_TOKENS = 11, 9, 6, 4


def check_vocab_parallel(group: dist.ProcessGroup, rank: int, world: int) -> None:
    """Raise AssertionError unless each function, and the head, on `world` ranks equals itself on one.

    `rank` and `world` are the place in and the size of `group`.
    """
    _check_functions(group, rank, world)
    _check_decisions(group, rank, world)
    _check_head(group, rank, world)
    _check_collectives(group, world)
    check_fused_head(group, rank, world)


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _shard(whole_tV: Tensor, rank: int) -> Tensor:
    return whole_tV[..., rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK].detach().clone()


def _targets(world: int) -> Tensor:
    """Ids in every rank's rows, with the first and last of a shard among them."""
    return torch.tensor([0, ROWS_PER_RANK - 1, ROWS_PER_RANK, world * ROWS_PER_RANK - 1, *range(7)])


def _check_functions(group: dist.ProcessGroup, rank: int, world: int) -> None:
    logits_tV, target_logits_tV = (3 * _randn(TOKENS, world * ROWS_PER_RANK, seed=s) for s in (0, 1))
    # Masked ids fill a whole shard in one row, as suppression can.
    logits_tV[2, :ROWS_PER_RANK] = -torch.inf
    target_logits_tV[2, :ROWS_PER_RANK] = -torch.inf
    target_t, upstream_t = _targets(world), _randn(TOKENS, seed=2)
    target_t[2] = ROWS_PER_RANK
    functions: dict[str, Callable[..., Tensor]] = {
        "log_sum_exp": lambda logits, target_logits, group: vocab.log_sum_exp(logits, group),
        "log_prob": lambda logits, target_logits, group: vocab.log_prob(logits, target_t, group),
        "entropy": lambda logits, target_logits, group: vocab.entropy(logits, group),
        "soft_cross_entropy": vocab.soft_cross_entropy,
    }
    for name, function in functions.items():
        whole_tV, shard_tv = logits_tV.clone().requires_grad_(), _shard(logits_tV, rank).requires_grad_()
        whole_t = function(whole_tV, target_logits_tV, None)
        ours_t = function(shard_tv, _shard(target_logits_tV, rank), group)
        torch.testing.assert_close(ours_t, whole_t, msg=lambda m, name=name: f"{name}: {m}")
        whole_t.backward(upstream_t)
        ours_t.backward(upstream_t)
        expected_tv = _shard(whole_tV.grad, rank)
        torch.testing.assert_close(
            shard_tv.grad, expected_tv, msg=lambda m, name=name: f"{name} gradient: {m}"
        )
    torch.testing.assert_close(
        vocab.sum_min(_shard(logits_tV, rank), _shard(target_logits_tV, rank), group),
        torch.minimum(logits_tV.softmax(-1), target_logits_tV.softmax(-1)).sum(-1),
    )


def _check_decisions(group: dist.ProcessGroup, rank: int, world: int) -> None:
    logits_tV, gumbel_tV = (_randn(TOKENS, world * ROWS_PER_RANK, seed=s) for s in (3, 4))
    last = world * ROWS_PER_RANK - 1
    logits_tV[0, [ROWS_PER_RANK - 1, ROWS_PER_RANK, last]] = 9.0
    logits_tV[1, last] = torch.nan
    logits_tV[2, 0] = torch.nan
    logits_tV[3] = -torch.inf
    logits_tV[4, last] = torch.inf
    logits_tV[5] = -torch.inf
    logits_tV[5, last] = -3.0
    id_t, finite_t = vocab.argmax(_shard(logits_tV, rank), group)
    assert finite_t.tolist() == [True, False, False, False, False] + [True] * (TOKENS - 5)
    assert id_t.tolist() == [ROWS_PER_RANK - 1, 0, 0, 0, 0, last, *logits_tV[6:].argmax(-1).tolist()]
    id_t, _ = vocab.gumbel_argmax(_shard(logits_tV, rank), _shard(gumbel_tV, rank), group)
    assert id_t[5:].tolist() == (logits_tV + gumbel_tV)[5:].argmax(-1).tolist()


def _check_head(group: dist.ProcessGroup, rank: int, world: int) -> None:
    hidden_TH, weight_VH = _randn(TOKENS, HIDDEN, seed=5), _randn(world * ROWS_PER_RANK, HIDDEN, seed=6)
    target_T, upstream_T = _targets(world), (_randn(TOKENS, seed=7), _randn(TOKENS, seed=8))

    def run(weight_vH: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        hidden, weight = hidden_TH.clone().requires_grad_(), weight_vH.clone().requires_grad_()

        def chunk_fn(logits_tv: Tensor, target_t: Tensor) -> tuple[Tensor, ...]:
            return vocab.log_prob(logits_tv, target_t, group), vocab.entropy(logits_tv, group)

        outputs = vocab.head_apply(hidden, weight, chunk_fn, (target_T,), CHUNK_TOKENS)
        return [*outputs, *torch.autograd.grad(outputs, (hidden, weight), upstream_T)]

    *whole, whole_hidden_grad, whole_weight_grad = run(weight_VH, None)
    rows = slice(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK)
    *ours, hidden_grad, weight_grad = run(weight_VH[rows], group)
    dist.all_reduce(hidden_grad, group=group)
    torch.testing.assert_close(ours, whole)
    torch.testing.assert_close(weight_grad, whole_weight_grad[rows])
    torch.testing.assert_close(hidden_grad, whole_hidden_grad)


def _check_collectives(group: dist.ProcessGroup, world: int) -> None:
    """Ranks must agree on the number of collectives whatever each of them holds: NaN, masks, ignored ids."""
    logits_tv = _randn(TOKENS, ROWS_PER_RANK, seed=9)
    strange_tv = torch.full_like(logits_tv, torch.nan)
    counts = []
    for x_tv, target_t in ((logits_tv, _targets(world)), (strange_tv, torch.full((TOKENS,), -100))):
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
            mock.patch.object(collectives, "_all_gather", wraps=collectives._all_gather) as all_gather,
        ):
            vocab.log_prob(x_tv, target_t, group)
            vocab.entropy(x_tv, group)
            vocab.soft_cross_entropy(x_tv, x_tv, group)
            vocab.sum_min(x_tv, x_tv, group)
            vocab.argmax(x_tv, group)
        counts.append((all_reduce.call_count, all_gather.call_count))
    assert counts == [(9, 1)] * 2, f"collectives: {counts}"
