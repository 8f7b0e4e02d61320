"""The config schema: frozen pydantic models, one per recipe. Imports neither torch nor hydra."""

from bailing_mtp.errors import UserError

from .benchmark import BenchmarkConfig
from .build import build_config, key_paths, schema_defaults, show, text_keys, unknown_key
from .checks import (
    LayoutSizes,
    check_batch,
    check_layout,
    check_mtp,
    check_mtp_divisor,
    check_optimizer,
    check_replay,
)
from .errors import ConfigError
from .finetune import DpoConfig, SftConfig
from .generation import GenerateConfig
from .policy import GrpoConfig
from .rollout import PreferenceConfig, RlConfig, RolloutConfig, SamplingConfig
from .section import Section
from .support import check_backends
from .training import (
    CheckpointConfig,
    DataConfig,
    DialogueDataConfig,
    LogConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    ParallelConfig,
    PolicyTrainConfig,
    PromptDataConfig,
    TrainConfig,
)
from .verbs import (
    ConvertConfig,
    DoctorConfig,
    LoadConfig,
    PlotConfig,
    PretrainConfig,
    RunConfig,
    ScoreConfig,
    split_list,
)

__all__ = [
    "BenchmarkConfig",
    "CheckpointConfig",
    "ConfigError",
    "ConvertConfig",
    "DataConfig",
    "DialogueDataConfig",
    "DoctorConfig",
    "DpoConfig",
    "GenerateConfig",
    "GrpoConfig",
    "LayoutSizes",
    "LoadConfig",
    "LogConfig",
    "ModelConfig",
    "MtpConfig",
    "OptimConfig",
    "ParallelConfig",
    "PlotConfig",
    "PolicyTrainConfig",
    "PreferenceConfig",
    "PretrainConfig",
    "PromptDataConfig",
    "RlConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScoreConfig",
    "Section",
    "SftConfig",
    "TrainConfig",
    "UserError",
    "build_config",
    "check_backends",
    "check_batch",
    "check_layout",
    "check_mtp",
    "check_mtp_divisor",
    "check_optimizer",
    "check_replay",
    "key_paths",
    "schema_defaults",
    "show",
    "split_list",
    "text_keys",
    "unknown_key",
]
