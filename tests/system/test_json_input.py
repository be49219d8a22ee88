"""JSON from users and interrupted writes: every defect gives the same kind of error."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.system.json_input import DEEPEST, JSONInputError, parse_json, read_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=VALUES)
def test_json_written_by_python_is_read(value):
    assert (
        parse_json(json.dumps(value))
        == value
        == parse_json(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=True).encode())
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ('{"lr": 1, "lr": 2}', "'lr' appears twice"),
        ('[{"a": {"b": 1, "b": 1}}]', "'b' appears twice"),
        ("[NaN]", "NaN is not a number"),
        ("-Infinity", "not a number"),
        ("[1e999]", "too large"),
        ("9" * 5000, "limit"),
        ("[" * 100_000, "nested deeper"),
        ('{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1), "nested deeper"),
        (b"\xff{}", "not UTF-8"),
        ("[1] 2", "Extra data"),
        ("{'a': 1}", "double quotes"),
    ],
)
def test_invalid_json_is_refused(text, message):
    with pytest.raises(JSONInputError, match=message):
        parse_json(text)


def test_logs_may_contain_non_finite_numbers():
    assert parse_json("[NaN, 1e999]", finite=False)[1] == float("inf")


@given(text=st.binary(max_size=200) | st.text('{}[]:,"\\0123456789eE+-.truefalsnN', max_size=200))
def test_any_text_gives_a_value_or_a_json_input_error(text):
    with contextlib.suppress(JSONInputError):
        parse_json(text)


def test_a_path_that_is_not_a_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=tmp_path.name):
        read_json(tmp_path)
