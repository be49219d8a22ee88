"""Link speeds as people write them."""

from dataclasses import replace

import pytest

from optimus_jax.errors import ConfigError
from optimus_jax.planning.profiles.links import Link, with_speed

PUBLISHED = Link(name="NVLink 4", bytes_per_s=450e9, latency_s=None, source="a data sheet")


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "latency_s"),
    [
        ("50GB/s", 50e9, None),
        ("400Gb/s", 50e9, None),
        ("400Gbps", 50e9, None),
        (" 12.5 GB/s , 5 us", 12.5e9, 5e-6),
        ("5us", 450e9, 5e-6),
        ("2µs,1TB/s", 1e12, 2e-6),
        ("1e3MB/s,0.1ms", 1e9, 1e-4),
        ("800kB/s", 8e5, None),
        ("10B/s,1s", 10, 1),
    ],
)
def test_speeds_and_latencies_are_read(text, bytes_per_s, latency_s):
    link = with_speed(PUBLISHED, text)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    assert link.latency_s == (None if latency_s is None else pytest.approx(latency_s))
    assert link.source == f"given as {text}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "50",
        "50GB",
        "GB/s",
        "50 gb/s",
        "-5GB/s",
        "50GB/s,60GB/s",
        "1us,2us",
        "0GB/s",
        "50GB/s,",
        "nan",
        "50KB/s",
        "5 m",
    ],
)
def test_malformed_speed_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="50GB/s,5us"):
        with_speed(PUBLISHED, text)


def test_new_speed_renames_the_link_and_new_latency_does_not():
    assert with_speed(PUBLISHED, "5us").name == "NVLink 4"
    assert with_speed(PUBLISHED, "50GB/s").name == "given link"


def test_unknown_speed_is_shown_as_unknown():
    assert str(Link.unknown("network")) == "network (unknown speed)"
    assert str(with_speed(Link.unknown("network"), "50GB/s,5us")) == "given link (50 GB/s, 5 us)"


def test_links_of_their_own_add_up_among_all_devices_alone():
    fabric = replace(PUBLISHED, bytes_per_s=448e9, peers=7)
    assert fabric.among(8) == fabric
    assert fabric.among(2).bytes_per_s == pytest.approx(64e9)
    assert PUBLISHED.among(2) is PUBLISHED, "a switch"
    assert with_speed(fabric, "100GB/s").among(2).bytes_per_s == 100e9
    assert with_speed(fabric, "2us").among(2).bytes_per_s == pytest.approx(64e9)
