"""Which values of JAX's own settings are compatible with a run.

They come from the environment (JAX_ENABLE_X64=1) or from `jax.config`, hold for a whole program,
and some of them change what is computed. Each setting is one of these:
* *refused*: another value breaks what a run guarantees, such as that no result depends on the mesh;
* *reported*: the user chooses. It changes rounding in the same way under every plan, and is shown
  at the start;
* *set here*: it has no effect, because this package passes its own value where it would be used;
* *harmless*: no result depends on it, or it concerns the launch of processes
  (cluster/launch_detection.py, cluster/distributed.py).

No setting is changed silently, because a program that trains may do other things with JAX. The
lists are for jax 0.10.2; a test checks that every setting in `jax.config.values` is in one.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.command import typed_command


@dataclass(frozen=True)
class Refused:
    """The required values of a setting, and why."""

    needed: tuple[object, ...]
    """Values that work for a run; the first is JAX's default."""
    why: str
    """What another value does to a run."""


_DRAWS = "the same seed would draw other weights and dropout masks on another mesh"
_ENDED = "a step that is not finite is skipped and counted, where JAX would end the run instead"
_NOTHING = "nothing would be computed"
_NOT_THERE = (
    "devices that do not exist compute nothing; plan for them with"
    f" {typed_command('plan')} --cluster"
)
_NOT_OURS = (
    "it is JAX's own work in progress or a check that refuses what this step does, and steps fail"
    " with it"
)
_ONE_PROGRAM = (
    "the step is one compiled program with collectives inside, which cannot run operation by"
    " operation"
)

REFUSED: Mapping[str, Refused] = {
    "jax_enable_x64": Refused(
        (False,), "counters, positions and draws are 32 bits wide, and some would be 64"
    ),
    "jax_threefry_partitionable": Refused((True,), _DRAWS),
    "jax_debug_nans": Refused((False,), _ENDED),
    "jax_debug_infs": Refused((False,), _ENDED),
    "jax_disable_jit": Refused((False,), _ONE_PROGRAM),
    "jax_no_execution": Refused((False,), _NOTHING),
    "jax_no_tracing": Refused((False,), _NOTHING),
    "jax_mock_gpu_topology": Refused(("", None), _NOT_THERE),
    "mock_num_gpu_processes": Refused((0,), _NOT_THERE),
    "jax_auto_pcast": Refused((True,), _NOT_OURS),
    "jax_remat3": Refused((False,), _NOT_OURS),
    "jax_scan3": Refused((False,), _NOT_OURS),
    "jax_custom_vjp3": Refused((False,), _NOT_OURS),
    "jax_debug_key_reuse": Refused((False,), _NOT_OURS),
    "eager_constant_folding": Refused((False,), _NOT_OURS),
    "jax_error_checking_behavior_divide": Refused(("ignore",), _NOT_OURS),
    "jax_error_checking_behavior_nan": Refused(("ignore",), _NOT_OURS),
    "jax_error_checking_behavior_oob": Refused(("ignore",), _NOT_OURS),
    **dict.fromkeys(
        (
            "jax_transfer_guard",
            "jax_transfer_guard_host_to_device",
            "jax_transfer_guard_device_to_device",
            "jax_transfer_guard_device_to_host",
        ),
        Refused(
            (None, "allow", "log", "log_explicit"),
            "batches go to the devices and losses come back, which is refused then",
        ),
    ),
}

