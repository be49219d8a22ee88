"""XLA's compiler options: their type, and those of programs that belong to no plan.

training/compiler_options.py has the options of a plan.

All other options keep XLA's defaults. The user's XLA_FLAGS always take precedence: a program's own
options would win over the environment's, so options that XLA_FLAGS names are left out.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import jaxlib.version
from jax.sharding import Mesh

GPU = ("gpu", "cuda")
"""JAX's names of the GPU platform."""
_MODES_RENAMED = jaxlib.version.__version_info__ >= (0, 12, 0, 1)
MODE = "COLLECTIVE_PIPELINING_MODE_" if _MODES_RENAMED else "COLLECTIVE_PIPELININGMODE_"
"""XLA's names of modes begin so. Each version rejects the other's."""


@dataclass(frozen=True, kw_only=True)
class CompilerOption:
    """One of XLA's options, and why it is set."""

    name: str
    """XLA's name of the option."""
    value: bool | str
    why: str
    """What it is for, in a few words."""
    source: str
    """Evidence that it helps: a link, or a page of docs/."""
    other_name: str = ""
    """Name of the option in other versions of XLA."""

    @property
    def text(self) -> str:
        """The option as it is written in XLA_FLAGS, where modes have shorter names."""
        in_words = not isinstance(self.value, bool) and not self.value.startswith(MODE)
        return (
            f"{self.name}={self.value if in_words else str(self.value).removeprefix(MODE).lower()}"
        )


CPU_OPTIONS = (
    CompilerOption(
        name="xla_cpu_enable_concurrency_optimized_scheduler",
        value=False,
        source="docs/decisions/0003-a-fast-step-on-a-cpu.md",
        why=(
            "virtual devices keep the cores busy anyway, and an order in which a device's"
            " operations overlap holds more buffers (83 instead of 71 MB)"
        ),
    ),
    CompilerOption(
        name="xla_cpu_copy_insertion_use_region_analysis",
        value=True,
        source="docs/decisions/0003-a-fast-step-on-a-cpu.md",
        why="new parameters are written over the old ones",
    ),
)
QUICK_COMPILATION = CompilerOption(
    name="xla_backend_optimization_level",
    value="2",
    source="docs/decisions/0003-a-fast-step-on-a-cpu.md",
    why="LLVM's level 3 compiles for longer, and float32 computes as fast and the same without it",
)
"""For programs on a CPU; steps in bf16 are a seventh slower with it."""


def without_user_flags(options: Iterable[CompilerOption]) -> tuple[CompilerOption, ...]:
    """The options that XLA_FLAGS does not name."""
    said = {flag.lstrip("-").partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return tuple(option for option in options if said.isdisjoint((option.name, option.other_name)))


def as_compiler_dict(options: Iterable[CompilerOption]) -> dict[str, bool | str]:
    """The options in the form that JAX's compiler takes."""
    return {option.name: option.value for option in options}


def compiler_options(mesh: Mesh) -> dict[str, bool | str]:
    """Options for JAX's compiler, for programs on a mesh that run once, or only copy."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return as_compiler_dict(without_user_flags((*CPU_OPTIONS, QUICK_COMPILATION) if on_cpu else ()))
