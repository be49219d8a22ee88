"""Flags of every script: each is given once, names of other frameworks are known, and mistakes are
explained. Streams that are closed or full.
"""

import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import optimus_jax
from optimus_jax.cli.main import COMMANDS
from optimus_jax.config import Config, advice, aliases
from optimus_jax.config.advice import ADVICE, VALUES, advice_for
from optimus_jax.config.aliases import ALIASES, AXIS_OF, PARAMETERS, alias_of
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.described import described_settings
from optimus_jax.config.presets import PRESETS
from optimus_jax.config.request import SHORT_NAMES, dotted, make_config, read_config
from optimus_jax.config.settings import field_types
from optimus_jax.config.suggestions import known_settings
from optimus_jax.errors import ConfigError, OptimusError, PlanError, closest
from optimus_jax.faults.stopping import EXIT_INTERRUPT, EXIT_NO_READER, EXIT_USER_ERROR
from optimus_jax.run import command_line
from optimus_jax.run.command_line import Parser, run, settings
from optimus_jax.system.resilient_io import raising_output_errors

SCRIPTS = {path.stem: path for path in (Path(__file__).parents[2] / "scripts").glob("*.py")}


def module_of(script):
    return importlib.import_module(f"optimus_jax.cli.{script}")


PARSERS = {script: module_of(script).parser for script in COMMANDS}
TRAIN_FLAGS = PARSERS["train"]().flags()
SCREEN_LINES, SCREEN_COLUMNS = 40, 120
NO_DEFAULT = {
    "help",
    "model",  # one of the flags that name a model is needed
    "resume",
    "set",
    *("coordinator", "num_processes", "process_id"),  # the launcher says them
}
"""Flags whose help names no default."""


def refused(parser: Parser, *arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        parser.read(arguments)
    assert str(error.value).count("\n") == 2
    return str(error.value)


# The table of aliases.


def test_every_alias_has_a_target_and_hides_no_setting():
    ours = {*known_settings(), *SHORT_NAMES, *PARAMETERS}
    assert set(ALIASES.values()) <= ours
    assert not (set(ALIASES) | set(ADVICE)) & ours
    assert not set(ALIASES) & set(ADVICE)
    words = [
        *(word for words in aliases.WORDS_OF.values() for word in words),
        *(word for entry in advice._TABLE["entry"] for word in entry.get("names", AXIS_OF)),
    ]
    assert [word for word, times in Counter(words).items() if times > 1] == []
    assert set(AXIS_OF.values()) == set(field_types(AxisSizes))
    for target, values in VALUES.items():
        for value in values.values():
            Config().with_values({target: value})
        assert target in known_settings()


def test_the_docs_page_has_the_whole_table_of_aliases():
    rows: dict[str, list[str]] = {}
    for name, target in ALIASES.items():
        rows.setdefault(target, []).append(f"`{name}`")
    page = (SCRIPTS["train"].parents[1] / "docs" / "names.md").read_text(encoding="utf-8")
    assert page.endswith(
        "|---|---|\n"
        + "".join(f"| `{target}` | {', '.join(words)} |\n" for target, words in rows.items())
    )


def test_no_existing_setting_is_advised_to_be_left_out():
    settings = {setting.rpartition(".")[2] for setting in known_settings()}
    for entry in advice._TABLE["entry"]:
        if entry.get("text", "").startswith("leave it out"):
            assert settings.isdisjoint(entry["names"]), entry


@pytest.mark.parametrize("value", [None, "4", "0.03", "none", "bf16"])
def test_advice_names_only_existing_flags_and_settings(value):
    everything = {
        "cpu_devices": "8",
        "global_batch": "64",
        "steps": "100",
        "lr": "1e-3",
        "tp_size": "4",
        "gradient_accumulation_steps": "2",
    }
    for name in ADVICE:
        for others in ({}, everything):
            advice = advice_for(name, value, others)
            assert advice is not None
            assert "{" not in advice
            for flag in re.findall(
                r"--[a-z][a-z-]+", advice.replace("--cluster", "--set").replace("--gres", "--set")
            ):
                assert flag in TRAIN_FLAGS, (name, advice)
            for setting in re.findall(
                r"(?:--set"
                r" |\b)((?:model|data|parallel|optimizer|precision|checkpoint|log)\.[a-z_.0-9]+)",
                advice,
            ):
                assert (
                    any(known.startswith(setting.rstrip(".")) for known in known_settings())
                    or setting == "metrics.jsonl"
                ), (name, advice)


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("optimizer.lr", 0.25),
        ("steps", 7),
        ("model.embed_dim", 64),
        ("data.seq_len", 32),
        ("checkpoint.every", 9),
    ],
)
def test_an_alias_means_the_same_in_flags_settings_and_files(target, value, tmp_path, capsys):
    expected = Config().with_values({target: value})
    for word in (word for word, other in ALIASES.items() if other == target):
        assert Config().with_values(dotted({word: value})) == expected
        for flag in (f"--{word}", f"--{word.replace('_', '-')}"):
            for arguments in (
                [flag, str(value)],
                [f"{flag}={value}"],
                ["--set", f"{word}={value}"],
            ):
                assert (
                    Config().with_values(settings(PARSERS["train"]().read(arguments))) == expected
                )
        section = target.rpartition(".")[0]
        (tmp_path / "config.json").write_text(
            f'{{"{section}": {{"{word}": {value}}}}}' if section else f'{{"{word}": {value}}}'
        )
        assert read_config(tmp_path / "config.json") == expected
        assert f"{word} is taken as " in capsys.readouterr().err


