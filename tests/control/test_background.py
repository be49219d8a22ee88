"""A question asked in the background: one at a time, its answer taken once, its error raised by who
takes it.
"""

import threading

import pytest

from optimus_jax.control.background import Asked, Worker


def test_the_answer_comes_at_a_later_call_and_once():
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


def test_an_error_is_raised_by_who_takes_and_it_is_asked_again():
    def broken():
        raise OSError("gone")

    asked = Asked(broken, lambda job: job())
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            asked.take()


def test_a_worker_does_jobs_in_order_in_one_daemon_thread_and_ends():
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


def test_a_worker_that_is_closed_begins_no_other_job():
    begun, go, done = threading.Event(), threading.Event(), []
    worker = Worker("test")
    worker(lambda: (begun.set(), go.wait(60), done.append("begun")))
    worker(lambda: done.append("not begun"))
    assert begun.wait(60)
    worker.close()
    go.set()
    worker.finish()
    assert done == ["begun"]
