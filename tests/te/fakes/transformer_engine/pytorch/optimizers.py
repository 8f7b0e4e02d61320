"""What megatron-core takes where it finds it; nothing of it may be used."""

from typing import Any


def multi_tensor_applier(*_: Any, **__: Any) -> None:
    raise AssertionError("the config did not ask for it")


multi_tensor_l2norm = multi_tensor_scale = multi_tensor_scale_tensor = multi_tensor_applier


class FusedAdam:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the config did not ask for it")


class FusedSGD(FusedAdam):
    pass
