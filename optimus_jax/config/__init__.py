"""What a person asks for: frozen values, checked when they are made, readable as JSON.

A `Config` holds no arrays and imports no accelerator library. It says what is wanted; what is
there (devices, model sizes in bytes, documents) is found out later, and the layout that follows
from both is a `Plan`. `None` in a field means "derive it", and the run prints what was derived.
"""

from optimus_jax.config.data import DataConfig, PhaseConfig
from optimus_jax.config.layout import (
    OFFLOADS,
    REMAT_POLICIES,
    AttentionKernel,
    MomentPrecision,
    Offload,
    OffloadChoice,
    ParallelConfig,
    Precision,
    PrecisionConfig,
    RematChoice,
    RematPolicy,
)
from optimus_jax.config.model import ModelConfig, RopeScaling
from optimus_jax.config.running import ControlConfig, DistributedConfig, FaultConfig, StoreConfig
from optimus_jax.config.training import (
    CheckpointConfig,
    EvaluationConfig,
    LearningRateSchedule,
    LogConfig,
    OptimizerConfig,
)
from optimus_jax.config.whole import DERIVED, Config

__all__ = [
    "DERIVED",
    "OFFLOADS",
    "REMAT_POLICIES",
    "AttentionKernel",
    "CheckpointConfig",
    "Config",
    "ControlConfig",
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "FaultConfig",
    "LearningRateSchedule",
    "LogConfig",
    "ModelConfig",
    "MomentPrecision",
    "Offload",
    "OffloadChoice",
    "OptimizerConfig",
    "ParallelConfig",
    "PhaseConfig",
    "Precision",
    "PrecisionConfig",
    "RematChoice",
    "RematPolicy",
    "RopeScaling",
    "StoreConfig",
]
