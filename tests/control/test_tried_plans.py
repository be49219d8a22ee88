"""What plans took that were tried before a run is evidence in it, and teaches later runs."""

from dataclasses import replace

from small_runs import Scripted, quick, run_tiny, slow_devices, text  # noqa: F401

from optimus_jax.control import assembly
from optimus_jax.planning.trials.measure import measure
from optimus_jax.planning.trials.trial import Trial
from optimus_jax.run import first_plan


def test_the_controller_is_told_what_was_tried(slow_devices, text, tmp_path, monkeypatch):  # noqa: F811
    given, tried = {}, {}

    class Listening(Scripted):
        def __init__(self, **more):
            super().__init__()
            given.update(more)

    def trial(config, plan, **_):
        tried[plan] = 1.0 / (1 + len(tried))
        return Trial(
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
        (assembly, "Advisor", Listening),
        (first_plan, "run_trial", trial),
        (first_plan, "measure", measured),
    ):
        monkeypatch.setattr(module, name, value)
    result = run_tiny(tmp_path / "run", text, mesh="auto", control="advise", steps=2)
    assert len(tried) == 3
    assert given["tried_s"] == tried
    assert result.plan == given["plan"] == list(tried)[-1]
    # Not twice: as records they teach only runs that begin later.
    assert given["pricing"].calibration.terms == ()
    assert replace(slow_devices).calibration.terms
