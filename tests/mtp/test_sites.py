"""Sites without a target cost nothing, and leaving them out changes nothing: losses, metrics, gradients, counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bailing_mtp.contracts import sites
from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.contracts.sites import DraftSites, HeadRows
from bailing_mtp.kernels.reference import head as head_kernels
from bailing_mtp.losses import heads
from bailing_mtp.model.router import GroupLimitedRouter
from bailing_mtp.parallel import vocab
from bailing_mtp.training import objective as objective_module
from bailing_mtp.training.objective import LossTerms
from bailing_mtp.training.state import TrainState
from bailing_mtp.training.step import accumulate_gradients
from tests.distributed import worlds
from tests.mtp import models, plain

LENGTHS = (19, 6, 2, 11, 3, 14)
PADDING = (False, False, False, False, True, False)


def _batch(mask_T: Tensor, mtp_mask_T: Tensor | None = None) -> TokenBatch:
    return dataclasses.replace(models.pack(LENGTHS, PADDING), loss_mask_T=mask_T, mtp_mask_T=mtp_mask_T)


def _answers() -> Tensor:
    """The last half of every document."""
    layout = PackedLayout.build(LENGTHS, PADDING)
    n_T = torch.repeat_interleave(torch.tensor(LENGTHS), torch.tensor(LENGTHS))
    return layout.position_ids_T >= n_T // 2


def _turns() -> Tensor:
    """Pieces with gaps between them, and documents without any target."""
    mask_T = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    mask_T[[5, 6, 7, 11, 13, 30, 43, 46, 50, 51]] = True
    return mask_T


def _chosen() -> Tensor:
    """The documents of even number."""
    return torch.repeat_interleave(torch.arange(len(LENGTHS)) % 2 == 0, torch.tensor(LENGTHS))


BATCHES = {
    "answers": _batch(_answers()),
    "turns": _batch(_turns()),
    "pairs": _batch(_answers(), _answers() & _chosen()),
    "mtp alone": _batch(torch.zeros_like(_answers()), _turns()),
    "one": _batch(torch.arange(sum(LENGTHS)) == 10),
    "none": _batch(torch.zeros_like(_answers())),
}
ARMS = {
    "hard, detached": {"detach": True},
    "soft, detached, depth 3": {"objective": "soft", "detach": True, "depth": 3},
    "hard, joint, depth 2": {"depth": 2},
    "soft, joint": {"objective": "soft"},
}


@pytest.fixture(scope="module")
def state() -> Iterator[TrainState]:
    with worlds.layout(tp=1, ep=1) as context:
        yield models.fixture_state(context)


def _run(state: TrainState, batch: TokenBatch, arm: dict) -> tuple[LossTerms, dict[str, Tensor], list[Tensor]]:
    """Loss terms, gradients, and the tokens that every router counted."""
    routers = [m for chunk in state.chunks for m in chunk.module.modules() if isinstance(m, GroupLimitedRouter)]
    for router in routers:
        router.local_tokens_per_expert.zero_()
    models.clear_gradients(state)
    objective = models.objective(**arm)
    terms = objective(state, batch, objective.count(batch))
    terms.total.backward()
    return terms, models.main_grads(state), [router.local_tokens_per_expert.clone() for router in routers]


@pytest.fixture(scope="module")
def grouped(state: TrainState) -> TrainState:
    """With grouped experts and the heads' one-pass kernels, by their twins."""
    found = models.fixture_state(state.context, dataclasses.replace(worlds.FP32, experts="grouped"))
    found.trunk_module.head_kernels = head_kernels
    return found


