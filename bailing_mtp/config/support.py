"""The one table of optional backends and what each needs of the machine and the install."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from .build import show
from .errors import raise_if_any
from .section import Section


@dataclass(frozen=True, kw_only=True)
class Option:
    """One value of one key that needs something beyond the base install."""

    path: str
    """Dotted key."""
    value: object
    """The value that asks for the backend."""
    instead: str = ""
    """Values of the key that need nothing; empty = there are none."""
    modules: tuple[str, ...] = ()
    """Modules that must be importable."""
    install: str = ""
    """Command that installs them."""
    needs_gpu: bool = False
    """Runs on a CUDA device only."""


OPTIONS = (
    Option(
        path="model.kda",
        value="fla",
        instead="torch",
        modules=("fla",),
        install="pip install fla-core==0.6.0",
        needs_gpu=True,
    ),
    Option(path="model.kernels", value="triton", instead="torch", needs_gpu=True),
    Option(
        path="model.backend",
        value="te",
        instead="local",
        modules=("transformer_engine",),
        install="pip install --no-build-isolation 'transformer-engine[pytorch]>=2.3'",
        needs_gpu=True,
    ),
    Option(
        path="model.attention",
        value="flash",
        instead="sdpa",
        modules=("flash_attn",),
        install="pip install --no-build-isolation flash-attn",
        needs_gpu=True,
    ),
    Option(
        path="optim.fused",
        value="apex",
        instead="none",
        # The last two are built only where the variables of the command ask for extensions.
        modules=("apex", "amp_C", "fused_weight_gradient_mlp_cuda"),
        # The apex of PyPI is another project.
        install="APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex",
        needs_gpu=True,
    ),
    Option(
        path="optim.name",
        value="adamw8bit",
        instead="adamw",
        modules=("torchao",),
        install="pip install 'torchao>=0.18,<0.19'",
    ),
    Option(
        path="rollout.kernels",
        value="triton",
        instead="torch",
        modules=("triton",),
        install="pip install triton",
        needs_gpu=True,
    ),
    Option(path="rollout.cuda_graphs", value=True, instead="false", needs_gpu=True),
    Option(path="rollout.tp_sum", value="peer", instead="library", needs_gpu=True),
    Option(path="what", value="kernels", needs_gpu=True),
    Option(path="what", value="decode", needs_gpu=True),
    Option(path="what", value="adaptive", needs_gpu=True),
    Option(path="what", value="train", needs_gpu=True),
    Option(path="what", value="grpo", needs_gpu=True),
)


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def check_backends(
    config: Section, *, has_gpu: bool, installed: Callable[[str], bool] = is_installed
) -> None:
    """Refuse every chosen backend that this machine or this install does not have.

    Raises ConfigError; reads nothing but the config, so it runs before anything is loaded.
    """
    problems = []
    for option in OPTIONS:
        value = _value_at(config, option.path)
        if value != option.value:
            continue
        reason = _reason(option, has_gpu, installed)
        if reason:
            problems.append(f"{option.path}: {show(value)} {reason}")
    raise_if_any(problems)


def _reason(option: Option, has_gpu: bool, installed: Callable[[str], bool]) -> str:
    if option.needs_gpu and not has_gpu:
        allowed = f"; allowed: {option.instead}" if option.instead else ""
        return f"needs a CUDA device and there is none here{allowed}"
    absent = [module for module in option.modules if not installed(module)]
    return f"needs the module {absent[0]!r}; install it with: {option.install}" if absent else ""


def _value_at(config: Section, path: str) -> object:
    """The value of a dotted key, or None where this recipe has no such section."""
    node: object = config
    for name in path.split("."):
        if name not in type(node).model_fields:
            return None
        node = getattr(node, name)
    return node
