"""The verbs: python -m recipes.<verb> [overrides]. Only they know hydra, wandb and the environment.

Importing this package also silences, message by message, what pinned packages say about themselves on every
rank and no user can act on. Anything new that they say is still shown.
"""

import logging
import warnings

CHATTER: tuple[tuple[str, type[Warning]], ...] = (
    # megatron-core on import: what it would use if it were there. What we need is checked by name elsewhere.
    ("Transformer Engine and Apex are not installed", UserWarning),
    ("absl.logging is not installed", UserWarning),
    ("MimoModelConfig is experimental", UserWarning),
    # megatron-core about its own internals.
    ("full scope is deprecated", UserWarning),
    ("Warning. tp_group is None", DeprecationWarning),
    ("The following imports from `dynamic_context.py` will be removed", DeprecationWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),
    # torch about the names under which megatron-core calls it.
    (r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning),
)
"""Beginning of a warning (a regular expression) and its category."""

LOGGED = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    # torchao on import, about how it registers an enum.
    "torch.utils._pytree": "KernelPreference",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
}
"""Logger and a part of the line that it prints."""


def be_quiet() -> None:
    """Add the filters; calling it again changes nothing."""
    for message, category in CHATTER:
        warnings.filterwarnings("ignore", message, category)
    for name, part in LOGGED.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _WithoutPart) for known in logger.filters):
            logger.addFilter(_WithoutPart(part))


class _WithoutPart(logging.Filter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def filter(self, record: logging.LogRecord) -> bool:
        return self._part not in record.getMessage()


be_quiet()
