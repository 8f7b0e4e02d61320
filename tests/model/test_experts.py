"""The grouped GEMMs of the experts against the loop, values and gradients."""

import pytest
import torch

from bailing_mtp.kernels.reference import train as kernels
from bailing_mtp.model.mlp import StackedExperts
from bailing_mtp.model.moe import _Experts
from bailing_mtp.model.settings import ModelSettings, transformer_config
from tests.model.test_presets import preset


def _experts(context) -> StackedExperts:
    config = transformer_config(preset("tiny"), ModelSettings(torch.float32, torch.float32), context)
    experts = StackedExperts(4, config, limit=1.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return experts


def _run(experts: StackedExperts, counts: list[int], grouped: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    n, counts_e = sum(counts), torch.tensor(counts)
    tokens = torch.randn(n, 128, generator=generator, requires_grad=True)
    probs = torch.rand(n, generator=generator, requires_grad=True)
    if grouped:
        ids = torch.arange(4).repeat_interleave(counts_e)[:, None]
        weights = experts.gate_up, experts.down
        output = _Experts.apply(kernels, experts.limit, True, n, ids, tokens, probs[:, None], *weights)
    else:
        output, bias = experts(tokens, counts_e, probs)
        assert bias is None
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), (tokens, probs, *experts.parameters()))]


@pytest.mark.parametrize("counts", [[3, 0, 9, 1], [0, 0, 5, 0], [0, 0, 0, 0]], ids=str)
def test_grouped_equals_the_loop(context, counts: list[int]):
    """Every expert gets a gradient, also one without tokens: zero."""
    loop, ours = (_run(_experts(context), counts, grouped) for grouped in (False, True))
    for our, their in zip(ours, loop, strict=True):
        torch.testing.assert_close(our, their, atol=1e-5, rtol=1e-5)
    empty = [expert for expert, count in enumerate(counts) if not count]
    assert not any(grad[empty].any() for grad in ours[-2:])
