"""Step times of plans tried before a run are passed to the controller, and recorded for
later runs.
"""

import gc
import weakref
from dataclasses import replace

import jax.monitoring
from jax._src import monitoring
from small_runs import Scripted, quick, run_tiny, slow_devices, text  # noqa: F401

from optimus_jax.control import assembly
from optimus_jax.planning.trials import trial as trial_module
from optimus_jax.planning.trials.measure import measure
from optimus_jax.planning.trials.trial import PlanTrial, run_trial
from optimus_jax.run import first_plan, program, whole_run
from optimus_jax.training.step import build_program


def test_the_controller_gets_step_times_of_tried_plans(slow_devices, text, tmp_path, monkeypatch):  # noqa: F811
    advisor_arguments, tried = {}, {}

    class RecordingAdvisor(Scripted):
        def __init__(self, **more):
            super().__init__()
            advisor_arguments.update(more)

    def trial(config, plan, **_):
        tried[plan] = 1.0 / (1 + len(tried))
        return PlanTrial(
            plan=plan,
            step_time_s=tried[plan],
            shortest_s=tried[plan],
            cpu_s=1.0,
            compile_s=1.0,
            step_bytes=1,
        )

    def measured(ranked, run, *, num_steps, **more):
        return measure(ranked, run, num_steps=10**9, **more)

    for module, name, value in (
        (assembly, "Advisor", RecordingAdvisor),
        (first_plan, "run_trial", trial),
        (first_plan, "measure", measured),
    ):
        monkeypatch.setattr(module, name, value)
    result = run_tiny(tmp_path / "run", text, mesh="auto", control="advise", steps=2)
    assert len(tried) == 3
    assert advisor_arguments["tried_s"] == tried
    assert result.plan == advisor_arguments["plan"] == list(tried)[-1]
    # They do not count twice: the records affect only runs that begin later.
    assert advisor_arguments["pricing"].calibration.terms == ()
    assert replace(slow_devices).calibration.terms


def test_a_tried_plan_is_compiled_once(slow_devices, text, tmp_path, monkeypatch):  # noqa: F811
    compiled, tried, steps, in_memory = [], [], [], []

    def count(event, duration, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration" and "train" in str(fun_name):
            compiled.append(fun_name)

    def steps_in_memory():
        gc.collect()
        found = [each() for each in steps]
        return [each.program.plan for each in found if each is not None]

    def trial(*args, **more):
        in_memory.append(steps_in_memory())
        found = run_trial(*args, **more)
        steps.append(weakref.ref(found.step))
        # the second is the fastest
        tried.append(replace(found, step=None, step_time_s=(2.0, 1.0, 3.0)[len(tried)]))
        return replace(tried[-1], step=found.step)

    def begin(*args, **more):
        """Begin the run, after all trials."""
        in_memory.append(steps_in_memory())
        return program.run_program(*args, **more)

    def measured(ranked, run, *, num_steps, **more):
        return measure(ranked, run, num_steps=10**9, **more)

    # `quick` shares programs and their compiled steps.
    for module in (whole_run, program, trial_module):
        monkeypatch.setattr(module, "build_program", build_program)
    monkeypatch.setattr(first_plan, "run_trial", trial)
    monkeypatch.setattr(first_plan, "measure", measured)
    monkeypatch.setattr(whole_run, "run_program", begin)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        result = run_tiny(tmp_path / "run", text, mesh="auto", steps=2, **{"parallel.trials": 3})
    finally:
        monitoring.unregister_event_duration_listener(count)
    first, second, third = (trial.plan for trial in tried)
    assert len({first, second, third}) == 3
    assert result.plan == second
    assert len(compiled) == 3, "the run uses the step of the trial"
    assert in_memory == [[], [first], [second], [second]], "slower ones are freed"
