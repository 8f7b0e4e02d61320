"""Golden logits of the fixtures, in any layout."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from bailing_mtp.contracts.batch import PackedLayout, TokenBatch
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.scoring import Scores, score_batch
from tests.distributed.worlds import FIXTURES, FP32, fixture_model

MAX_DIFFERENCE = 2e-3
CLEAR_GAP = 1e-2


def golden_batch(kind: str) -> tuple[TokenBatch, dict[str, torch.Tensor]]:
    """The fixture's packed documents and expected tensors."""
    expected = load_file(FIXTURES / kind / "expected.safetensors")
    ids = expected["input_ids"]
    layout = PackedLayout.build(expected["cu_seqlens"].diff().tolist())
    return TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), layout), expected


def check_golden(kind: str, context: ParallelContext, settings: ModelSettings = FP32) -> None:
    """Trunk and MTP logits in fp32 against an independent implementation."""
    batch, expected = golden_batch(kind)
    built = fixture_model(kind, context, settings)
    for module in built.modules:
        module.eval()
    scores = score_batch(built, batch, context, with_logits=True, chunk_tokens=100)
    scores = Scores(*(None if values is None else values.cpu() for values in scores))
    _compare(scores.logits_TV, expected["logits_fp32"])
    # The last site of a document saw the next document's first token in the reference: left out.
    inside = batch.has_token_ahead(1)
    _compare(scores.mtp_logits_TV[inside], expected["mtp_logits_fp32"][inside])
    _check_log_probs(scores, batch)


def _compare(ours_TV: torch.Tensor, theirs_TV: torch.Tensor) -> None:
    difference = float((ours_TV - theirs_TV).abs().max())
    assert difference <= MAX_DIFFERENCE, f"logits differ by {difference}"
    best = theirs_TV.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > CLEAR_GAP
    assert torch.equal(ours_TV.argmax(-1)[clear], theirs_TV.argmax(-1)[clear])


def _check_log_probs(scores: Scores, batch: TokenBatch) -> None:
    """The reported log-probs are those of the written logits at the tokens one and two ahead."""
    for n_ahead, logprobs_T, logits_TV in (
        (1, scores.logprobs_T, scores.logits_TV),
        (2, scores.mtp_logprobs_T, scores.mtp_logits_TV),
    ):
        expected_T = logits_TV.log_softmax(-1).gather(-1, batch.token_ahead(n_ahead)[:, None]).squeeze(-1)
        has = batch.has_token_ahead(n_ahead)
        torch.testing.assert_close(logprobs_T[has], expected_T[has], atol=1e-5, rtol=1e-5)
        assert logprobs_T[~has].isnan().all()
