"""The tests that `make quick` leaves out, and the groups of tests of one worker."""

import re
from pathlib import Path
from types import SimpleNamespace

import plans
import pytest
from markers import MARKS, TESTS, marks_of
from worker_groups import PARITY_FILE, SLOWEST, by_length, group_of


@pytest.mark.parametrize("name", sorted(set().union(*MARKS.values())))
def test_every_slow_name_is_in_use(name):
    """A renamed function would no longer mark its tests."""
    sources = (
        path for path in TESTS.rglob("*.py") if path.name not in ("markers.py", "test_markers.py")
    )
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in sources)


def test_marks_come_from_helpers_too(tmp_path):
    file = tmp_path / "test_made_up.py"
    file.write_text(
        "import subprocess\n"
        "def start():\n    subprocess.run(['true'])\n"
        "def test_slow():\n    start()\n"
        "def test_quick():\n    pass\n"
    )
    assert marks_of(file, "test_slow") == ["processes"]
    assert marks_of(file, "test_quick") == []


def test_parity_tests_are_grouped_by_plan_and_model_others_by_file():
    parity = (
        "tests/training/test_equal_to_one_device.py::test_gradients_equal_one_device[gpt data=8]"
    )
    assert group_of(parity) == group_of(parity.replace("gradients", "loss"))
    assert group_of(parity) != group_of(parity.replace("gpt", "llama"))
    assert group_of("tests/test_plan.py::test_x[1]") == "tests/test_plan.py"
    assert Path(group_of(parity).partition("[")[0]).name in {f.name for f in TESTS.rglob("*.py")}


def test_the_slowest_files_begin_first_and_exist():
    def item(file, *marks):
        return SimpleNamespace(nodeid=f"tests/{file}::test_x[1]", get_closest_marker=marks.count)

    items = [
        item("a/test_quick.py"),
        item(f"training/{PARITY_FILE}", "compiles"),
        item("a/test_compiles.py", "compiles"),
        item(f"a/{SLOWEST[1]}", "compiles"),
        item(f"b/{SLOWEST[0]}", "processes"),
    ]
    assert by_length(items) == items[::-1]
    assert set(SLOWEST) <= {file.name for file in TESTS.rglob("test_*.py")}


@pytest.mark.parametrize("case", plans.PLANS, ids=str)
def test_a_plan_id_can_be_parsed_back(case):
    made, again = (
        plans.make_plan(plans.make_config(plans.model_for(asked, "gpt"), asked))
        for asked in (case, plans.PlanCase.parse(str(case)))
    )
    assert made == again
