"""The controller in whole runs: decisions of a scripted advisor are carried out, kept or taken
back, and no step or state of the run is lost.
"""

import json
import math
from dataclasses import replace
from typing import ClassVar

import pytest
from helpers import ADAM_EPSILON, F32_RELATIVE
from shared_programs import own_programs, shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.request import make_config
from optimus_jax.control import assembly, constants
from optimus_jax.control.background import Worker
from optimus_jax.control.commands import CommandBroadcast
from optimus_jax.control.journal import switches
from optimus_jax.control.policy import CHOSEN, Alternative, Decision
from optimus_jax.control.runtime import Policy
from optimus_jax.mesh.build import discover
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.run import whole_run
from optimus_jax.training.watchers import Display

STEPS = 24
TINY = {
    "steps": STEPS,
    "global_batch": 8,
    "seq_len": 32,
    "lr": 1e-2,
    # Longer runs have the same program.
    "optimizer.warmup_steps": 2,
    "optimizer.decay_steps": STEPS,
    # Losses are compared between layouts after 24 steps: docs/decisions/0014.
    "optimizer.epsilon": ADAM_EPSILON,
    "eval_every": 0,
    "progress": "none",
    "controller.canary_steps": 2,
    "controller.probe_share": 0,
    "model.num_layers": 4,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
    "model.dropout": 0.1,
}
START, OTHER = "data=8", "pipe=2,data=2,tensor=2"
RATES = Rates(
    accelerator="cpu",
    source="made up",
    matmul_flops_per_s=5e10,
    f32_matmul_flops_per_s=5e10,
    memory_bytes_per_s=6e9,
    num_cores=0.0,
)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(
        "".join(
            f"{n} bottles of beer on the wall, take {n % 7} down and pass them around.\n"
            for n in range(300)
        )
    )
    return str(path)


def config_of(mesh: str) -> Config:
    return make_config("gpt2-nano", {**TINY, "mesh": mesh}, None)


def other_plan(mesh: str = OTHER):
    return plan_for(config_of(mesh), AxisSizes.parse(mesh), discover())


class Advisor(Policy):
    """Follows `script`: decisions by the step at whose boundary they are made."""

    script: ClassVar[dict[int, Decision]] = {}
    last_messages: ClassVar[list[str]] = []
    charged_s: ClassVar[list[float]] = []

    def __init__(self, **_):
        self.messages: list[str] = []
        type(self).last_messages = self.messages
        self.charged_s.clear()

    def decide(self, observation):
        return self.script.get(observation.step)

    def switched(self, plan, costs_s, made):
        assert all(time_s >= 0 for time_s in costs_s.values())
        self.messages.append(f"switched to {plan.axes}")

    def failed(self, plan, why, *, trial_s=None):
        self.messages.append(f"{plan.axes} failed: {why}")

    def charge(self, time_s):
        self.charged_s.append(time_s)

    def save(self):
        self.messages.append("saved")


class AtOnce:
    """Runs jobs in the foreground: these runs would end before a thread has compiled."""

    def __init__(self, name):
        pass

    def __call__(self, job):
        job()

    def finish(self):
        pass


class Later:
    """Runs its jobs only when told to."""

    jobs: ClassVar[list] = []

    def __init__(self, name):
        self.jobs.clear()

    def __call__(self, job):
        self.jobs.append(job)

    def finish(self):
        self.do()

    @classmethod
    def do(cls):
        while cls.jobs:
            cls.jobs.pop(0)()


def compile_later(monkeypatch):
    """Programs are compiled when told to, and training does not pause for them."""
    monkeypatch.setattr("optimus_jax.control.switch.Worker", Later)
    monkeypatch.setattr(constants, "MAX_COMPILE_PAUSE", 0.0)


def switch_at(step: int, plan, *, predicted_s: float = 1e3, at_step: int | None = None) -> Decision:
    alternative = Alternative(
        plan=plan,
        switch_method="remesh",
        step_time_s=predicted_s,
        gain_s=1.0,
        cost_s=0.1,
        probability=0.95,
        verdict=CHOSEN,
    )
    return Decision(
        step=step,
        action="switch",
        why="the script says so",
        plan=plan,
        switch_method="remesh",
        at_step=at_step,
        alternatives=(alternative,),
    )


