"""Which mesh axis crosses hosts, which only processes."""

from dataclasses import replace

import pytest

from optimus_jax.config.axes import AxisSizes
from optimus_jax.mesh.topology import Topology

FOUR = Topology(
    num_devices=8,
    num_processes=4,
    num_hosts=2,
    platform="gpu",
    device_kind="A New One",
    bytes_per_device=None,
)
"""Two hosts of two processes of two devices."""


@pytest.mark.parametrize(
    ("axes", "crossed"),
    [
        (AxisSizes(pipe=2, tensor=4), {"pipe": "hosts", "tensor": "processes"}),
        (AxisSizes(pipe=2, data=2, tensor=2), {"pipe": "hosts", "data": "processes"}),
        (AxisSizes(pipe=2, fsdp=2, tensor=2), {"pipe": "hosts", "fsdp": "processes"}),
        (AxisSizes(data=4, tensor=2), {"data": "hosts"}),
        (AxisSizes(tensor=8), {"tensor": "hosts"}),
        (AxisSizes(data=2, fsdp=2, tensor=2), {"data": "hosts", "fsdp": "processes"}),
        (AxisSizes(pipe=2, data=2), {"pipe": "processes"}),  # the first four devices: one host
    ],
)
def test_the_first_axes_cross_hosts(axes, crossed):
    assert FOUR.crossed(axes) == crossed


def test_crossed_axes_follow_the_given_process_and_host():
    round_robin = replace(
        FOUR, num_processes=8, process_of=(0, 2, 4, 6, 1, 3, 5, 7), host_of=(0, 0, 0, 0, 1, 1, 1, 1)
    )
    assert round_robin.crossed(AxisSizes(pipe=2, tensor=4)) == {
        "pipe": "hosts",
        "tensor": "processes",
    }
    uneven = replace(
        FOUR, num_processes=3, process_of=(0, 0, 0, 0, 0, 0, 1, 2), host_of=(0, 0, 0, 0, 0, 0, 1, 1)
    )
    assert uneven.crossed(AxisSizes(data=4, tensor=2)) == {"data": "hosts", "tensor": "processes"}


def test_one_process_crosses_nothing():
    assert (
        replace(FOUR, num_processes=1, num_hosts=1).crossed(AxisSizes(pipe=2, data=2, tensor=2))
        == {}
    )


def test_crossed_axes_in_words():
    assert (
        FOUR.describe_crossed(AxisSizes(pipe=2, data=2, tensor=2))
        == "pipe crosses hosts; data crosses processes"
    )
    assert (
        replace(FOUR, num_processes=1, num_hosts=1).describe_crossed(AxisSizes(data=8))
        == "no axis crosses processes"
    )
    assert str(FOUR) == "8 x A New One (gpu) in 4 processes on 2 hosts"
