"""What the loop writes down of time, on a clock that only steps and evaluations move."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from optimus_jax.config import Config
from optimus_jax.training import trainer as trainer_module
from optimus_jax.training.display import Display
from optimus_jax.training.stopping import StopRequest
from optimus_jax.training.trainer import Trainer

STEP_S, EVALUATION_S, SAVE_S, LOAD_S, PROBE_S = 2.0, 100.0, 1000.0, 0.25, 10.0


class Clock:
    now = 50.0

    def perf_counter(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


class Scalar(float):
    """A metric that is known as soon as its step was dispatched."""

    def is_ready(self):
        return True


class Signals:
    """Wants a probe after the fourth step."""

    def __init__(self, clock):
        self.clock, self.told = clock, []

    def dispatched(self, *, data_wait_s, dispatch_s, batch):
        self.told.append((data_wait_s, dispatch_s, batch))

    def step(self, record):
        self.told.append(record.step)

    def evaluation(self, step, *numbers):
        pass

    def is_probe_due(self, step):
        return step == 4

    def leaves(self, step):
        return False

    def probe(self, step):
        self.told.append("probe")
        self.clock.wait(PROBE_S)


@pytest.mark.parametrize("several_processes", [True, False])
def test_evaluating_and_saving_are_no_part_of_a_steps_time(monkeypatch, several_processes):
    """Among several processes on a CPU a step is finished when it has been dispatched, and its numbers are read a step later."""
    clock, records = Clock(), []
    config = Config().with_values({"steps": 6, "eval_every": 2, "checkpoint.every": 3})

    def train_step(state, batch):
        clock.wait(STEP_S)
        return state, dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "skipped", "loss_scale"), Scalar(1))

    class Agreement:
        def __init__(self, mesh):
            pass

        def __call__(self, wish):
            return wish

    monkeypatch.setattr(trainer_module, "time", clock)
    monkeypatch.setattr(trainer_module, "put_batch", lambda *_: None)
    monkeypatch.setattr(trainer_module, "Agreement", Agreement)
    monkeypatch.setattr(trainer_module, "to_stored", lambda state, *_: state)
    monkeypatch.setattr(Trainer, "_evaluate", lambda *_: clock.wait(EVALUATION_S))
    def batches(first):
        for step in range(first, 100):
            clock.wait(LOAD_S)
            yield step, f"batch {step}"

    signals = Signals(clock)
    run = SimpleNamespace(failure=None, log_step=records.append, log_event=lambda *_, **__: None, check=lambda: None)
    plan = SimpleNamespace(precision="f32", digest="", to_json=str)
    outcome = Trainer(
        program=SimpleNamespace(config=config, plan=plan, mesh=SimpleNamespace(local_devices=[]), batch_sharding=None, shapes=None, state_shardings=None), train_step=train_step,
        topology=SimpleNamespace(num_processes=2 if several_processes else 1, num_devices=2, dense_peak_flops=lambda _: None),
        loader=SimpleNamespace(iterate=batches), eval_batches=list,
        bits_per_token=False, metadata={},
        checkpoints=SimpleNamespace(save=lambda *_: clock.wait(SAVE_S), wait=lambda: None), run=run, display=Display(),
        tensorboard=None, stop=StopRequest(), overseer=signals).train(SimpleNamespace(step=jnp.int32(0)))
    assert outcome.reason == "done"
    assert [record.step_time_s for record in records] == [LOAD_S + STEP_S] * 6
    assert [told for told in signals.told if isinstance(told, tuple)] == [(LOAD_S, STEP_S, f"batch {step}") for step in range(1, 7)]
    assert [told for told in signals.told if not isinstance(told, tuple)] == [1, 2, 3, 4, "probe", 5, 6], "a probe runs when its step is known to be done"
