"""The scope that says in which recipe products are computed."""

import contextlib
from collections.abc import Iterator
from typing import Any

from transformer_engine.common.recipe import Recipe


class FP8GlobalStateManager:
    scopes: list[Recipe | None] = []

    @classmethod
    def get_fp8_recipe(cls) -> Recipe | None:
        return cls.scopes[-1] if cls.scopes else None


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Any = None
) -> Iterator[None]:
    assert not enabled or fp8_recipe is not None
    FP8GlobalStateManager.scopes.append(fp8_recipe if enabled else None)
    try:
        yield
    finally:
        FP8GlobalStateManager.scopes.pop()


def fp8_model_init(enabled: bool = True) -> None:
    raise AssertionError("weights are never stored in FP8")
