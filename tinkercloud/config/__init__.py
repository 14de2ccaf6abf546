"""The settings, and the one place that reads environment, file and flags."""

from tinkercloud.config.environment import (
    c_compiler,
    default_data_dir,
    engine_environment,
    force_instruction_set,
    forced_instruction_set,
    nccl_variables,
    quiet_ray,
    user_cache_dir,
)
from tinkercloud.config.sources import load_config, parse_model
from tinkercloud.config.tree import (
    DEFAULT_MODEL_NAME,
    ENV_PREFIX,
    REPEATABLE,
    ClusterConfig,
    Config,
    EngineConfig,
    ModelAlias,
    ModelSource,
    Setting,
    settings,
)

__all__ = [
    "DEFAULT_MODEL_NAME",
    "ENV_PREFIX",
    "REPEATABLE",
    "ClusterConfig",
    "Config",
    "EngineConfig",
    "ModelAlias",
    "ModelSource",
    "Setting",
    "c_compiler",
    "default_data_dir",
    "engine_environment",
    "force_instruction_set",
    "forced_instruction_set",
    "load_config",
    "nccl_variables",
    "parse_model",
    "quiet_ray",
    "settings",
    "user_cache_dir",
]