@pytest.fixture
def devices(monkeypatch, tmp_path):
    """Devices with known rates and links."""
    cluster = Cluster.of(discover())
    here = LocalCluster(
        cluster=replace(
            cluster,
            intra_host=Link(name="memory", bytes_per_s=7e9, latency_s=1e-5, source="made up"),
        ),
        rates=RATES,
        records=tmp_path / "records.jsonl",
    )
    monkeypatch.setattr(whole_run, "known_devices", lambda _: here)
    monkeypatch.setattr(assembly, "measurements_directory", lambda: tmp_path)


@pytest.fixture
def scripted(monkeypatch, text, tmp_path, devices):
    """Runs a training run under a scripted advisor."""
    monkeypatch.setattr(assembly, "Advisor", Advisor)
    monkeypatch.setattr("optimus_jax.control.switch.Worker", AtOnce)

    def run(
        script: dict[int, Decision],
        name: str = "run",
        *,
        control: str = "auto",
        resume: bool = False,
        **more,
    ):
        monkeypatch.setattr(Advisor, "script", script)
        own = {} if resume else TINY | {"mesh": START, "data": text}
        return optimus_jax.train(
            None if resume else "gpt2-nano",
            run_dir=tmp_path / name,
            resume=resume,
            **own | {"control": control} | more,
        )

    return run


def events(result, *names):
    return [
        event
        for event in map(json.loads, (result.run_dir / "events.jsonl").read_text().splitlines())
        if event["event"] in names
    ]


def losses(result):
    assert [record.step for record in result.history] == list(range(1, len(result.history) + 1)), (
        "each step once, in order"
    )
    return [record.loss for record in result.history]


@pytest.fixture(scope="module")
def never_switched(text, tmp_path_factory):
    """Losses of a run that stays under its plan."""
    run_dir = tmp_path_factory.mktemp("runs") / "never"
    return losses(
        optimus_jax.train(
            "gpt2-nano", run_dir=run_dir, data=text, mesh=START, control="off", **TINY
        )
    )


def plans(result):
    return [record.plan for record in result.history]


@pytest.fixture
def lenient_canary(monkeypatch):
    """The canary keeps every plan: steps of this size are noise."""
    monkeypatch.setattr(constants, "CANARY_NOISE", 1e9)


def test_a_switch_continues_the_loss_curve(scripted, lenient_canary, never_switched):
    plan = other_plan()
    result = scripted({3: switch_at(3, plan)})
    assert result.plan == plan
    first, *_, last = plans(result)
    assert last == plan.digest
    assert losses(result) == pytest.approx(never_switched, rel=F32_RELATIVE)
    (remesh,) = events(result, "remesh")
    assert remesh["plan"] == plan.digest
    assert remesh["from_plan"] == first
    assert {"prepare", "move", "verify", "commit", "probe"} <= remesh["phases_s"].keys()
    assert plans(result).index(last) == remesh["step"], (
        "the first step under the new plan is the one after the switch"
    )
    assert (result.run_dir / "plan.json").read_text() == plan.to_json()
    assert [record.ending for record in switches(result.run_dir)] == ["kept"]
    assert Advisor.last_messages == ["switched to pipe=2,data=2,tensor=2", "saved"]
    (decision,) = events(result, "decision")
    assert decision["why"] == "the script says so"
    assert decision["layout"] == plan.describe()


def test_a_run_can_switch_away_and_back(scripted, lenient_canary):
    """Switching back needs no second compilation, and a plan may be entered twice."""
    there, back = other_plan(), other_plan(START)
    result = scripted({2: switch_at(2, there), 13: switch_at(13, back)}, steps=STEPS + 6)
    assert [event["layout"] for event in events(result, "remesh")] == [
        there.describe(),
        back.describe(),
    ]
    assert result.plan == back


def test_a_slower_plan_is_taken_back(scripted, never_switched, monkeypatch):
    plan = other_plan()
    monkeypatch.setattr(constants, "CANARY_NOISE", -1e9)  # any step counts as slow
    # and taking back costs nothing
    monkeypatch.setattr("optimus_jax.control.transitions.sum", lambda _: -1e9, raising=False)
    result = scripted({3: switch_at(3, plan)})
    assert result.plan.axes == AxisSizes.parse(START)
    assert losses(result) == pytest.approx(never_switched, rel=F32_RELATIVE)
    (rollback,) = events(result, "rollback")
    assert rollback["from_plan"] == plan.digest
    assert [record.ending for record in switches(result.run_dir)] == ["taken back"]
    assert any(
        message.startswith("pipe=2,data=2,tensor=2 failed") for message in Advisor.last_messages
    )
    assert len({*plans(result)}) == 2, "it had been under the other plan"


