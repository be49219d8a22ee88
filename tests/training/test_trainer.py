"""What the loop does at step boundaries, on a clock that only steps and evaluations move."""

import math
import os
import signal
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from optimus_jax.checkpoint.saving import PAUSES_S, Retries
from optimus_jax.config import Config
from optimus_jax.errors import CheckpointError, LearningError
from optimus_jax.faults.stopping import StopRequest
from optimus_jax.training import evaluation
from optimus_jax.training import trainer as trainer_module
from optimus_jax.training.step import EvalSums
from optimus_jax.training.trainer import Trainer
from optimus_jax.training.watchers import Display

STEP_S, EVALUATION_S, SAVE_S, LOAD_S, PROBE_S = 2.0, 100.0, 1000.0, 0.25, 10.0


class Clock:
    now = 50.0

    def perf_counter(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


class Scalar(float):
    """A metric that is known as soon as its step was dispatched, or later."""

    is_ready = staticmethod(lambda: True)


def held_out(sums):
    """What an evaluation gives, of its loss and tokens."""
    return None if sums is None else evaluation.HeldOutResult(*sums, metrics={}, rates={})


class Signals:
    """Wants a probe after the fourth step."""

    def __init__(self, clock):
        self.clock, self.reported = clock, []

    def dispatched(self, *, dispatch_s, batch):
        self.reported.append((dispatch_s, batch))

    def step(self, record):
        self.reported.append(record.step)

    def evaluation(self, record):
        pass

    def pauses_for(self, step):
        return "probe" if step == 4 else None

    @property
    def is_on_trial(self):
        return False

    def leaves(self, step):
        return False

    def pause(self, step):
        self.reported.append("probe")
        self.clock.wait(PROBE_S)


class FakeCheckpoints:
    """Fake checkpoints that only record their steps; saves of `failing` steps fail in the
    background, which is known once they have ended.
    """

    def __init__(self, clock, failing=()):
        self.clock, self.failing, self.done, self.under_way, self.tried = (
            clock,
            set(failing),
            [],
            None,
            [],
        )

    def save(self, step, state, metadata):
        self.wait()
        self.clock.wait(SAVE_S)
        self.under_way = step
        self.tried.append(step)

    def wait(self):
        step, self.under_way = self.under_way, None
        if step in self.failing:
            raise CheckpointError(f"saving the checkpoint of step {step} failed")
        if step is not None:
            self.done.append(step)

    @property
    def has_ended(self):
        return self.under_way is not None

    def holds(self, step):
        return step == self.under_way or step in self.done[-1:]

    def steps(self):
        return sorted(self.done)


class Loop:
    """A Trainer whose steps take STEP_S and do nothing."""

    def __init__(
        self,
        monkeypatch,
        *,
        steps=6,
        several_processes=False,
        evaluate=None,
        overseer=None,
        failing=(),
        during=lambda step: None,
        loss=lambda step: 1.0,
        stop=None,
        step_s=STEP_S,
        device_s=0.0,
        **settings,
    ):
        self.clock, self.records, self.events, self.reported = Clock(), [], [], []
        clock = self.clock
        config = Config().with_values(
            {"steps": steps, "eval_every": 2, "checkpoint.every": 3, **settings}
        )
        self.begun, self.state = [], SimpleNamespace(step=jnp.int32(0))

        def train_step(state, batch):
            self.begun.append(len(self.begun) + 1)
            during(len(self.begun))
            clock.wait(step_s)
            value, end_s = Scalar(loss(len(self.begun))), clock.now + device_s
            value.is_ready = lambda: clock.now >= end_s
            names = "loss", "grad_norm", "lr", "tokens", "loss_scale", "accuracy"
            metrics = dict.fromkeys(names, Scalar(1))
            return state, metrics | {"loss": value, "skipped": not math.isfinite(value)}

        class Agreement:
            def __init__(self, mesh):
                pass

            def __call__(self, *numbers):
                return numbers

        monkeypatch.setattr(trainer_module, "time", clock)
        monkeypatch.setattr(trainer_module, "Agreement", Agreement)
        monkeypatch.setattr(trainer_module, "to_stored", lambda state, *_: state)
        monkeypatch.setattr(trainer_module, "peak_learning_rate", lambda *_: 0.3)
        if evaluate is not None:
            monkeypatch.setattr(
                trainer_module,
                "held_out_sums",
                lambda program, state, *_, **__: held_out(evaluate(program, state)),
            )

        def batches(first):
            for step in range(first, 100):
                clock.wait(LOAD_S)
                yield step, f"batch {step}"

        run = SimpleNamespace(
            failure=None,
            log_step=self.records.append,
            log_event=lambda event, step, **fields: self.events.append((event, step, fields)),
            check=lambda: None,
            restore_files=lambda: None,
        )
        plan = SimpleNamespace(
            precision="f32",
            digest="",
            to_json=str,
            num_devices=2,
            batch_ways=lambda: 2,
            pipeline=None,
        )
        display = Display()
        display.message = self.reported.append
        self.checkpoints = FakeCheckpoints(clock, failing)
        self.trainer = Trainer(
            program=SimpleNamespace(
                config=config,
                plan=plan,
                mesh=SimpleNamespace(local_devices=[]),
                put_batch=lambda batch, *_: batch,
                shapes=SimpleNamespace(num_params=1),
                state_shardings=None,
            ),
            train_step=train_step,
            topology=SimpleNamespace(
                num_processes=2 if several_processes else 1,
                num_devices=2,
                dense_peak_flops=lambda _: None,
            ),
            loader=SimpleNamespace(iterate=batches),
            held_out=evaluation.HeldOut(batches=list),
            bits_per_token=False,
            metadata={},
            checkpoints=self.checkpoints,
            run=run,
            display=display,
            stop=stop or StopRequest(),
            overseer=overseer and overseer(clock),
            retries=Retries(
                self.reported.append,
                is_alone=not several_processes,
                clock=clock.perf_counter,
                sleep=clock.wait,
            ),
        )

    def train(self):
        return self.trainer.train(self.state)

    def named(self, name):
        return [(step, fields) for event, step, fields in self.events if event == name]


@pytest.mark.parametrize("several_processes", [True, False])
def test_step_time_excludes_evaluations_and_saves(monkeypatch, several_processes):
    """Among several processes on a CPU a step is finished when it has been dispatched, and its
    numbers are read a step later.
    """

    def evaluate(trainer, state):
        loop.clock.wait(EVALUATION_S)
        return 1.0, 1

    loop = Loop(
        monkeypatch, several_processes=several_processes, evaluate=evaluate, overseer=Signals
    )
    assert loop.train().reason == "done"
    reported = loop.trainer.overseer.reported
    assert [record.step_time_s for record in loop.records] == [LOAD_S + STEP_S] * 6
    assert [item for item in reported if isinstance(item, tuple)] == [
        (STEP_S, f"batch {step}") for step in range(1, 7)
    ]
    assert [record.data_wait_s for record in loop.records] == [LOAD_S] * 6
    assert [item for item in reported if not isinstance(item, tuple)] == [
        1,
        2,
        3,
        4,
        "probe",
        5,
        6,
    ], "a probe runs when its step is known to be done"


@pytest.mark.parametrize("several_processes", [True, False])
@pytest.mark.parametrize("device_s", [0.5 * LOAD_S, 1.5 * LOAD_S])
def test_devices_that_still_work_when_a_batch_comes_have_not_waited(
    monkeypatch, several_processes, device_s
):
    loop = Loop(
        monkeypatch,
        steps=4,
        several_processes=several_processes,
        step_s=0.01,
        evaluate=lambda *_: (1.0, 1),
        device_s=device_s,
        eval_every=0,
        **{"checkpoint.every": 0},
    )

    def device_get(found):
        while not found[0]["loss"].is_ready():
            loop.clock.wait(0.01)
        return found

    monkeypatch.setattr(trainer_module.jax, "device_get", device_get)
    loop.train()
    waits_s = [record.data_wait_s for record in loop.records]
    assert waits_s[1:3] == pytest.approx([LOAD_S if device_s < LOAD_S else 0.0] * 2)


@pytest.mark.parametrize("several_processes", [True, False])
def test_a_wait_counts_once(monkeypatch, several_processes):
    loop = Loop(monkeypatch, several_processes=several_processes, evaluate=lambda *_: (1.0, 1))
    batches = loop.trainer.loader.iterate

    def late(first):
        for step, batch in batches(first):
            if step == 5:
                loop.clock.wait(7.0)
            yield step, batch

    loop.trainer.loader.iterate = late
    loop.train()
    waits_s = [record.data_wait_s for record in loop.records]
    assert sum(waits_s) == pytest.approx(7.0 + 6 * LOAD_S)
    assert sorted(waits_s)[-2] == pytest.approx(LOAD_S)


def stopped(monkeypatch, capfd, number, *, at=4, **settings):
    """A loop that gets a signal during a step, its outcome and its stderr."""
    with StopRequest(
        num_processes=2 if settings.get("several_processes") else 1, last_step=10
    ) as stop:
        loop = Loop(
            monkeypatch,
            steps=10,
            stop=stop,
            during=lambda step: os.kill(os.getpid(), number) if step == at else None,
            **{"eval_every": 0, "checkpoint.every": 0} | settings,
        )
        outcome = loop.train()
    return loop, outcome, capfd.readouterr().err


@pytest.fixture
def handlers():
    """Restores the signal handlers after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "terminate"), (signal.SIGINT, "interrupt")]
)
@pytest.mark.parametrize(
    ("step_s", "message"),
    [
        (STEP_S, "step 4 is finished and saved first"),
        (0.1, "steps 3 to 4 are finished and saved first"),
    ],
)
def test_signal_stops_the_run_after_the_step_under_way(
    monkeypatch, capfd, number, reason, step_s, message
):
    """If steps are slow only one is under way; otherwise the next is dispatched already."""
    loop, outcome, err = stopped(monkeypatch, capfd, number, step_s=step_s)
    assert (outcome.reason, outcome.last_step, loop.begun, loop.checkpoints.done) == (
        reason,
        4,
        [1, 2, 3, 4],
        [4],
    )
    assert message in err
    assert [record.step for record in loop.records] == [1, 2, 3, 4]
    assert loop.records[0].metrics == {"accuracy": 1}


@pytest.mark.usefixtures("handlers")
def test_several_processes_stop_by_the_step_they_announce(monkeypatch, capfd):
    loop, outcome, err = stopped(monkeypatch, capfd, signal.SIGTERM, several_processes=True)
    assert "up to step 6 at most, and saved first" in err
    assert outcome.last_step <= 6
    assert loop.checkpoints.done == [outcome.last_step]


@pytest.mark.usefixtures("handlers")
def test_signal_between_steps_starts_no_further_step(monkeypatch, capfd):
    def evaluate(trainer, state):
        os.kill(os.getpid(), signal.SIGTERM)
        return

    with StopRequest() as stop:
        loop = Loop(monkeypatch, stop=stop, evaluate=evaluate)
        outcome = loop.train()
    assert (outcome.last_step, loop.begun, loop.checkpoints.done) == (2, [1, 2], [2])
    assert "the state after step 2 is saved first" in capfd.readouterr().err
    with StopRequest() as stop:
        # as in a switch of plans, after which another loop begins
        os.kill(os.getpid(), signal.SIGTERM)
        loop = Loop(monkeypatch, stop=stop)
        outcome = loop.train()
    assert (outcome.last_step, loop.begun) == (0, [])


@pytest.mark.parametrize(
    "wrong", [ZeroDivisionError("of tokens"), ValueError("a batch that cannot be cut")]
)
def test_failed_evaluation_neither_ends_the_run_nor_loses_state(monkeypatch, wrong):
    saved_before = []

    def evaluate(trainer, state):
        saved_before.append(list(loop.checkpoints.tried))
        raise wrong

    loop = Loop(monkeypatch, evaluate=evaluate)
    assert loop.train().reason == "done"
    assert loop.checkpoints.done[-1] == 6
    assert saved_before[-1][-1] == 6, "the save of a step begins before its evaluation"
    assert [step for step, _ in loop.named("fault")] == [2, 4, 6]
    assert any("held-out loss is unknown" in text for text in loop.reported)


@pytest.mark.parametrize("several_processes", [True, False])
@pytest.mark.parametrize("fails_here", [True, False])
def test_no_process_evaluates_if_one_cannot_make_its_batches(
    monkeypatch, several_processes, fails_here
):
    def cut():
        if fails_here:
            raise OSError("the file is gone")
        yield None

    monkeypatch.setattr(
        evaluation, "gather_from_all", lambda number: [number, int(several_processes)]
    )
    loop = Loop(monkeypatch, several_processes=several_processes)
    object.__setattr__(loop.trainer, "held_out", evaluation.HeldOut(batches=cut))
    loop.trainer.program.eval_step = lambda params, batch: EvalSums(
        Scalar(8), Scalar(4), {"accuracy": Scalar(1)}
    )
    loop.state = SimpleNamespace(step=jnp.int32(0), params=None)
    assert loop.train().reason == "done"
    assert loop.checkpoints.done[-1] == 6
    assert len(loop.named("fault")) == (3 if fails_here or several_processes else 0)
    assert [(fields["loss"], fields["metrics"]) for _, fields in loop.named("eval")] == (
        [] if fails_here or several_processes else [(2.0, {"accuracy": 0.25})] * 3
    )


def test_held_out_text_without_counted_tokens_has_no_loss(monkeypatch):
    loop = Loop(monkeypatch, evaluate=lambda trainer, state: (0.0, 0))
    assert loop.train().reason == "done"
    assert [fields["loss"] for _, fields in loop.named("eval")] == [None] * 3


def test_error_in_the_loop_saves_the_state(monkeypatch):
    def fail(step):
        if step == 5:
            raise RuntimeError("a device is lost")

    loop = Loop(monkeypatch, evaluate=lambda *_: (1.0, 1), during=fail, **{"checkpoint.every": 0})
    with pytest.raises(RuntimeError, match="lost") as caught:
        loop.train()
    assert loop.checkpoints.done == [4]
    assert "the state after step 4 is saved" in caught.value.__notes__[0]


def test_failed_save_is_noticed_at_the_next_step_and_retried(monkeypatch):
    loop = Loop(monkeypatch, steps=8, failing=[3], **{"eval_every": 0, "checkpoint.every": 3})
    assert loop.train().reason == "done"
    assert loop.checkpoints.tried == [3, 5, 6, 8]
    assert loop.checkpoints.done == [5, 6, 8]
    assert "step 3 failed" in loop.reported[0]


def test_saves_that_keep_failing_end_the_run(monkeypatch):
    loop = Loop(
        monkeypatch, steps=90, failing=range(99), **{"eval_every": 0, "checkpoint.every": 3}
    )
    with pytest.raises(CheckpointError, match="failed"):
        loop.train()
    assert len(loop.checkpoints.tried) == len(PAUSES_S) + 1


@pytest.mark.parametrize("is_stopping", [True, False])
def test_last_save_is_retried_with_pauses_unless_stopping(monkeypatch, is_stopping):
    loop = Loop(monkeypatch, steps=4, failing=[4], **{"eval_every": 0, "checkpoint.every": 0})
    began_s = loop.clock.perf_counter()

    def reported(text):  # the disk has room again after the third failure
        loop.reported.append(text)
        if text.count("failed") and len(loop.checkpoints.tried) == 3:
            loop.checkpoints.failing.clear()

    def paused_s():
        return loop.clock.perf_counter() - began_s - len(loop.checkpoints.tried) * SAVE_S

    monkeypatch.setattr(loop.trainer.display, "message", reported)
    if is_stopping:
        with pytest.raises(CheckpointError, match="failed"):
            loop.trainer._saving.finish(
                lambda: loop.trainer.save(loop.state, 4), 4, is_stopping=lambda: True
            )
        assert (len(loop.checkpoints.tried), paused_s()) == (2, 0)
    else:
        loop.trainer._saving.finish(
            lambda: loop.trainer.save(loop.state, 4), 4, is_stopping=lambda: False
        )
        assert (loop.checkpoints.steps(), len(loop.checkpoints.tried)) == ([4], 4)
        assert sum(PAUSES_S[:3]) <= paused_s() < sum(PAUSES_S[:3]) + 1


def test_failed_save_of_one_of_several_processes_raises_next_step(monkeypatch):
    loop = Loop(
        monkeypatch,
        several_processes=True,
        steps=90,
        failing=[3],
        **{"eval_every": 0, "checkpoint.every": 50},
    )
    loop.trainer.checkpoints.save(3, None, {})
    with pytest.raises(CheckpointError, match="step 3 failed"):
        loop.train()
    assert len(loop.begun) <= 2


@pytest.mark.parametrize("several_processes", [True, False])
def test_a_run_that_no_longer_learns_ends_with_an_error(monkeypatch, several_processes):
    loop = Loop(
        monkeypatch,
        steps=50,
        several_processes=several_processes,
        loss=lambda step: 1.0 if step < 10 else math.nan,
        evaluate=lambda *_: (1.0, 1),
    )
    with pytest.raises(LearningError, match=r"since step 10(.|\n)*checkpoint.resume_step=6"):
        loop.train()
    assert 14 <= len(loop.begun) <= 16
    ((_, fields),) = loop.named("end")
    assert (fields["reason"], fields["back_to"]) == ("not learning", 6)


def test_run_whose_last_losses_are_not_finite_raises(monkeypatch):
    loop = Loop(
        monkeypatch, loss=lambda step: 1.0 if step < 5 else math.nan, evaluate=lambda *_: (1.0, 1)
    )
    with pytest.raises(LearningError, match="2 step"):
        loop.train()
    assert loop.checkpoints.done == [3, 6]
    loop = Loop(monkeypatch, evaluate=lambda trainer, state: (math.nan, 5), eval_every=6)
    with pytest.raises(LearningError, match="held-out loss is not finite"):
        loop.train()


def test_nan_losses_of_a_plan_on_trial_do_not_end_the_run(monkeypatch):
    class OnTrial(Signals):
        is_on_trial = True

    loop = Loop(
        monkeypatch,
        steps=20,
        loss=lambda step: 1.0 if step < 5 or step > 15 else math.nan,
        evaluate=lambda *_: (1.0, 1),
        overseer=OnTrial,
    )
    assert loop.train().reason == "done"
