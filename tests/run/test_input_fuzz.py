"""User files and flags with random damage give a value or an OptimusError."""

import contextlib
import copy
import json
import random
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from report.sample_run import PLAN, write_run

from optimus_jax.cli.main import COMMANDS
from optimus_jax.config import Config
from optimus_jax.config.advice import ADVICE
from optimus_jax.config.aliases import ALIASES
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.config.request import make_config, read_config, resumed_config
from optimus_jax.control.deciding.regimes import Regimes
from optimus_jax.control.deciding.switch_costs import CostModel
from optimus_jax.control.journal import plan_to_resume, switches
from optimus_jax.control.learnt_file import LearntFile
from optimus_jax.control.predictor import Predictor
from optimus_jax.errors import OptimusError, PlanError
from optimus_jax.faults.fault_log import take_over
from optimus_jax.mesh.topology import Topology
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.plan import Plan
from optimus_jax.planning.learning.records import read_records
from optimus_jax.planning.profiles.hardware import HardwareProfile
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.report.run_report import run_report
from optimus_jax.run import command_line
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.simulation.named_scenarios import library
from optimus_jax.simulation.replay import recorded
from optimus_jax.simulation.scenarios import Scenario

HERE = Topology(
    num_devices=4, num_processes=1, platform="cpu", device_kind="cpu", bytes_per_device=2**34
)
JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    10**9,
    2**31,
    2**62,
    10**30,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    " ",
    "none",
    "auto",
    "-1",
    "1e400",
    "9" * 5000,
    "\0",
    "\ud800",
    "\u00e9",
    "a" * 10_000,
    "a=b",
    ",",
    "x.json",
    [],
    {},
    [None],
    [[]],
    {"a": {}},
    [1, "a"],
    {"": 0},
    [[[[[[[[1]]]]]]]],
]
FEW_EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with each of its keys."""
    for key in (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from places(value[key])


def damaged(text: str, draw: random.Random) -> bytes:
    """JSON with some values replaced, removed, renamed or moved, or with its text cut, repeated or
    overwritten.
    """
    value = copy.deepcopy(json.loads(text))
    for _ in range(draw.randint(1, 3)):
        if not (found := list(places(value))):
            break
        container, key = draw.choice(found)
        match draw.randint(0, 3):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[draw.choice(["x", "", "learning_rate", "batch_size", "\0", *ALIASES])] = (
                    container.pop(key)
                )
            case _:
                container[key] = copy.deepcopy(draw.choice(JUNK))
    content = json.dumps(value).encode()
    match draw.randint(0, 9):
        case 0:
            content = content[: draw.randint(0, len(content))]
        case 1:
            content = b"\xef\xbb\xbf" + content
        case 2:
            place = draw.randint(0, len(content))
            content = content[:place] + bytes(draw.choices(range(256), k=3)) + content[place:]
        case 3:
            content = content.replace(b": ", b": " + b"[" * draw.choice([1, 100, 100_000]), 1)
        case 4:
            content = json.dumps(draw.choice(JUNK)).encode()
    return content


SEEDS = st.integers(0, 2**32)
CONFIG = make_config(
    "llama3.2-1b", {"phases": "200:64,400:128x512", "mesh": "data=2,tensor=2"}
).to_json()


@FEW_EXAMPLES
@given(seed=SEEDS)
@example(seed=131)  # data.allow_change, which a run does not keep
def test_a_damaged_config_is_read_or_refused(seed, tmp_path):
    content = damaged(CONFIG, random.Random(seed))
    (tmp_path / "config.json").write_bytes(content)
    with contextlib.suppress(OptimusError):
        config = read_config(tmp_path / "config.json")
        assert Config.from_json(config.to_json()) == config.stored
        choose_plan(config, HERE)
    with contextlib.suppress(OptimusError):
        resumed_config(content.decode("utf-8", errors="ignore"), None, {})


@FEW_EXAMPLES
@given(seed=SEEDS)
def test_a_damaged_plan_is_read_or_refused(seed):
    config = Config(model=model_preset("gpt2-nano"))
    text = (
        PLAN.to_json() if seed % 2 else plan_for(config, AxisSizes(pipe=2, data=2), HERE).to_json()
    )
    with contextlib.suppress(OptimusError):
        plan = Plan.from_json(damaged(text, random.Random(seed)))
        assert Plan.from_json(plan.to_json()) == plan
        plan.describe()
        plan.validate(config.model, global_batch=16)


@FEW_EXAMPLES
@given(seed=SEEDS)
def test_a_damaged_schedule_or_scenario_is_read_or_refused(seed):
    draw = random.Random(seed)
    with contextlib.suppress(OptimusError):
        Schedule.from_json(
            damaged(make_schedule("interleaved", 2, 2, 2, 1).to_json(), draw)
        ).bubble()
    with contextlib.suppress(OptimusError):
        scenario = Scenario.from_json(
            damaged(draw.choice(list(library().values())).to_json(), draw)
        )
        scenario.to_json()
        scenario.configs(Config())


@FEW_EXAMPLES
@given(seed=SEEDS)
def test_a_damaged_file_of_what_was_learnt_is_read_or_ignored(seed, tmp_path):
    draw, path = random.Random(seed), tmp_path / "learnt.json"
    evidence = {
        "plan": "p",
        "setting": "s",
        "measured_s": 0.5,
        "deviation": 0.1,
        "runs_ago": 0,
        "terms_s": {"a": 0.25},
    }
    costs = {
        "delay_log_ratios": {"remesh": [0.5], "any": [0.5]},
        "compile_tax_log_ratios": [0.5],
        "prepare_s": [20.0, 1],
    }
    value = {"evidence": [evidence], "switch_costs": costs, "disturbances_s": [600.0]}
    path.write_bytes(damaged(json.dumps(value), draw))
    learners = {
        "evidence": Predictor(),
        "switch_costs": CostModel(),
        "disturbances_s": Regimes(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LearntFile(path, learners).read()
    LearntFile(path, learners).write()


@FEW_EXAMPLES
@given(seed=SEEDS)
def test_damaged_hardware_measurements_are_read_or_refused(seed, tmp_path):
    draw = random.Random(seed)
    line = json.dumps(
        {
            "model": "m",
            "plan": "p",
            "measured_at": "now",
            "measured_s": 0.5,
            "terms_s": {"a": 0.25, "b": 0.25},
        }
    )
    (tmp_path / "records.jsonl").write_bytes(damaged(line, draw) + b"\n" + line.encode() + b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        assert 1 <= len(read_records(tmp_path / "records.jsonl")) <= 2
    with contextlib.suppress(OptimusError, ValueError, TypeError):  # as its reader expects
        HardwareProfile.from_json(
            damaged(
                '{"setting": {}, "measured_at": "", "probed": {}, "fits": [], "nvml": {}}', draw
            ).decode("utf-8", errors="ignore")
        )


@pytest.fixture(scope="module")
def run_files(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    run = write_run(path)
    run.close()
    plan = json.loads(PLAN.to_json())
    (path / "switches.jsonl").write_text(
        "".join(
            json.dumps(record) + "\n"
            for record in (
                {
                    "record": "begin",
                    "step": 3,
                    "source": plan,
                    "target": plan,
                    "why": "w",
                    "by_choice": True,
                },
                {"record": "commit", "step": 3, "plan": "p", "costs_s": {"move": 1.0}},
                {
                    "record": "end",
                    "step": 8,
                    "ending": "kept",
                    "why": "w",
                    "costs_s": {"move": 1.0},
                },
            )
        )
    )
    (path / "faults").mkdir()
    (path / "faults" / "1.jsonl").write_text(
        json.dumps({"event": "fault", "step": 1, "time_s": 1.0, "process": 1}) + "\n"
    )
    return {
        file.relative_to(path): file.read_text()
        for file in path.rglob("*")
        if file.suffix in (".json", ".jsonl")
    }


@pytest.mark.filterwarnings("ignore:.*damaged:UserWarning")
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_a_damaged_run_directory_is_read_or_refused(seed, tmp_path_factory, run_files):
    """The files that report.py, simulate.py --replay and a resume read before anything
    expensive.
    """
    draw, path = random.Random(seed), tmp_path_factory.mktemp("damaged")
    for name, text in run_files.items():
        (path / name).parent.mkdir(exist_ok=True)
        lines = text.splitlines() if name.suffix == ".jsonl" else [text]
        broken = draw.sample(range(len(lines)), k=min(3, len(lines))) if draw.random() < 0.5 else []
        (path / name).write_bytes(
            b"".join(
                (damaged(line, draw) if number in broken else line.encode()) + b"\n"
                for number, line in enumerate(lines)
            )
        )
    if draw.random() < 0.2:
        victim = draw.choice(
            ["plan.json", "config.json", "metrics.jsonl", "events.jsonl", "switches.jsonl"]
        )
        (path / victim).unlink()
        (path / victim).mkdir()
    slow = [run_report] if seed % 5 == 0 else []
    for read in (
        *slow,
        switches,
        plan_to_resume,
        recorded,
        lambda path: take_over(RunDirectory(path, writer=False)),
        lambda path: [
            (event["time_s"], event["step"])
            for event in RunDirectory(path, writer=False).events()
            if event["event"] == "start"
        ],
    ):
        with contextlib.suppress(OptimusError):
            read(path)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_layers": 10**9},
        {"global_batch": 2**31 - 1},
        {"steps": 2**31},
        {"global_batch": "9" * 30},
        {"mesh": "data=" + "9" * 5000},
        {"phases": "9" * 5000 + ":3"},
        {"mesh": "pipe=4", "parallel.repeats": 10**9},
    ],
)
def test_absurd_settings_are_answered_at_once(settings):
    with contextlib.suppress(OptimusError):
        choose_plan(make_config("llama3.2-1b", settings), HERE)


def test_a_schedule_table_of_gigabytes_is_refused():
    with pytest.raises(PlanError, match="tasks at most"):
        make_schedule("1f1b", 8, 10**9)


PARSERS = {name: import_module(f"optimus_jax.cli.{name}").parser() for name in COMMANDS}
WORDS = [*ALIASES, *ADVICE]


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_random_arguments_are_parsed_or_refused(seed):
    draw = random.Random(seed)
    parser = PARSERS[draw.choice(list(PARSERS))]
    values = [
        *(value for value in map(str, JUNK) if "\0" not in value),
        "--",
        "-",
        "=",
        "--=",
        "-x",
        "---x",
        "gpt2-nano",
        "h100:8",
        "data=2",
        "--model=",
        "\udcff",
    ]
    flags = [flag for flag in parser.flags() if flag != "--help"]
    arguments = [
        draw.choice(
            [
                draw.choice(flags or ["x"]),
                draw.choice(values),
                f"--{draw.choice(WORDS)}",
                f"--{draw.choice(WORDS)}={draw.choice(values)}",
                f"{draw.choice(flags or ['x']).replace('-', '_')}={draw.choice(values)}",
                f"{draw.choice(WORDS)}={draw.choice(values)}",
            ]
        )
        for _ in range(draw.randint(0, 8))
    ]
    if draw.random() < 0.5 and "--model" in flags:
        arguments = ["--model", "gpt2-nano", *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "say", lambda _: None)
        try:
            given = parser.read(arguments)
            make_config("gpt2-nano", command_line.settings(given, note=lambda _: None))
        except OptimusError as error:
            message = str(error)
        else:
            message = "\n\n"
        assert message.count("\n") >= 2, "what, given, do"


def test_a_folder_in_place_of_a_run_file_is_named(tmp_path):
    """The message does not blame a full disk, and a report is made of what can be read."""
    run = RunDirectory(tmp_path, writer=False)
    for name, read in (
        ("plan.json", run.plan_text),
        ("config.json", run.config_text),
        ("metrics.jsonl", run.metrics),
        ("events.jsonl", run.events),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(
            OptimusError, match=f"{name} of the run is a folder, where a file should be"
        ):
            read()
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text("")
    with pytest.raises(OptimusError, match=r"(?s)not JSON.*config\.json: the file is empty"):
        run.config_text()
    assert "events.jsonl of the run is a folder" in run_report(tmp_path)
    with pytest.raises(
        PlanError, match=r"(?s)expected a JSON object with the fields of a plan(?!.*TypeError)"
    ):
        Plan.from_json('[1, "a", null]')
    writer = RunDirectory(tmp_path)
    (tmp_path / "checkpoints").write_text("x")
    with pytest.raises(
        OptimusError, match="checkpoints of the run is a file, where a folder should be"
    ):
        writer.write_config(Config().to_json())
