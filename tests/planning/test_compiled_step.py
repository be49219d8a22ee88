"""The compilation of a step beside other work."""

import threading
from types import SimpleNamespace

import pytest

from optimus_jax.planning.ahead_of_time import compiled_step
from optimus_jax.planning.ahead_of_time.compiled_step import StepCompilation


@pytest.fixture
def compiled(monkeypatch):
    """The programs that were compiled, and the threads that did it; compiling gives the name."""
    seen = []

    def compile_step(program, *, bytes_per_device=None):
        thread = threading.current_thread()
        assert not thread.daemon, "XLA aborts a process that ends while a daemon compiles"
        seen.append((program.name, thread is threading.main_thread(), bytes_per_device))
        if program.name == "broken":
            raise ValueError("cannot be compiled")
        return program.name

    monkeypatch.setattr(compiled_step, "compile_step", compile_step)
    return seen


def test_a_step_is_compiled_once_and_beside_the_caller(compiled):
    program = SimpleNamespace(name="step")
    compilation = StepCompilation(program, bytes_per_device=7)
    assert compilation.of(program) == compilation.of(program) == "step"
    assert compiled == [("step", False, 7)]


def test_a_step_that_was_compiled_already_is_not_compiled_again(compiled):
    program = SimpleNamespace(name="step")
    assert StepCompilation(program, compiled="tried").of(program) == "tried"
    assert compiled == []


def test_another_program_is_compiled_when_it_is_asked_for(compiled):
    compilation = StepCompilation(SimpleNamespace(name="step"))
    assert compilation.of(SimpleNamespace(name="other")) == "other"
    assert ("other", True, None) in compiled


def test_what_compiling_raises_is_raised_where_the_step_is_asked_for(compiled):
    program = SimpleNamespace(name="broken")
    compilation = StepCompilation(program)
    with pytest.raises(ValueError, match="cannot be compiled"):
        compilation.of(program)