def test_a_section_before_an_alias_has_to_be_right():
    assert alias_of("optimizer.learning_rate") == "optimizer.lr"
    assert alias_of("model.learning_rate") is None
    assert dotted({"optimizer.weight-decay": 1}) == {"optimizer.weight_decay": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp-size", "4", "--pp_size=2"), "write --mesh tensor=4,pipe=2"),
        (("--dp-size", "1"), "leave it out"),
        (("--cp_size", "2"), "not supported"),
        (("--batch-size", "32"), "write --global-batch 32 if"),
        (("--wandb",), "write --log wandb"),
        (("--comet",), "not supported.*--log writes"),
        (
            ("--per-device-train-batch-size", "4", "--cpu-devices", "8"),
            "4 on each of 8 .* is --global-batch 32",
        ),
        (
            (
                "--per-device-train-batch-size",
                "4",
                "--gradient_accumulation_steps",
                "2",
                "--cpu-devices",
                "8",
            ),
            "--global-batch 64 --microbatches 2",
        ),
        (
            ("--micro-batch-size", "2", "--global-batch", "64", "--cpu-devices", "8"),
            "--microbatches 4",
        ),
        (("--warmup-ratio", "0.03", "--max-steps", "1000"), "optimizer.warmup_steps=30 "),
        (("--min-lr", "1e-5", "--learning-rate", "1e-4"), "min_lr_ratio=0.1"),
        (("--bf16",), "write --precision bf16"),
        (("--dtype", "float16"), "--precision f16"),
        (("--gradient-checkpointing",), "--remat full"),
        (("--resume-from-checkpoint", "x"), "--run-dir DIR --resume"),
        (("--num-train-epochs", "3"), "--steps N"),
        (("--early-stopping-patience", "3"), "in Python a Callback may end it earlier"),
        (("--streaming",), "in Python .* takes an IterableDataset"),
        (("--report_to", "tensorboard"), "write --log tensorboard"),
        (("--train-samples", "1000", "--global-batch", "64"), "--steps 16"),
        (("--learnig-rate", "1"), "did you mean 'learning_rate', which is optimizer.lr"),
        (("--betaa2", "0.9"), "did you mean --set optimizer.beta2=0.9"),
        (("--weight-decay",), "needs a value"),
        (("--quite-unlike",), "choose one of"),
    ],
)
def test_names_with_another_meaning_are_answered_with_advice(arguments, message):
    assert re.search(message, refused(PARSERS["train"](), *arguments))


