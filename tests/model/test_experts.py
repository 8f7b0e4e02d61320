"""The grouped GEMM of the experts against the loop, values and gradients."""

import torch

from bailing_mtp.model.mlp import StackedExperts
from bailing_mtp.model.settings import ModelSettings, transformer_config
from tests.model.test_presets import preset


def _experts(context, grouped: bool) -> StackedExperts:
    config = transformer_config(preset("tiny"), ModelSettings(torch.float32, torch.float32), context)
    experts = StackedExperts(4, config, grouped=grouped, limit=1.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return experts


def _run(experts: StackedExperts, counts: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(sum(counts), 128, generator=generator, requires_grad=True)
    probs = torch.rand(sum(counts), generator=generator, requires_grad=True)
    output, bias = experts(tokens, torch.tensor(counts), probs)
    assert bias is None
    (output.sin().sum() + 0 * experts.down.sum()).backward()
    return [output, tokens.grad, probs.grad, *(parameter.grad for parameter in experts.parameters())]


def test_grouped_equals_the_loop(context):
    for counts in ([3, 0, 9, 1], [0, 0, 5, 0], [0, 0, 0, 0]):
        loop, grouped = (_run(_experts(context, grouped), counts) for grouped in (False, True))
        for ours, theirs in zip(grouped, loop, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_every_expert_gets_a_gradient_without_tokens(context):
    for grouped in (False, True):
        experts = _experts(context, grouped)
        tokens = torch.zeros(0, 128, requires_grad=True)
        experts(tokens, torch.zeros(4, dtype=torch.long), torch.zeros(0))[0].sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())
