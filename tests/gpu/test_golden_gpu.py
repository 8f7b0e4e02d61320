"""Golden fixtures on a GPU with fla's kernels, in bf16 and fp32."""

import pytest
import torch
from torch import Tensor

from bailing_mtp.contracts.batch import TokenBatch
from bailing_mtp.model.settings import ModelSettings
from bailing_mtp.parallel.context import ParallelContext
from bailing_mtp.training.scoring import Scores, score_batch
from tests.distributed.golden import golden_batch
from tests.distributed.worlds import fixture_model

pytestmark = pytest.mark.gpu


def _score(
    kind: str, dtype: torch.dtype, kda: str, context: ParallelContext
) -> tuple[Scores, TokenBatch, dict[str, Tensor]]:
    batch, expected = golden_batch(kind)
    built = fixture_model(kind, context, ModelSettings(dtype, dtype, kda=kda))
    for module in built.modules:
        module.eval()
    return score_batch(built, batch, context, with_logits=True), batch, expected


def _kl(reference_TV: Tensor, ours_TV: Tensor) -> Tensor:
    """KL(reference || ours) per position, in fp64."""
    p, q = reference_TV.double().log_softmax(-1), ours_TV.cpu().double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_fp32_logits(kind: str, context: ParallelContext):
    # Only the torch twin: fla's kernels multiply fp32 inputs in tf32 and are tuned for bf16.
    scores, batch, expected = _score(kind, torch.float32, "torch", context)
    inside = batch.has_token_ahead(1)
    assert float((scores.logits_TV.cpu() - expected["logits_fp32"]).abs().max()) <= 2e-3
    assert float((scores.mtp_logits_TV.cpu() - expected["mtp_logits_fp32"])[inside].abs().max()) <= 2e-3


@pytest.mark.parametrize("kda", ["torch", "fla"])
def test_dense_bf16_is_as_close_to_fp32_as_the_reference_stack(kda: str, context: ParallelContext):
    scores, batch, expected = _score("dense", torch.bfloat16, kda, context)
    inside = batch.has_token_ahead(1)
    for ours, name in ((scores.logits_TV, "logits_fp32"), (scores.mtp_logits_TV, "mtp_logits_fp32")):
        kl_T = _kl(expected[name], ours)[inside]
        print(f"dense {kda} {name}: KL mean {kl_T.mean():.2e} max {kl_T.max():.2e}")
        assert float(kl_T.mean()) < 1.5e-3 and float(kl_T.max()) < 8e-3


@pytest.mark.parametrize("kda", ["torch", "fla"])
def test_moe_bf16_differs_only_by_routing_flips(kda: str, context: ParallelContext):
    scores, batch, expected = _score("moe", torch.bfloat16, kda, context)
    inside = batch.has_token_ahead(1)
    for ours, name in ((scores.logits_TV, "logits_fp32"), (scores.mtp_logits_TV, "mtp_logits_fp32")):
        kl_T = _kl(expected[name], ours)[inside]
        print(f"moe {kda} {name}: KL median {kl_T.median():.2e}, above 2e-2: {(kl_T > 2e-2).double().mean():.1%}")
        assert float(kl_T.median()) < 3e-3
        assert float((kl_T > 2e-2).double().mean()) <= 0.2
