"""A function called in the background: one call at a time, its result taken once, its error raised
to the caller of `take`.
"""

import threading

import pytest

from optimus_jax.control.background import Asked, Worker


def test_the_answer_is_returned_once_by_a_later_call():
    jobs, answers = [], iter([1, 2])
    asked = Asked(lambda: next(answers), jobs.append)
    assert asked.take() is None
    assert asked.take() is None
    jobs.pop()()
    assert asked.take() == 1
    assert not jobs
    assert asked.take() is None
    jobs.pop()()
    assert asked.take() == 2


def test_take_raises_the_error_and_the_next_take_asks_again():
    def broken():
        raise OSError("gone")

    asked = Asked(broken, lambda job: job())
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            asked.take()


def test_a_worker_runs_jobs_in_order_in_one_daemon_thread():
    done, threads, ended = [], set(), threading.Event()
    worker = Worker("test")
    for number in range(5):
        worker(lambda number=number: (done.append(number), threads.add(threading.current_thread())))
    worker(ended.set)
    assert ended.wait(60)
    worker.close()
    (thread,) = threads
    thread.join(60)
    assert (done, thread.daemon, thread.is_alive()) == ([0, 1, 2, 3, 4], True, False)


def test_a_closed_worker_starts_no_further_job():
    begun, go, done = threading.Event(), threading.Event(), []
    worker = Worker("test")
    worker(lambda: (begun.set(), go.wait(60), done.append("begun")))
    worker(lambda: done.append("not begun"))
    assert begun.wait(60)
    worker.close()
    go.set()
    worker.finish()
    assert done == ["begun"]
