"""The config schema: frozen pydantic models, one per recipe. Imports neither torch nor hydra."""

from bailing_mtp.errors import UserError

from .build import build_config, key_paths, schema_defaults, show, text_keys, unknown_key
from .checks import LayoutSizes, check_batch, check_layout, check_mtp
from .errors import ConfigError
from .rollout import DpoConfig, RlConfig, RolloutConfig, SamplingConfig
from .section import Section
from .support import check_backends
from .training import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from .verbs import PretrainConfig, RunConfig, ScoreConfig

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DpoConfig",
    "LayoutSizes",
    "LogConfig",
    "ModelConfig",
    "MtpConfig",
    "OptimConfig",
    "ParallelConfig",
    "PretrainConfig",
    "RlConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScoreConfig",
    "Section",
    "TrainConfig",
    "UserError",
    "build_config",
    "check_backends",
    "check_batch",
    "check_layout",
    "check_mtp",
    "key_paths",
    "schema_defaults",
    "show",
    "text_keys",
    "unknown_key",
]
