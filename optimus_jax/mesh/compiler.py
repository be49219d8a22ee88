"""XLA's options by platform: one place, each with its reason."""

COMPILER_OPTIONS: dict[str, dict[str, bool]] = {
    # Virtual devices already keep the cores busy: an order that lets one device's operations overlap
    # only holds more buffers at once (83 instead of 71 MB per device, docs/decisions/0003).
    "cpu": {"xla_cpu_enable_concurrency_optimized_scheduler": False,
            "xla_cpu_copy_insertion_use_region_analysis": True},
}


def compiler_options(platform: str) -> dict[str, bool]:
    """Options to compile with for devices of `platform`."""
    return COMPILER_OPTIONS.get(platform, {})
