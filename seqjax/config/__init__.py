"""The settings of a run: dataclasses, presets that fill them, and the parser."""

from seqjax.config.settings import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    MlpConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    differences,
    from_config_dict,
    to_dict,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "MeshConfig",
    "MlpConfig",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
    "differences",
    "from_config_dict",
    "to_dict",
]