FLOAT32_PRODUCTS = "jax_default_matmul_precision"
PRECISIONS = (None, "default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
"""Allowed precisions of products of float32 matrices. JAX's other values name an algorithm for
operands of any format, including f16 and bf16."""

REPORTED: Mapping[str, str] = {
    FLOAT32_PRODUCTS: "how exactly float32 matrices are multiplied, under every plan alike"
}
"""Reported settings -> what they change."""

SET_HERE: Mapping[str, str] = {
    "jax_default_prng_impl": "keys name their generator (models/keys.py)",
    "jax_random_seed_offset": "keys are made without it (models/keys.py)",
    "jax_enable_custom_prng": "keys are typed in any case (models/keys.py)",
    "jax_legacy_prng_key": "keys are typed in any case (models/keys.py)",
    "jax_high_dynamic_range_gumbel": "sampling names its mode (inference/sampling.py)",
}
"""Settings without effect here -> what is done instead."""

HARMLESS: Mapping[str, tuple[str, ...]] = {
    "device selection and process setup": (
        "jax_backend_target",
        "jax_check_proxy_envs",
        "jax_cpu_collectives_implementation",
        "jax_cpu_get_global_topology_timeout_minutes",
        "jax_cpu_get_local_topology_timeout_minutes",
        "jax_cross_host_transfer_socket_address",
        "jax_cross_host_transfer_timeout_seconds",
        "jax_cross_host_transfer_transfer_size",
        "jax_cross_host_transport_addresses",
        "jax_cuda_visible_devices",
        "jax_distributed_debug",
        "jax_enable_preemption_service",
        "jax_enable_recoverability",
        "jax_force_dcn_cross_host_transfers",
        "jax_num_cpu_devices",
        "jax_oneapi_visible_devices",
        "jax_pjrt_client_create_options",
        "jax_platform_name",
        "jax_platforms",
        "jax_rocm_visible_devices",
        "jax_share_binary_between_hosts",
        "jax_share_binary_between_hosts_timeout_ms",
        "jax_xla_backend",
    ),
    "device order: meshes set their own, and arrays are put onto them": (
        "jax_default_device",
        "jax_sort_devices_by_process_index",
        "jax_cpu_enable_async_dispatch",
    ),
    "strictness checks that the code passes": (
        "jax_numpy_dtype_promotion",
        "jax_numpy_rank_promotion",
        "jax_explicit_x64_dtypes",
        "jax_check_static_indices",
        "jax_disallow_mesh_context_manager",
        "jax_mutable_array_checks",
        "jax_disable_bwd_checks",
        "jax_disable_vmap_shmap_error",
        "jax_enable_checks",
        "jax_check_tracer_leaks",
        "jax_allow_f16_reductions",
        "check_vma",
        "jax_thread_guard",
        "jax_array_garbage_collection_guard",
        "jax_debug_leaked_clients_on_clear_backends",
    ),
    "alternative tracing with equal results": (
        "jax_embedded_constants_max_bytes",
        "jax_ragged_dot_use_ragged_dot_instruction",
        "jax_refs_to_pins",
        "jax_remove_size_one_mesh_axis_from_type",
        "jax_softmax_custom_jvp",
        "jax_use_direct_linearize",
        "jax_use_shardy_partitioner",
        "jax_use_simplified_jaxpr_constants",
        "jax_remove_custom_partitioning_ptr_from_cache_key",
    ),
    "compile effort and memory limits; may change only the order of additions": (
        "jax_compiler_enable_remat_pass",
        "jax_disable_most_optimizations",
        "jax_enable_pgle",
        "jax_exec_time_optimization_effort",
        "jax_memory_fitting_effort",
        "jax_memory_fitting_level",
        "jax_optimization_level",
        "jax_pgle_aggregation_percentile",
        "jax_pgle_profiling_runs",
        "jax_threefry_gpu_kernel_lowering",
        "jax_xla_profile_version",
    ),
    "the cache of compiled programs (devices/cpu.py decides where it is used)": (
        "jax_compilation_cache_check_contents",
        "jax_compilation_cache_dir",
        "jax_compilation_cache_expect_pgle",
        "jax_compilation_cache_include_metadata_in_key",
        "jax_compilation_cache_max_size",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_enable_xla_caches",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
        "jax_raise_persistent_cache_errors",
    ),
    "logging": (
        "jax_captured_constants_report_frames",
        "jax_captured_constants_warn_bytes",
        "jax_compiler_detailed_logging_min_ops",
        "jax_debug_log_modules",
        "jax_dump_ir_modes",
        "jax_dump_ir_to",
        "jax_explain_cache_misses",
        "jax_hlo_source_file_canonicalization_regex",
        "jax_include_debug_info_in_dumps",
        "jax_include_full_tracebacks_in_locations",
        "jax_log_checkpoint_residuals",
        "jax_log_compiles",
        "jax_logging_level",
        "jax_pprint_use_color",
        "jax_send_traceback_to_runtime",
        "jax_source_url_schema",
        "jax_traceback_filtering",
        "jax_traceback_in_locations_limit",
        "jax_tracer_error_num_traceback_frames",
    ),
    "unused parts of JAX": (
        "jax2tf_associative_scan_reductions",
        "jax2tf_default_native_serialization",
        "jax_bcoo_cusparse_lowering",
        "jax_experimental_unsafe_xla_runtime_errors",
        "jax_export_calling_convention_version",
        "jax_export_ignore_forward_compatibility",
        "jax_mosaic_allow_hlo",
        "jax_pallas_enable_debug_checks",
        "jax_pallas_poison_buffers",
        "jax_pallas_use_mosaic_gpu",
        "jax_pallas_verbose_errors",
        "jax_ragged_dot_use_gpu_pallas_triton_lowering",
        "jax_serialization_version",
        "jax_use_emit_pipeline_primitive",
        "jax_use_magma",
    ),
}
"""Reason why no result depends on a setting -> settings."""

_NO_LONGER_SEEN = (
    "XLA would then assume that there are no NaNs (or infinities), and steps that are not finite"
    " would not be skipped"
)
NEEDED_FLAGS: Mapping[str, str] = {
    "xla_cpu_fast_math_honor_nans": _NO_LONGER_SEEN,
    "xla_cpu_fast_math_honor_infs": _NO_LONGER_SEEN,
}
"""Options of XLA that must not be switched off in XLA_FLAGS -> what that would do."""


def check_jax_settings() -> list[str]:
    """Lines about JAX's settings to show at the start of a run; usually none.

    Raises:
      ConfigError: a setting has a value that breaks what a run guarantees.
    """
    values = jax.config.values
    for name, refused in REFUSED.items():
        if name in values and values[name] not in refused.needed:
            raise _refusal(
                name,
                values[name],
                f"jax.config.update({name!r}, {refused.needed[0]!r})",
                refused.why,
            )
    precision = values[FLOAT32_PRODUCTS]
    if precision not in PRECISIONS:
        raise _refusal(
            FLOAT32_PRODUCTS,
            precision,
            f"jax.config.update({FLOAT32_PRODUCTS!r}, one of"
            f" {', '.join(filter(None, PRECISIONS))})",
            "it is the algorithm of every product, whatever precision.compute says",
        )
    for flag in _xla_flags():
        name, _, value = flag.lstrip("-").partition("=")
        if name in NEEDED_FLAGS and value.lower() in ("false", "0"):
            raise ConfigError(
                explain(
                    f"a run cannot use this option of XLA: {NEEDED_FLAGS[name]}",
                    given=f"{flag} in XLA_FLAGS",
                    do=f"take {name} out of XLA_FLAGS",
                )
            )
    return [
        f"{name}={values[name]}: {what}"
        for name, what in REPORTED.items()
        if values[name] not in (None, "default")
    ]


def _xla_flags() -> list[str]:
    """The options in XLA_FLAGS, or in the file that it names."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        with suppress(OSError, UnicodeDecodeError):  # XLA itself reports that it cannot read it
            text = Path(text).read_text()
    return text.split()


def _refusal(name: str, value: object, do: str, why: str) -> ConfigError:
    variable = name.upper()
    said, unset = (
        (f"{variable}={os.environ[variable]} in the environment, ", f"unset {variable}, or ")
        if variable in os.environ
        else ("", "")
    )
    return ConfigError(
        explain(
            f"a run cannot use this setting of JAX: {why}",
            given=f"{said}{name}={value!r} in jax.config",
            do=f"{unset}call {do} before",
        )
    )