@pytest.mark.parametrize("script", PARSERS)
def test_hints_name_only_flags_of_their_script(script):
    parser = PARSERS[script]()
    for name in [*ADVICE, *ALIASES, "cpu_devices", "num_device", "resum", "wandbb"]:
        flag = f"--{name.replace('_', '-')}"
        if flag in parser.flags():
            continue
        hint = parser._hint(flag, "1", {})
        assert set(re.findall(r"--[a-z][a-z-]*", hint)) <= set(parser.flags()), (flag, hint)


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("trainer.max_steps", 7, "steps"),
        ("training.steps", 7, "steps"),
        ("training.seq_len", 64, "data.seq_len"),
        ("train.lr_warmup_steps", 3, "optimizer.warmup_steps"),
        ("zero_optimization.stage", 2, "parallel.zero"),
        ("deepspeed.zero_optimization.stage", 2, "parallel.zero"),
        ("cutoff_len", 64, "data.seq_len"),
        ("trainer.gradient_clip_val", 0.5, "optimizer.clip_norm"),
    ],
)
def test_sections_of_other_frameworks_are_read_everywhere(tmp_path, name, value, setting):
    expected = Config().with_values({setting: value})
    assert Config().with_values(dotted({name: value})) == expected
    assert (
        Config().with_values(settings(PARSERS["train"]().read([f"--{name}", str(value)])))
        == expected
    )
    nested = value
    for part in reversed(name.split(".")):
        nested = {part: nested}
    (tmp_path / "c.json").write_text(json.dumps(nested))
    assert read_config(tmp_path / "c.json") == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--distributed-backend", "nccl"), "do:    leave it out"),
        (("--sample-packing",), "always packed"),
        (("--save-strategy", "steps"), "--checkpoint-every N"),
        (("--micro-batch", "2", "--global-batch", "64", "--cpu-devices", "8"), "--microbatches 4"),
        (("--optim.lr", "1"), "did you mean --lr=1"),
        (("--lr_scheduler.warmup_steps", "5"), "did you mean --set optimizer.warmup_steps=5"),
        (("--fp16.enabled", "true"), "--precision f16"),
        (("--fp16.enabled", "false"), "it is off"),
        (("--parallelism.tensor_parallel_degree", "4"), "--mesh tensor=4"),
        (("--eval.max_iters", "4"), "eval_batches"),
        (("--checkpoint.interval", "4"), "--checkpoint-every 4"),
        (("--val_size", "0.1"), "data.eval_fraction=0.1"),
        (("--local_rank=-1",), "leave it out"),
        (("--rdzv_endpoint", "h:1"), "--coordinator h:1 "),
        (("--master_addr", "h"), "--coordinator h:PORT "),
        (("--eval_strategy", "steps"), "--eval-every N"),
    ],
)
def test_more_names_of_other_frameworks_are_answered(arguments, message):
    assert re.search(message, refused(PARSERS["train"](), *arguments))


