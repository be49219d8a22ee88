"""optimus_jax: dynamic parallelism for JAX.

`train(model="gpt2-nano", mesh="data=2,fsdp=4", steps=100)` trains a model,
`find_plans(model="llama3-8b", cluster="h100:8x8")` ranks the layouts of a model on a cluster,
`show_mesh("data=2,fsdp=4", model="gpt2-nano")` shows one, `evaluate("runs/a", data="other.txt")`
measures a run's model, `load("runs/a").generate("def ")` continues a text with it, and
`export("runs/a", "exported/a")` writes it for transformers. Names are imported on first use, so
that importing a small module does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from optimus_jax.version import VERSION as __version__

if TYPE_CHECKING:
    from optimus_jax.config import Config, ModelConfig
    from optimus_jax.errors import FaultError, OptimusError
    from optimus_jax.inference.loaded_model import LoadedModel, load
    from optimus_jax.plan import Plan
    from optimus_jax.planning.api import RankedPlan, find_plans
    from optimus_jax.planning.explained_plan import explain_plan
    from optimus_jax.run.api import RunResult, train, training_loop
    from optimus_jax.run.evaluate import EvaluationResult, evaluate
    from optimus_jax.run.export import ExportResult, export
    from optimus_jax.run_directory.step_record import EvalRecord, StepRecord
    from optimus_jax.training.callbacks import Callback, RunInfo
    from optimus_jax.training.own_loop import TrainingLoop
    from optimus_jax.training.task import Task
    from optimus_jax.viz.mesh_view import MeshView, show_mesh

_HOMES = {
    "train": "run.api",
    "RunResult": "run.api",
    "training_loop": "run.api",
    "TrainingLoop": "training.own_loop",
    "EvaluationResult": "run.evaluate",
    "evaluate": "run.evaluate",
    "ExportResult": "run.export",
    "export": "run.export",
    "Callback": "training.callbacks",
    "RunInfo": "training.callbacks",
    "StepRecord": "run_directory.step_record",
    "EvalRecord": "run_directory.step_record",
    "Task": "training.task",
    "OptimusError": "errors",
    "FaultError": "errors",
    "Config": "config",
    "ModelConfig": "config",
    "LoadedModel": "inference.loaded_model",
    "load": "inference.loaded_model",
    "Plan": "plan",
    "RankedPlan": "planning.api",
    "find_plans": "planning.api",
    "explain_plan": "planning.explained_plan",
    "MeshView": "viz.mesh_view",
    "show_mesh": "viz.mesh_view",
}

__all__ = [
    "Callback",
    "Config",
    "EvalRecord",
    "EvaluationResult",
    "ExportResult",
    "FaultError",
    "LoadedModel",
    "MeshView",
    "ModelConfig",
    "OptimusError",
    "Plan",
    "RankedPlan",
    "RunInfo",
    "RunResult",
    "StepRecord",
    "Task",
    "TrainingLoop",
    "__version__",
    "evaluate",
    "explain_plan",
    "export",
    "find_plans",
    "load",
    "show_mesh",
    "train",
    "training_loop",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"optimus_jax.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