def test_control_advise_records_decisions_and_does_not_switch(scripted, monkeypatch):
    shown = []
    monkeypatch.setattr(Display, "decision", lambda self, text: shown.append(text))
    result = scripted({3: switch_at(3, other_plan())}, control="advise")
    assert shown == ["would switch: the script says so"]
    assert len({*plans(result)}) == 1
    assert [event["action"] for event in events(result, "decision")] == ["switch"]
    assert not events(result, "remesh")


def test_a_plan_that_cannot_be_prepared_is_not_entered(scripted):
    broken = replace(other_plan(), microbatches=3)
    result = scripted({3: switch_at(3, broken)})
    assert len({*plans(result)}) == 1
    assert "does not divide evenly" in events(result, "decision")[-1]["why"]
    assert any("could not be prepared" in message for message in Advisor.last_messages)


def test_a_withdrawn_switch_does_not_happen(scripted):
    result = scripted(
        {
            3: switch_at(3, other_plan(), at_step=STEPS - 4),
            6: Decision(step=6, action="stay", why="conditions are back"),
        }
    )
    assert not events(result, "remesh")


def test_a_switch_waits_for_its_step(scripted, lenient_canary):
    result = scripted({2: switch_at(2, other_plan(), at_step=STEPS - 6)})
    assert [event["step"] for event in events(result, "remesh")] == [STEPS - 6]


def test_a_switch_happens_at_its_step_without_a_broadcast_there(
    scripted, lenient_canary, monkeypatch
):
    """With several processes, not every step has a broadcast. The boundary itself has one."""
    monkeypatch.setattr(CommandBroadcast, "is_broadcast_due", lambda self, step: step % 5 == 0)
    plan = other_plan()
    result = scripted({3: switch_at(3, plan, at_step=7)})
    (remesh,) = events(result, "remesh")
    assert (remesh["step"], remesh["plan"]) == (7, plan.digest)


@pytest.mark.parametrize(
    ("puzzled_until", "expected"),
    [(0, 6 + constants.NUM_COMPARED_STEPS), (14, 14), (99, 6 + constants.MAX_READY_WAIT_STEPS)],
)
def test_a_slowly_compiled_switch_waits_until_step_times_are_steady(
    scripted, lenient_canary, monkeypatch, puzzled_until, expected
):
    """The plan is compiled by step 6; until then compilation may have changed step times."""

    class Watching(Advisor):
        def is_puzzled(self, since_s):
            return self.step < puzzled_until

        def decide(self, observation):
            self.step = observation.step
            if observation.step == 6:
                Later.do()
            return super().decide(observation)

    monkeypatch.setattr(assembly, "Advisor", Watching)
    compile_later(monkeypatch)
    # step times are never steady
    monkeypatch.setattr(constants, "STEADY_FACTOR", 1e-9)
    result = scripted({3: switch_at(3, other_plan())}, steps=STEPS + 8)
    assert [event["step"] for event in events(result, "remesh")] == [expected]


@pytest.mark.parametrize(
    ("is_puzzled", "expected"), [(False, 6), (True, 6 + constants.MAX_READY_WAIT_STEPS)]
)
def test_a_switch_happens_at_once_if_compilation_did_not_slow_steps(
    scripted, lenient_canary, monkeypatch, is_puzzled, expected
):
    class Watching(Advisor):
        def is_puzzled(self, since_s):
            return is_puzzled

        def decide(self, observation):
            if observation.step == 6:
                Later.do()
            return super().decide(observation)

    monkeypatch.setattr(assembly, "Advisor", Watching)
    compile_later(monkeypatch)
    monkeypatch.setattr(constants, "STEADY_FACTOR", math.inf)
    result = scripted({3: switch_at(3, other_plan())}, steps=STEPS + 8)
    assert [event["step"] for event in events(result, "remesh")] == [expected]


@pytest.mark.usefixtures("own_programs")
def test_training_pauses_until_a_plan_is_compiled_on_the_cores_of_its_devices(
    scripted, lenient_canary, monkeypatch
):
    """Else these few short steps would be over before. The pause is a cost of the switch."""
    monkeypatch.setattr("optimus_jax.control.switch.Worker", Worker)
    monkeypatch.setattr(constants, "STEADY_FACTOR", 1e-9)
    monkeypatch.setattr(constants, "MAX_COMPILE_PAUSE", 1e3)  # beside other work it takes longer
    result = scripted({3: switch_at(3, other_plan())}, steps=STEPS + 2)
    [event] = events(result, "remesh")
    assert event["step"] == 4 + constants.NUM_COMPARED_STEPS
    assert event["compile_tax_s"] > 0.5 * event["phases_s"]["prepare"] > 0


