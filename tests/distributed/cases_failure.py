"""What ranks that can talk do with a user's mistake; called by the suite that torchrun starts."""

import pytest

from bailing_mtp.errors import UserError
from recipes.failure import fail_together


def check_fail_together(rank: int, world: int) -> None:
    """A mistake of some ranks ends all of them with the same message; nobody's mistake ends nobody."""
    fail_together(None)
    with pytest.raises(UserError) as alone:
        fail_together(UserError("data.path: unreadable") if rank == 1 else None)
    assert str(alone.value).startswith("rank 1 (") and str(alone.value).endswith("): data.path: unreadable")
    with pytest.raises(UserError) as common:
        fail_together(UserError("seed: bad"))
    assert str(common.value) == "seed: bad"
    with pytest.raises(UserError) as different:
        fail_together(UserError(f"rank {rank} says no"))
    assert str(different.value).count("says no") == world
