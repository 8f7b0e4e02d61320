"""Whole recipes on a GPU as a user starts them: pretraining, fine-tuning, preferences, rollouts, samples, export."""

from pathlib import Path

import pytest
import torch

from tests.gpu import story

pytestmark = pytest.mark.gpu


# Each of nine programs imports torch, most also fla, and compiles what it is the first to use.
@pytest.mark.timeout(900)
def test_the_recipes_follow_one_another(tmp_path: Path):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    told = story.tell(tmp_path / "story", story.GPU)
    print("".join(f"\n{name:<20} {seconds:>6.1f} s" for name, seconds in told.seconds.items()))
