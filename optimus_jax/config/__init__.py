"""The user's settings: frozen dataclasses, validated on creation, readable as JSON.

A `Config` holds no arrays and imports no accelerator library. It states what the user wants; the
available hardware, data and model size are measured later, and the layout derived from both is a
`Plan`. `None` in a field means "derive it"; the run prints the derived value.
"""

from optimus_jax.config.data import DataConfig, PhaseConfig
from optimus_jax.config.export import ExportConfig
from optimus_jax.config.model import Features, Generator, ModelConfig, RopeScaling
from optimus_jax.config.parallel import (
    OFFLOADS,
    REMAT_POLICIES,
    AttentionKernel,
    MomentPrecision,
    Offload,
    OffloadChoice,
    Overlap,
    OverlapChoice,
    ParallelConfig,
    Precision,
    PrecisionConfig,
    RematChoice,
    RematPolicy,
    Scatter,
)
from optimus_jax.config.running import ControlConfig, DistributedConfig, FaultConfig, StoreConfig
from optimus_jax.config.training import (
    AugmentationConfig,
    CheckpointConfig,
    EvaluationConfig,
    LearningRateFactors,
    LearningRateSchedule,
    LogConfig,
    MaskingConfig,
    OptimizerConfig,
    PatchMaskingConfig,
    PreferenceConfig,
)
from optimus_jax.config.tuning import Tuning
from optimus_jax.config.whole import DERIVED, Config

__all__ = [
    "DERIVED",
    "OFFLOADS",
    "REMAT_POLICIES",
    "AttentionKernel",
    "AugmentationConfig",
    "CheckpointConfig",
    "Config",
    "ControlConfig",
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "ExportConfig",
    "FaultConfig",
    "Features",
    "Generator",
    "LearningRateFactors",
    "LearningRateSchedule",
    "LogConfig",
    "MaskingConfig",
    "ModelConfig",
    "MomentPrecision",
    "Offload",
    "OffloadChoice",
    "OptimizerConfig",
    "Overlap",
    "OverlapChoice",
    "ParallelConfig",
    "PatchMaskingConfig",
    "PhaseConfig",
    "Precision",
    "PrecisionConfig",
    "PreferenceConfig",
    "RematChoice",
    "RematPolicy",
    "RopeScaling",
    "Scatter",
    "StoreConfig",
    "Tuning",
]