def test_values_and_axes_of_other_frameworks_are_answered():
    for given, message in (
        ({"precision": "bfloat16"}, "'bf16'"),
        ({"remat": "minimal"}, "'dots'"),
        ({"lr_scheduler": "x"}, "optimizer.schedule=x"),
        ({"model.tuning.targets": "q_proj,v_proj"}, "did you mean 'query,value'"),
        ({"model.tuning.targets": ("q_proj", "mlp")}, "did you mean 'query,mlp'"),
        ({"model.tuning.targets": "all-linear"}, "did you mean 'all'"),
        (
            {"model.tuning.method": "qlora"},
            "model.tuning.method=lora --set model.tuning.base_precision=nf4",
        ),
        ({"rank": "8"}, "model.tuning.rank=8 for adapters"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config("gpt2-nano", given)
    with pytest.raises(PlanError, match="write tensor=4"):
        AxisSizes.parse("data=2,tp=4")


def test_aliases_work_for_arguments_of_train(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OptimusError, match=r"already|not free|there is a run|exists"):
        optimus_jax.train("gpt2-nano", output_dir=tmp_path)
    with pytest.raises(ConfigError, match="run_dir is given two values"):
        optimus_jax.train("gpt2-nano", run_dir="a", output_dir="b")
    with pytest.raises(ConfigError, match="write --run-dir a"):
        settings({"set": ["output_dir=a"]})


def test_closest_spelling_is_not_far_fetched():
    known = [*known_settings(), *SHORT_NAMES]
    for name, expected in {
        "optimizer.bta2": "optimizer.beta2",
        "steps_warmup": "optimizer.warmup_steps",
        "Seq-Len": "seq_len",
        "stps": "steps",
        "wandb": None,
        "zeor": "parallel.zero",
        "lt": "optimizer.lr",
        "batches_total": None,
        "optimizer.foo": None,
        "optimizer.embeding": "optimizer.lr_factors.embedding",
        "x" * 10_000: None,
        "": None,
        "-": None,
    }.items():
        assert closest(name, known) == expected
    flags = PARSERS["train"]().flags()
    assert [
        closest(f"--{name}", flags)
        for name in ("chec", "hepl", "abcd", "lar", "sead", "pipe", "loop")
    ] == ["--checkpoint-every", "--help", None, "--lr", "--seed", None, None]


# Each flag is given once.

ONE_VALUE = [
    (script, action.option_strings[-1])
    for script, parser in PARSERS.items()
    for action in parser()._actions
    if action.option_strings
    and action.nargs is None
    and action.const is None
    and not isinstance(action.default, list)
    and action.dest not in ("set", "link", "policy")
]


@pytest.mark.parametrize(("script", "flag"), ONE_VALUE)
def test_a_flag_with_two_values_is_refused(script, flag):
    for second in (f"{flag}=2", f"{flag.replace('-', '_').replace('__', '--', 1)}=2"):
        assert f"{flag} is given two values" in refused(PARSERS[script](), f"{flag}=1", second)


def test_repeated_equal_values_are_one_and_files_add_up():
    given = PARSERS["train"]().read(
        [
            "--steps",
            "5",
            "--steps=5",
            "--data",
            "a",
            "b",
            "--data",
            "c",
            "--lr",
            "1e-3",
            "--set",
            "optimizer.lr=0.001",
        ]
    )
    assert settings(given) == {
        "steps": "5",
        "data.sources": ["a", "b", "c"],
        "optimizer.lr": "0.001",
    }
    parser = PARSERS["train"]()
    assert parser.read(["--steps", "5"]) == {"steps": "5"}
    assert parser.read(["--steps", "6"]) == {"steps": "6"}, "a parser has no memory"
    assert "--resume is given two values" in refused(parser, "--resume", "--resume", "auto")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "seed=1", "--set", "seed=2"],
        ["--lr", "1", "--set", "optimizer.lr=2"],
        ["--lr", "1", "--set", "learning_rate=2"],
        ["--data", "a", "--set", "data.sources=b"],
        ["--set", "max_steps=1", "--steps", "2"],
    ],
)
def test_two_values_of_a_setting_under_any_names_are_refused(arguments):
    with pytest.raises(ConfigError, match="is given two values"):
        settings(PARSERS["train"]().read(arguments))


def test_two_values_are_refused_in_python_and_json_too(tmp_path):
    with pytest.raises(
        ConfigError, match=r"optimizer.lr is given two values\n  given: lr=1 and optimizer.lr=2"
    ):
        optimus_jax.train("gpt2-nano", lr=1, **{"optimizer.lr": 2})
    with pytest.raises(ConfigError, match="is given two values"):
        optimus_jax.find_plans("gpt2-nano", "h100:8", global_batch=8, **{"data.global_batch": 16})
    for text in (
        '{"optimizer": {"lr": 1, "learning_rate": 2}}',
        '{"lr": 1, "optimizer": {"lr": 2}}',
        '{"steps": 1, "steps": 2}',
    ):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ConfigError, match=r"two values|appears twice"):
            read_config(tmp_path / "c.json")