@pytest.mark.parametrize("which", ["state", "grouped"])
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("kind", BATCHES)
def test_leaving_sites_out_changes_nothing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, arm: str, which: str
):
    batch, found, state = BATCHES[kind], [], request.getfixturevalue(which)
    for leaves_out in (True, False):
        if not leaves_out:
            monkeypatch.setattr(sites, "WORTHWHILE_SHARE", 0.0)
            monkeypatch.setattr(
                objective_module.HeadRows, "of",
                lambda batch, n_depths, part: HeadRows.every(batch.layout.n_tokens, n_depths, torch.device("cpu")),
            )  # fmt: skip
        found.append(_run(state, batch, ARMS[arm]))
    (ours, our_grads, our_counts), (theirs, their_grads, their_counts) = found
    torch.testing.assert_close(ours.total, theirs.total, atol=1e-6, rtol=1e-5)
    for name, value in theirs.sums.items():
        torch.testing.assert_close(ours.sums[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, grad in their_grads.items():
        limit = 2e-5 * float(grad.abs().max()) + 1e-9
        torch.testing.assert_close(our_grads[name], grad, atol=limit, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert all(torch.equal(a, b) for a, b in zip(our_counts, their_counts, strict=True))
    assert any(grad.any() for grad in their_grads.values()) == (kind != "none")


@pytest.mark.parametrize("kind", BATCHES)
def test_the_part_is_what_the_targets_need(kind: str):
    """Written out per document: keys from its begin, queries from its first site, both to its last one."""
    batch = BATCHES[kind]
    for depths in (1, 3):
        part = DraftSites.of(batch, depths)
        keys, asking, lengths, query_lengths = [], [], [], []
        for span in plain.documents(batch):
            needed = [t for d in range(1, depths + 1) for t in plain.valid_sites(batch, d) if t in span]
            if needed:
                keys += range(span.start, max(needed) + 1)
                asking += range(min(needed), max(needed) + 1)
                lengths.append(max(needed) + 1 - span.start)
                query_lengths.append(max(needed) + 1 - min(needed))
        if not keys:
            keys, asking, lengths, query_lengths = [0], [0], [1], [1]
        assert (part.keys_K.tolist(), part.sites_Q.tolist()) == (keys, asking)
        assert (part.lengths, part.query_lengths) == (tuple(lengths), tuple(query_lengths))
        assert part.keys_K[part.queries_Q].tolist() == asking
        assert [int(part.row_T[site]) for site in asking] == list(range(len(asking)))


def test_a_pack_of_which_nearly_everything_is_trained_stays_whole():
    full = models.pack((64, 64))
    assert DraftSites.of(dataclasses.replace(full, loss_mask_T=torch.ones(128, dtype=torch.bool)), 2) is None
    assert DraftSites.of(dataclasses.replace(full, loss_mask_T=full.layout.position_ids_T >= 12), 2) is not None
    assert DraftSites.of(models.pack(()), 1) is None


def test_rows_of_the_heads():
    """The trunk's own sites first, in order, the same with and without MTP depths; then those that are only read."""
    batch = BATCHES["turns"]
    for depths in (0, 1, 3):
        rows = HeadRows.of(batch, depths)
        own, trunk = plain.valid_sites(batch, 0), rows.sites_n.tolist()
        assert (trunk[: rows.n_own], rows.n_own) == (own, len(own)) and len(set(trunk)) == len(trunk)
        read = set()
        for d, depth in enumerate(rows.depths, start=1):
            wanted = {t for e in range(d, depths + 1) for t in plain.valid_sites(batch, e)}
            assert set(depth.sites_n.tolist()) == wanted and len(depth.sites_n) == len(wanted)
            assert [trunk[place] - d for place in depth.partners] == depth.sites_n.tolist()
            assert depth.partners_n.tolist() == list(depth.partners) == sorted(depth.partners)
            read |= {t + d for t in wanted}
        assert set(trunk) == set(own) | read
        for n_tokens in (1, 3, 100):
            chunks = rows.chunks(n_tokens)
            assert [t for c in chunks for t in range(c.begin, c.end)] == list(range(len(trunk)))
            assert all(c.end - c.begin <= n_tokens and c.trains_trunk == (c.end <= rows.n_own) for c in chunks)
            for d, depth in enumerate(rows.depths):
                spans = [c.depths[d] for c in chunks]
                assert [t for lo, hi in spans for t in range(lo, hi)] == list(range(len(depth.partners)))
                for chunk, (lo, hi) in zip(chunks, spans, strict=True):
                    assert all(chunk.begin <= place < chunk.end for place in depth.partners[lo:hi])


class _Work:
    """Rows of every product with the head, and of every call of the MTP layer's MLP and attention."""

    def __init__(self, state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
        self.head_rows = self.weight_rows = 0
        self.mlp_rows: list[int] = []
        self.key_rows: list[int] = []
        logits, accumulate = vocab.head_logits, vocab.accumulate_mm

        def counted_logits(hidden_tH: Tensor, weight_vH: Tensor, *out: Tensor) -> Tensor:
            self.head_rows += hidden_tH.shape[0]
            return logits(hidden_tH, weight_vH, *out)

        def counted_mm(total: Tensor, left: Tensor, right: Tensor) -> None:
            self.weight_rows += right.shape[0]
            accumulate(total, left, right)

        monkeypatch.setattr(vocab, "head_logits", counted_logits)
        monkeypatch.setattr(vocab, "accumulate_mm", counted_mm)
        block = state.mtp_module.block
        self.hooks = [
            block.mlp.register_forward_hook(lambda module, args, out: self.mlp_rows.append(args[0].shape[0])),
            state.mtp_module.eh_proj.register_forward_hook(
                lambda module, args, out: self.key_rows.append(args[0].shape[0])
            ),
        ]


def test_detached_work_is_that_of_the_targets(state: TrainState, monkeypatch: pytest.MonkeyPatch):
    """Hard, detached, one depth: the trunk's head forward and again in the backward, the same for the layer's, the
    weight's gradient from the trunk alone; no gradient asked of the trunk's states or the embedding by the layer."""
    batch = BATCHES["answers"]
    n0, n1 = (len(plain.valid_sites(batch, depth)) for depth in (0, 1))
    part = DraftSites.of(batch, 1)
    monkeypatch.setattr(state.trunk_module, "head_kernels", head_kernels)
    work = _Work(state, monkeypatch)
    reached: list[bool] = []
    work.hooks.append(
        state.mtp_module.register_forward_pre_hook(
            lambda module, args: reached.extend(x.requires_grad for x in (*args[0], args[1]))
        )
    )
    accumulate_gradients(state, [batch], models.objective(detach=True))
    for hook in work.hooks:
        hook.remove()
    assert (work.head_rows, work.weight_rows) == (2 * (n0 + n1), n0)
    assert (work.key_rows, work.mlp_rows) == ([part.keys_K.numel()], [part.sites_Q.numel()])
    assert reached == [False, False] and part.sites_Q.numel() < 0.6 * batch.layout.n_tokens


def test_hard_targets_compute_nothing_soft(state: TrainState, monkeypatch: pytest.MonkeyPatch):
    class Kernels:
        row_stats, pair_stats = staticmethod(head_kernels.row_stats), staticmethod(head_kernels.pair_stats)
        target_grad = staticmethod(head_kernels.target_grad)

    monkeypatch.setattr(state.trunk_module, "head_kernels", Kernels)
    monkeypatch.setattr(heads.vocab, "soft_cross_entropy", None)
    accumulate_gradients(state, [BATCHES["answers"]], models.objective(detach=True, depth=2))
    monkeypatch.setattr(state.trunk_module, "head_kernels", None)
    accumulate_gradients(state, [BATCHES["answers"]], models.objective(depth=2))


def test_a_batch_remembers_itself_on_the_host_until_it_is_changed():
    batch, meta = BATCHES["answers"], torch.device("meta")
    moved = batch.to(meta)
    assert moved.on_host() is batch and moved.to(meta).on_host() is batch and batch.on_host() is batch
    assert moved.layout.cu_seqlens.device.type == "meta"
    assert dataclasses.replace(moved, loss_mask_T=moved.loss_mask_T)._host is None