def test_a_resumed_run_continues_under_its_new_plan(scripted, lenient_canary):
    plan = other_plan()
    result = scripted({3: switch_at(3, plan)})
    resumed = scripted({}, resume=True, steps=STEPS + 2)
    assert resumed.plan == plan == result.plan
    [record] = switches(result.run_dir)
    assert {"move_s", "compile_tax_s", "first_steps_s"} <= record.costs_s.keys()
    assert Advisor.charged_s == [], "a plan that was kept counts as paid for"
    assert len(resumed.history) == STEPS + 2


@pytest.mark.usefixtures("own_programs")  # what compiling costs is part of the decision
def test_the_real_advisor_explains_its_decision(devices, text, tmp_path):
    """A switch that costs seconds does not pay in a run this short, and the decision records that
    with all its inputs.
    """
    # Traces the layers that the search asks for, so that its answer comes within these steps.
    optimus_jax.find_plans("gpt2-nano", "h100:8", seq_len=32, global_batch=8, precision="f32")
    result = optimus_jax.train(
        "gpt2-nano",
        run_dir=tmp_path / "run",
        data=text,
        mesh=START,
        control="auto",
        **TINY | {"steps": 40},
    )
    first, *_ = events(result, "decision")
    assert first["action"] == "stay"
    # Which depends on how steady real steps are, on a machine that may have other work.
    assert first["trigger"]
    assert first["inputs"]["step_time_s"] > 0
    assert first["inputs"]["steps_left"] == 40 - first["step"]
    assert first["inputs"]["document_lengths"]
    assert "device memory" in first["inputs"]["not_measured"]
    assert any(f"--mesh {START} " not in each["flags"] for each in first["alternatives"]), (
        "the run may leave its mesh"
    )
    assert not events(result, "remesh", "rollback")


def test_an_error_in_the_advisor_stops_the_controller_and_not_the_run(scripted, monkeypatch):
    def decide(self, observation):
        if observation.step == 5:
            raise ZeroDivisionError("no steps")
        assert observation.step < 5, "it is not asked again"

    monkeypatch.setattr(Advisor, "decide", decide)
    result = scripted({})
    assert len(result.history) == STEPS
    (failure,) = [event for event in events(result, "decision") if "has failed" in event["why"]]
    assert failure["step"] == 5
    assert "ZeroDivisionError: no steps" in failure["traceback"]


def test_the_advisor_is_told_all_costs_of_a_switch(scripted, lenient_canary, monkeypatch):
    reported, charged = [], []
    monkeypatch.setattr(
        Advisor, "switched", lambda self, plan, costs_s, made: reported.append(dict(costs_s))
    )
    monkeypatch.setattr(Advisor, "charge", lambda self, time_s: charged.append(time_s))
    compile_later(monkeypatch)
    decide = Advisor.decide
    monkeypatch.setattr(
        Advisor,
        "decide",
        lambda self, observation: (
            Later.do() if observation.step == 9 else None,
            decide(self, observation),
        )[1],
    )
    result = scripted({3: switch_at(3, other_plan())})
    (costs_s,) = reported
    (remesh,) = events(result, "remesh")
    assert costs_s.keys() == {
        "agree_s",
        "probe_s",
        "move_s",
        "verify_s",
        "commit_s",
        "settle_s",
        "compile_tax_s",
    }
    assert remesh["compile_tax_s"] == costs_s.pop("compile_tax_s")
    assert remesh["step_delay_s"] == pytest.approx(sum(costs_s.values()))
    assert remesh["phases_s"]["settle"] == costs_s["settle_s"]
    steps = {record.step: record.step_time_s for record in result.history}
    beside = [steps[step] for step in range(4, 9)]
    assert remesh["compile_tax_s"] <= sum(beside), "what steps took longer beside the compilation"
    first = steps[remesh["step"] + 1]
    assert len(charged) == 1, "the first step under the plan"
    assert 0 <= charged[0] <= first


def test_a_withdrawn_switch_is_charged_to_the_budget(scripted, monkeypatch):
    charged = []
    monkeypatch.setattr(Advisor, "charge", lambda self, time_s: charged.append(time_s))
    compile_later(monkeypatch)
    result = scripted(
        {3: switch_at(3, other_plan()), 8: Decision(step=8, action="stay", why="changed its mind")}
    )
    assert events(result, "remesh") == []
    assert len(charged) == 1
    assert charged[0] >= 0