# Scripts.


@pytest.mark.parametrize("script", PARSERS)
def test_help_fits_a_screen_and_shows_defaults(script):
    parser = PARSERS[script]()
    parser.prog = f"optimus {script}"
    lines = parser.format_help().splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    required = {
        id(each)
        for group in parser._mutually_exclusive_groups
        if group.required
        for each in group._group_actions
    }
    assert [
        action.option_strings
        for action in parser._actions
        if action.option_strings
        and not (action.required or id(action) in required or action.dest in NO_DEFAULT)
        and "(default: " not in (action.help or "")
    ] == []


@pytest.mark.parametrize("script", COMMANDS)
def test_unknown_flags_are_refused_in_the_same_form(script):
    message = refused(PARSERS[script](), "--no-such-flag", "3")
    assert message.startswith(
        "unknown argument '--no-such-flag'\n  given: --no-such-flag 3\n  do: "
    )
    refused(PARSERS[script](), "-x")


@pytest.mark.parametrize("script", PARSERS)
def test_errors_advise_flags_that_a_script_has(script):
    """Messages of shared code name settings, which not every script takes by --set."""
    parser = PARSERS[script]()
    advised = ["data.eos=TOKEN", "data.chat_template=FILE", "data.text_field=NAME", "a.b=c"]
    with pytest.raises(ConfigError) as caught, parser.own_words():
        raise ConfigError(", or ".join(f"--set {setting}" for setting in advised))
    for text, setting in zip(str(caught.value).split(", or "), advised, strict=True):
        command, _, advice = text.rpartition("train ")
        flags = TRAIN_FLAGS if command else parser.flags()
        assert advice.partition(" ")[0] in flags, text
        assert advice.endswith((setting, setting.partition("=")[2]))


def test_aliases_work_for_flags_of_other_scripts():
    assert (
        PARSERS["generate"]().read(["--run_dir", "r", "--prompt", "--- x", "--max-tokens", "3"])[
            "max_new_tokens"
        ]
        == 3
    )
    assert PARSERS["report"]().read(["--run-dir", "r"])["run_dir"] == ["r"]
    assert PARSERS["tokenize"]().read(["--input", "a", "b", "--output=c"])["sources"] == ["a", "b"]
    given = PARSERS["launch"]().read(
        ["--nproc_per_node", "2", "--", "train.py", "--seq_len", "3", "--learning-rate", "1"]
    )
    assert (given["processes"], given["script"], given["arguments"]) == (
        2,
        "train.py",
        ["--seq_len", "3", "--learning-rate", "1"],
    )
    assert PARSERS["launch"]().read(["--processes", "2", "own.py", "--cpu_devices", "3"])[
        "arguments"
    ] == ["--cpu_devices", "3"], "another script's flags are its own"
    assert "--precision" not in refused(
        PARSERS["generate"](), "--dtype", "bf16", "--run", "r", "--prompt", "p"
    )


# Streams.


