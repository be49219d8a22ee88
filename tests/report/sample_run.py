"""A run directory with invented numbers, written by the code that writes real ones: plan trials, a
decision to stay, a re-mesh, a rollback, a fault.
"""

import dataclasses
from pathlib import Path

from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes
from optimus_jax.plan import Plan
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.step_record import StepRecord

LAST_WHY = "staying: data=8 would gain 3% & needs <b>5%</b>"
"""Reason of the last decision; what looks like markup has to be shown as text."""
PLAN = Plan(
    axes=AxisSizes(pipe=1, data=2, fsdp=4, tensor=1),
    rules=(("batch", ("data", "fsdp")), ("embed", ("fsdp",))),
    zero=3,
    microbatches=1,
    pipeline=None,
    remat="full",
    precision="f32",
    attention="xla",
    loss_chunk_tokens=128,
)
FIRST, SECOND = PLAN.digest, "second000000"
PHASES = {
    "prepare": 4.2,
    "agree": 0.05,
    "move": 0.31,
    "verify": 0.12,
    "commit": 0.004,
}


def step(number: int, plan: str = FIRST, **values) -> StepRecord:
    some = StepRecord(
        step=number,
        loss=5.0 - number / 50,
        grad_norm=1.0,
        lr=1e-3,
        tokens=4096,
        step_time_s=0.2 + 0.01 * (number % 3),
        tokens_per_s=2e4,
        mfu=None,
        plan=plan,
        peak_bytes=None,
    )
    return dataclasses.replace(some, **values)


def alternatives() -> list[dict]:
    return [
        {
            "layout": "mesh data=8, zero 0",
            "predicted_step_time_s": 0.1,
            "gain_s": 12.0,
            "cost_s": 1.5,
            "probability": 0.97,
            "why": "chosen",
        },
        {
            "layout": "mesh tensor=8, zero 0",
            "predicted_step_time_s": 0.4,
            "gain_s": None,
            "cost_s": 1.5,
            "probability": 0.01,
            "why": "slower",
        },
    ]


def write_run(path: Path) -> RunDirectory:
    """Write sixty steps; the directory is left open, as by a run that is still going."""
    run = RunDirectory.create(path, "gpt2-nano")
    run.log_event(
        "decision",
        0,
        plan=FIRST,
        layout=PLAN.describe(),
        predicted_step_time_s=0.18,
        measured_step_time_s=0.21,
    )
    run.log_event(
        "decision",
        0,
        plan="tried0000000",
        layout="mesh tensor=8, zero 0",
        predicted_step_time_s=0.3,
        measured_step_time_s=0.45,
    )
    run.write_config(Config(steps=80).to_json(derived={"data.seq_len": 256}))
    run.write_plan(PLAN.to_json())
    run.log_event("start", 0, devices="8 x cpu (cpu)", data="stdlib: many tokens")
    run.log_event("plan", 0, digest=FIRST, why="auto: the fastest of 2 tried")
    run.log_event("compile", 0, compile_time_s=5.5, step_bytes_per_device=70 * 2**20)
    for number in range(1, 31):
        run.log_step(step(number))
    run.log_event(
        "eval",
        20,
        loss=4.7,
        perplexity=110.0,
        bits_per_byte=None,
        tokens=1000,
        metrics={"accuracy": 0.21},
    )
    run.log_event(
        "decision",
        24,
        action="switch",
        why="data=8 saves half of every step",
        switch_method="remesh",
        plan=SECOND,
        layout="mesh data=8, zero 0",
        current_layout=PLAN.describe(),
        inputs={
            "step_time_s": {"value": 0.21, "spread": 0.01, "count": 20, "quality": "good"},
            "mfu": None,
            "remaining_steps": 56,
        },
        alternatives=alternatives(),
    )
    run.log_event(
        "remesh",
        30,
        plan=SECOND,
        layout="mesh data=8, zero 0",
        from_plan=FIRST,
        switch_method="remesh",
        phases_s=PHASES,
        bytes_moved=12 * 2**20,
        step_delay_s=0.48,
    )
    for number in range(31, 51):
        run.log_step(
            step(
                number,
                SECOND,
                step_time_s=0.11,
                skipped=number == 40,
                loss=float("nan") if number == 40 else 4.0,
            )
        )
    run.log_event(
        "rollback",
        50,
        plan=FIRST,
        from_plan=SECOND,
        why="the canary was slower than promised",
        phases_s={"move": 0.3, "verify": None},
    )
    run.log_event("checkpoint", 50, blocked_s=0.02)
    for number in range(51, 61):
        run.log_step(step(number))
    run.log_event("fault", 55, device=3, what="lost")
    run.log_event(
        "decision",
        58,
        action="stay",
        why=LAST_WHY,
        switch_method=None,
        plan=None,
        layout=None,
        current_layout=PLAN.describe(),
        inputs={
            "link_slowdown/intra_host": {
                "value": None,
                "spread": None,
                "count": 0,
                "quality": "unknown",
            }
        },
        trigger="the loss",
        step_time_s=0.22,
        alternatives=[
            {
                "plan": SECOND,
                "flags": "--mesh data=8",
                "switch_method": "remesh",
                "step_time_s": 0.213,
                "gain_s": 0.2,
                "cost_s": 1.5,
                "probability": 0.01,
                "verdict": "saves 3% of a step",
            }
        ],
    )
    return run