class Disk(io.TextIOBase):
    """A stream on which every write fails."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def fileno(self) -> int:
        raise OSError("none")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokenPipeError(), EXIT_NO_READER),
        (OSError(28, "No space left on device"), EXIT_USER_ERROR),
    ],
)
def test_a_failing_output_stream_ends_the_script_with_a_message(error, code, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "open_closed_streams", lambda: None)
    monkeypatch.setattr(sys, "stdout", Disk(error))
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    assert run(lambda: print("result")) == code
    assert ("No space left on device" in capsys.readouterr().err) == (code == EXIT_USER_ERROR)


def test_ctrl_c_and_user_mistakes_have_their_exit_codes(monkeypatch):
    def stopped():
        raise KeyboardInterrupt

    def wrong():
        raise ConfigError("wrong")

    for main, code in ((stopped, EXIT_INTERRUPT), (wrong, EXIT_USER_ERROR), (lambda: None, 0)):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert run(main) == code


def test_a_stream_replaces_characters_it_cannot_encode():
    binary = io.BytesIO()
    stream = io.TextIOWrapper(binary, encoding="ascii", write_through=True)
    print("caf\u00e9 \udcff", file=raising_output_errors(stream))
    assert binary.getvalue() == b"caf? ?\n"


def test_closed_full_and_ascii_streams_end_without_a_traceback(tmp_path):
    """Streams of two scripts that print and one that trains."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    schedule = f"{sys.executable} {SCRIPTS['schedule']} --stages 2 --microbatches 2"
    shell = "; ".join(
        f"( {line} ); echo $?"
        for line in (
            f"exec <&- >&- 2>&-; {schedule} --json {tmp_path}/t.json",
            f"{schedule} > /dev/full 2> {tmp_path}/full",
            f"{schedule} 2> /dev/full > {tmp_path}/shown",
            f"{sys.executable} {SCRIPTS['train']} --model nix >&- 2> {tmp_path}/train",
            f"{sys.executable} {SCRIPTS['train']} --help > /dev/full 2> {tmp_path}/help",
        )
    )
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, timeout=120, env=env
    )
    assert (done.stdout.split(), done.stderr) == (["0", "2", "0", "2", "2"], "")
    assert (tmp_path / "t.json").is_file()
    assert all("cannot be written" in (tmp_path / name).read_text() for name in ("full", "help"))
    assert "ticks, bubble" in (tmp_path / "shown").read_text()
    assert "unknown model 'nix'" in (tmp_path / "train").read_text()
    assert not any("Traceback" in path.read_text() for path in tmp_path.iterdir())


def test_a_note_on_an_alias_is_printed_once_despite_the_restart():
    """With `--cpu-devices` the program restarts itself with another setting of the C library."""
    arguments = ["--model", "no-such-model", "--learning_rate", "1e-3", "--cpu-devices", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    failed = subprocess.run(
        [sys.executable, SCRIPTS["train"], *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert failed.returncode == EXIT_USER_ERROR
    assert "no-such-model" in failed.stderr
    assert failed.stderr.count("is taken as") == 1


def test_the_names_of_all_models_are_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("optimus_jax.cli.plan").parser().read(["--model", "list"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == list(PRESETS)


@pytest.mark.parametrize(
    ("flag", "line"), [("--task", "question_answering"), ("--recipe", "electra  Clark et al.")]
)
def test_what_a_flag_can_name_is_printed(capsys, flag, line):
    with pytest.raises(SystemExit) as ended:
        PARSERS["train"]().read([flag, "list"])
    assert ended.value.code == 0
    assert f"\n{line}" in capsys.readouterr().out


def test_set_shows_all_settings_or_those_of_a_section(capsys):
    def shown(*entry, flag="--set"):
        with pytest.raises(SystemExit) as ended:
            PARSERS["train"]().read(["--model", "gpt2-nano", flag, *entry])
        assert ended.value.code == 0
        return [
            line.partition(" ")[0]
            for line in capsys.readouterr().out.splitlines()
            if not line.startswith(" ")
        ]

    everything = shown("list")
    assert everything == list(known_settings())
    for section in ("optimizer", "optimizer.lr_factors.", "model.tuning"):
        start = f"{section.rstrip('.')}."
        assert shown(section) == [name for name in everything if name.startswith(start)]
    assert shown(flag="--settings") == everything
    assert shown("optimizer", flag="--settings") == shown("optimizer")
    for one in ("lr", "optimizer.lr"):
        assert shown(one, flag="--settings") == ["optimizer.lr"]
    for wrong, said in (("optimizr", "'optimizer'"), ("xyz", "choose one of: model, ")):
        with pytest.raises(ConfigError, match=rf"(?s)no such section.*{said}"):
            PARSERS["train"]().read(["--settings", wrong])


def test_every_setting_is_described():
    wrong = [each.name for each in described_settings() if not (each.kind and each.meaning)]
    assert wrong == []
    beta = next(each for each in described_settings() if each.name == "optimizer.beta2")
    assert str(beta) == "optimizer.beta2 (float, default: 0.95)"
