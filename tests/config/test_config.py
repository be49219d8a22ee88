"""A Config survives JSON and command-line text, and refuses invalid settings with a suggestion."""

import dataclasses
import json
import math
import typing
from pathlib import Path
from types import UnionType

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import (
    CheckpointConfig,
    Config,
    ControlConfig,
    DataConfig,
    DistributedConfig,
    Features,
    Generator,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RopeScaling,
)
from optimus_jax.config.aliases import ALIASES, RENAMED, RETIRED
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.model import REPLACEMENT_LABELS
from optimus_jax.config.presets import PRESETS, model_preset
from optimus_jax.config.request import (
    SHORT_NAMES,
    canonical,
    dotted,
    make_config,
    read_config,
    repeated_config,
    resumed_config,
)
from optimus_jax.config.run_checkpoint import RunCheckpoint
from optimus_jax.config.settings import field_types, section_type, setting_names
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.models.families import FAMILIES, check_family, features_of
from optimus_jax.models.shapes import model_shapes

shares = st.floats(0, 1, exclude_max=True)
sizes = st.integers(1, 10_000)
positive = st.floats(1e-12, 1e6)
texts = st.text(st.characters(codec="utf-8", exclude_characters=",\0"), min_size=1).filter(
    lambda text: text.lower() != "none"
)
paths = (
    st.text(st.characters(codec="utf-8", exclude_characters=",\0"), max_size=20)
    .filter(lambda text: "://" not in text)  # a URL in the middle of a path is refused
    .map("./{}x".format)
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    num_kv_heads, seq_len = draw(sizes), draw(sizes)
    model = ModelConfig(
        name=draw(texts),
        family=draw(st.sampled_from(sorted(FAMILIES))),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(sizes),
        max_length=seq_len + draw(st.integers(0, 9)),
        tied=draw(st.booleans()),
        rope_scaling=draw(st.none() | st.builds(RopeScaling, factor=positive)),
        features=Features(
            positions=draw(st.sampled_from((None, "none", "learned", "rotary"))),
            qk_norm=draw(st.sampled_from((None, "none", "head"))),
            biases=draw(st.sampled_from((None, (), ("query",), ("key", "value")))),
        ),
        dropout=draw(st.floats(0, 0.9)),
    )
    return Config(
        model=model,
        data=DataConfig(
            sources=tuple(draw(st.lists(paths, min_size=1))),
            seq_len=seq_len,
            respect_documents=draw(st.booleans()),
        ),
        parallel=ParallelConfig(
            zero=draw(st.sampled_from((None, 0, 1, 2, 3))),
            rules=tuple(draw(st.lists(texts))),
            remat=draw(st.sampled_from(("none", "selective", "dots", "full"))),
        ),
        controller=ControlConfig(
            allow=tuple(draw(st.lists(st.sampled_from(("data=4,tensor=2", "fsdp=8")))))
        ),
        optimizer=OptimizerConfig(
            lr=draw(st.none() | positive),
            beta1=draw(shares),
            epsilon=draw(positive),
            warmup_steps=draw(st.none() | sizes),
        ),
        steps=draw(sizes),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


@given(config=configs())
def test_config_survives_json(config):
    again = Config.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)


def test_a_generator_is_given_by_its_sizes():
    config = Config(model=model_preset("electra-nano"))
    sizes = {"model.generator.embed_dim": "32", "model.generator.num_heads": "1"}
    assert config.with_values(sizes).model.generator == Generator(
        num_layers=4, embed_dim=32, num_heads=1, mlp_dim=256
    )
    assert Config.from_json(config.to_json()) == config


@given(config=configs())
def test_every_setting_survives_the_command_line(config):
    def text_of(name: str) -> tuple[object, str]:
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        return value, (
            (";" if name == "controller.allow" else ",").join(value)
            if isinstance(value, tuple)
            else str(value)
        )

    given = {
        name: text_of(name)
        for name in setting_names(Config)
        if not (name.startswith("model.rope_scaling") and config.model.rope_scaling is None)
        and not name.startswith("model.generator")
    }
    assert config.with_values({name: text for name, (_, text) in given.items()}) == config
    assert config.with_values({name: value for name, (value, _) in given.items()}) == config


def test_every_field_has_a_setting_name_and_short_names_exist():
    def leaves(value: object) -> int:
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        return sum(leaves(getattr(value, field.name)) for field in fields) if fields else 1

    names = setting_names(Config)
    whole = ModelConfig(
        family="electra",
        rope_scaling=RopeScaling(),
        labels=REPLACEMENT_LABELS,
        labelled="replacement",
        generator=Generator(),
    )
    assert len(names) == len(set(names)) == leaves(Config(model=whole))
    assert set(SHORT_NAMES.values()) <= set(names)


def test_settings_of_one_process_are_not_saved():
    config = Config(distributed=DistributedConfig(coordinator="h:1", num_processes=2, process_id=1))
    assert Config.from_json(config.to_json()) == Config()
    assert "h:1" not in config.to_json()


def test_settings_of_one_start_are_not_saved():
    config = Config(data=DataConfig(allow_change=True))
    assert not Config.from_json(config.to_json()).data.allow_change
    resumed = resumed_config(config.to_json(), None, {"data.allow_change": "true"})
    assert resumed.data.allow_change


def test_derived_values_are_in_the_json_but_not_read_back():
    config = Config(steps=7)
    text = config.to_json(derived={"optimizer.lr": 0.5})
    assert json.loads(text)["derived"] == {"optimizer.lr": 0.5}
    assert Config.from_json(text) == config


def test_saved_config_can_start_another_run(tmp_path):
    (tmp_path / "config.json").write_text(
        make_config("llama-nano", {"steps": 7, "lr": 0.5}).to_json()
    )
    base = read_config(tmp_path / "config.json")
    assert make_config(None, {"lr": 0.25}, base) == make_config(
        "llama-nano", {"steps": 7, "lr": 0.25}
    )
    assert make_config("gpt2-nano", {}, base) == make_config("gpt2-nano", {"steps": 7, "lr": 0.5})
    (tmp_path / "config.json").write_bytes(b"\xff")
    for path in (tmp_path / "config.json", tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError, match="a config cannot be read"):
            read_config(path)


def test_paths_given_in_python_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cwd = str(tmp_path)
    for data in ("a,b.txt", Path("a,b.txt"), [Path("a,b.txt")]):
        assert make_config("gpt2", {"data": data}).data.sources == (f"{cwd}/a,b.txt",)
    assert make_config("gpt2", {"data": ["a", Path("b")]}).data.sources == (
        f"{cwd}/a",
        f"{cwd}/b",
    )
    assert make_config("gpt2", {"tokenizer": tmp_path / "t.json"}).data.tokenizer == str(
        tmp_path / "t.json"
    )
    assert make_config("gpt2", {"data.sources": "a,b.txt"}).data.sources == (
        f"{cwd}/a",
        f"{cwd}/b.txt",
    ), "as --set has it"


def test_paths_of_data_become_absolute_and_special_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    named = {
        "stdlib": "stdlib",
        "../*.txt": f"{tmp_path.parent}/*.txt",
        "~/b": "/home/me/b",
        "gs://bucket/c": "gs://bucket/c",
        "/d": "/d",
    }
    config = make_config("gpt2", {"data": list(named), "tokenizer": "t.json"})
    assert config.data.sources == tuple(named.values())
    assert config.data.tokenizer == str(tmp_path / "t.json")
    assert make_config("gpt2", {}).data.tokenizer == "bytes"


def test_resumed_run_may_find_its_data_and_tokenizer_elsewhere():
    text = make_config("gpt2", {"data": "/a.txt", "tokenizer": "/t.json"}).to_json()
    moved = {
        "data": "/b/a.jsonl.gz",
        "tokenizer": "/b/t.json",
        "data.text_field": "body",
        "data.skip_bad_lines": True,
        "data.eos": "</s>",
    }
    assert resumed_config(text, None, moved).data.sources == ("/b/a.jsonl.gz",)
    assert repeated_config(text, make_config("gpt2", moved)).data.tokenizer == "/b/t.json"
    for name, value in {"seed": 3, "data.eval_fraction": 0.5, "seq_len": 7}.items():
        with pytest.raises(ConfigError, match=name):
            resumed_config(text, None, moved | {name: value})
        with pytest.raises(ConfigError, match=name):
            repeated_config(text, make_config("gpt2", moved | {name: value}))


def test_rotary_positions_need_an_even_head_dim():
    check_family(ModelConfig(family="llama", head_dim=34))
    check_family(ModelConfig(family="gpt2", head_dim=33))
    with pytest.raises(ConfigError, match=r"odd number(.|\n)*model.head_dim=33(.|\n)*32 or 34"):
        check_family(ModelConfig(family="llama", head_dim=33))


@pytest.mark.parametrize(("name", "family"), [("positions", "gpt2"), ("qk_norm", "qwen3")])
def test_a_feature_can_be_none_where_its_family_has_one(name, family):
    config = Config().with_values({"model.family": family, f"model.features.{name}": "none"})
    assert getattr(features_of(config.model), name) == "none"


def test_a_family_that_changes_after_its_use_is_refused(monkeypatch):
    model = ModelConfig(family="mine")
    for _ in range(2):  # the same row again is no change
        monkeypatch.setitem(FAMILIES, "mine", dataclasses.replace(FAMILIES["gpt2"]))
        check_family(model)
    monkeypatch.setitem(FAMILIES, "mine", FAMILIES["llama"])
    with pytest.raises(ConfigError, match="'mine' has changed since it was first used"):
        check_family(model)


def test_sinusoidal_positions_need_an_even_width():
    sinusoids = Features(positions="sinusoid")
    check_family(ModelConfig(embed_dim=254, features=sinusoids))
    with pytest.raises(ConfigError, match=r"as many sines as cosines(.|\n)*embed_dim=255"):
        check_family(ModelConfig(embed_dim=255, features=sinusoids))


def test_settings_left_open_are_derived():
    assert Config(model=ModelConfig(max_length=4096)).seq_len == 1024
    assert Config(model=ModelConfig(max_length=256)).seq_len == 256
    assert Config(steps=300).warmup_steps == 15
    assert Config(steps=10**6).warmup_steps == 2000
    assert Config(optimizer=OptimizerConfig(warmup_steps=0)).warmup_steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer.bta2": 0.9},
            r"unknown setting 'optimizer.bta2'(.|\n)*did you mean 'optimizer.beta2'",
        ),
        (
            {"optimiser.beta2": 0.9},
            r"unknown setting 'optimiser.beta2'(.|\n)*did you mean 'optimizer.beta2'",
        ),
        ({"optimizer": 3}, r"unknown setting 'optimizer'"),
        (
            {"model.rope_scaling.low_frequency_factor": 4.0},
            r"must be below(.|\n)*low_frequency_factor=4.0, high_frequency_factor=4.0",
        ),
        (
            {"optimizer": {"bta2": 3}},
            r"unknown setting 'optimizer.bta2'(.|\n)*did you mean 'beta2'",
        ),
        ({"steps.more": 3}, r"unknown setting 'steps.more'"),
        ({"steps": "many"}, r"steps has the wrong type(.|\n)*'many' \(str\)(.|\n)*type int"),
        ({"steps": 1.5}, r"steps has the wrong type(.|\n)*1.5"),
        ({"steps": True}, r"steps has the wrong type"),
        ({"optimizer.lr": "nan"}, r"optimizer.lr must be finite"),
        ({"model.tied": "maybe"}, r"model.tied has the wrong type(.|\n)*type bool"),
        ({"data.sources": 3}, r"data.sources has the wrong type(.|\n)*3 \(int\)(.|\n)*type tuple"),
        ({"data.sources": (3,)}, r"data.sources has the wrong type"),
        ({"parallel.remat": "dot"}, r"unknown value for parallel.remat(.|\n)*did you mean 'dots'"),
        (
            {"precision.compute": "fp16"},
            r"unknown value for precision.compute(.|\n)*did you mean 'f16'",
        ),
        ({"steps": 0}, r"steps must be positive(.|\n)*Config.steps=0"),
        ({"model.embed_dim": -3}, r"embed_dim must be positive"),
        (
            {"model.num_kv_heads": 5},
            (
                r"multiple of model.num_kv_heads(.|\n)*num_heads=12, num_kv_heads=5(.|\n)*divisor"
                r" of 12"
            ),
        ),
        ({"model.dropout": 1}, r"dropout is a probability"),
        ({"data.sources": ()}, r"no data was named"),
        ({"data.eval_fraction": 1}, r"eval_fraction must be a fraction"),
        ({"parallel.zero": 4}, r"parallel.zero must be a ZeRO stage(.|\n)*choose 0, 1, 2 or 3"),
        ({"optimizer.beta1": 1.5}, r"optimizer.beta1 must be at least 0 and below 1"),
        ({"optimizer.clip_norm": -1}, r"optimizer.clip_norm cannot be negative"),
        ({"optimizer.beta1": 1}, r"optimizer.beta1 must be at least 0(.|\n)*less than 1"),
        ({"optimizer.beta2": 1.0}, r"optimizer.beta2 must be at least 0 and below 1"),
        ({"model.init_std": -1}, r"model.init_std cannot be negative"),
        ({"model.features.window": -1}, r"window cannot be negative"),
        ({"model.features.head_softcap": -30.0}, r"head_softcap cannot be negative"),
        ({"seed": -1}, r"seed is out of range"),
        ({"seed": 3_000_000_000}, r"seed is out of range(.|\n)*3000000000(.|\n)*0 to 2147483647"),
        ({"eval_every": -1}, r"cannot be negative"),
        (
            {"data.seq_len": 2048},
            (
                r"exceeds the longest sequence of custom(.|\n)*data.seq_len=2048,"
                r" model.max_length=1024(.|\n)*--seq-len 1024"
            ),
        ),
        ({"control": "sometimes"}, r"auto"),
        ({"controller.budget_share": 1.5}, r"budget_share must be a fraction"),
        ({"controller.max_switches": -1}, r"max_switches cannot be negative"),
        ({"controller.window_steps": 0}, r"window_steps must be positive"),
        ({"distributed.process_id": 1}, r"needs all three distributed settings"),
        (
            {
                "distributed.coordinator": "h:1",
                "distributed.num_processes": 2,
                "distributed.process_id": 2,
            },
            r"process-id must lie below(.|\n)*0 to 1",
        ),
        (
            {
                "distributed.coordinator": "h:1",
                "distributed.num_processes": 0,
                "distributed.process_id": 0,
            },
            r"num_processes must be positive",
        ),
        (
            {
                "distributed.coordinator": "h:1",
                "distributed.num_processes": 10**9,
                "distributed.process_id": 0,
            },
            r"the number of processes is too large",
        ),
        *(
            (
                {
                    "distributed.coordinator": address,
                    "distributed.num_processes": 2,
                    "distributed.process_id": 0,
                },
                r"a host and a port(.|\n)*HOST:PORT",
            )
            for address in ("foo", "foo:", ":1", "foo:bar", "foo:0", "foo:65536")
        ),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config().with_values(settings)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"model": 3}', '{"modle": {}}'])
def test_json_that_is_no_config_is_refused(text):
    with pytest.raises(ConfigError, match="do: "):
        Config.from_json(text)


def test_unknown_names_get_the_nearest_as_a_suggestion():
    with pytest.raises(
        ConfigError, match=r"unknown model 'lama3-8b'(.|\n)*did you mean 'llama3-8b'"
    ):
        make_config("lama3-8b", {})
    with pytest.raises(ConfigError, match=r"unknown model 'xyz'(.|\n)*choose one of: gpt2-nano, "):
        model_preset("xyz")
    for model in (3, ["gpt2"], Path("gpt2")):
        with pytest.raises(ConfigError, match=r"unknown model (.|\n)*choose one of|did you mean"):
            model_preset(model)
    with pytest.raises(ConfigError, match=r"unknown model family 'gpt'(.|\n)*did you mean 'gpt2'"):
        features_of(ModelConfig(family="gpt"))
    with pytest.raises(
        ConfigError,
        match=(
            r"unknown setting 'global_bach'(.|\n)*global_bach=3(.|\n)*did you mean 'global_batch'"
        ),
    ):
        make_config("gpt2", {"global_bach": 3})


def test_short_and_dotted_names_mean_the_same():
    assert make_config("gpt2", {"lr": "1e-3", "mesh": "data=2"}) == make_config(
        "gpt2", {"optimizer.lr": 1e-3, "parallel.mesh": "data=2"}
    )
    assert make_config("gpt2", {"lr": 1e-3}).optimizer.lr == 1e-3


def test_a_resumed_run_keeps_its_model_data_and_seed():
    saved = make_config("gpt2-nano", {"steps": 10}).to_json()
    assert resumed_config(saved, None, {"steps": 20, "mesh": "data=4"}).steps == 20
    assert resumed_config(saved, "gpt2-nano", {"global_batch": 16}).parallel.mesh == "auto"
    for model, overrides, changed in (
        (None, {"seed": 1}, "seed"),
        (None, {"global_batch": 8}, "data.global_batch"),
        ("gpt2", {}, "model"),
        (None, {"model.num_layers": 2}, "model.num_layers"),
    ):
        with pytest.raises(
            ConfigError, match=f"keeps its model, data and seed(.|\\n)*changes to {changed}"
        ):
            resumed_config(saved, model, overrides)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2", 124.4),
        ("gpt2-medium", 354.8),
        ("gpt2-large", 774.0),
        ("gpt2-xl", 1557.6),
        ("llama2-7b", 6738.4),
        ("llama2-13b", 13015.9),
        ("llama3-8b", 8030.3),
        ("llama3.2-1b", 1235.8),
        ("llama3.3-70b", 70553.7),
        ("gpt2-nano", 3.3),
        ("llama-nano", 3.0),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, millions):
    model = model_preset(name)
    assert model.name == name
    assert round(model_shapes(model, model.vocab_size).num_params / 1e6, 1) == millions
    assert set(PRESETS) >= {name}


def test_every_section_is_frozen_and_fits_into_json():
    for section in (
        ModelConfig,
        DataConfig,
        ParallelConfig,
        OptimizerConfig,
        PrecisionConfig,
        CheckpointConfig,
        LogConfig,
        Config,
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section(), dataclasses.fields(section)[0].name, None)
        assert json.loads(json.dumps(dataclasses.asdict(section())))


def numbers_of(cls, prefix=""):
    """The dotted names of the settings that are numbers."""
    for name, kind in field_types(cls).items():
        if section := section_type(kind):
            yield from numbers_of(section, f"{prefix}{name}.")
        elif {int, float} & {kind, *(typing.get_args(kind) if isinstance(kind, UnionType) else ())}:
            yield prefix + name


def test_every_number_has_to_be_finite_wherever_it_comes_from():
    """As text of a flag or `--set`, in Python, in JSON, and in a section that was built
    directly."""
    names = list(numbers_of(Config))
    assert len(names) > 60
    for name in names:
        for value in ("nan", "inf", "-Infinity", "1e999", math.nan, -math.inf):
            with pytest.raises(ConfigError, match=rf"^{name} must be finite\n  given: {name}="):
                make_config("gpt2-nano", {name: value})
    for text in ("NaN", "Infinity", "1e999", '"nan"'):
        with pytest.raises(ConfigError, match=r"^optimizer.lr must be finite"):
            Config.from_json(f'{{"optimizer": {{"lr": {text}}}}}')
    with pytest.raises(ConfigError, match=r"^optimizer.weight_decay must be finite"):
        Config(optimizer=OptimizerConfig(weight_decay=math.nan))
    with pytest.raises(ConfigError, match=r"^model.rope_scaling.factor must be finite"):
        Config(model=ModelConfig(rope_scaling=RopeScaling(factor=math.inf)))
    with pytest.raises(ConfigError, match=r"^optimizer.lr must be finite"):
        make_config("gpt2-nano", {"lr": 10**400})


def test_mesh_is_parsed_when_settings_are_checked():
    config = make_config("gpt2-nano", {"mesh": "data=2, tensor=4", "controller.allow": "fsdp=8"})
    assert config.parallel.axes == AxisSizes(data=2, tensor=4)
    assert config.controller.allowed_axes == (AxisSizes(fsdp=8),)
    assert config.parallel.mesh == "data=2, tensor=4", "as it was typed"
    assert make_config("gpt2-nano", {"mesh": "auto"}).parallel.axes is None
    with pytest.raises(PlanError, match="unknown mesh axis 'dta'"):
        make_config("gpt2-nano", {"mesh": "dta=8"})
    with pytest.raises(PlanError, match=r"(?s)does not list meshes.*controller.allow=fsdp"):
        make_config("gpt2-nano", {"controller.allow": "fsdp"})


def test_an_open_layout_keeps_what_does_not_depend_on_the_devices():
    parallel = ParallelConfig(
        mesh="pipe=2,fsdp=4",
        zero=1,
        microbatches=4,
        schedule="interleaved",
        repeats=2,
        layers_per_stage=(1, 1, 1, 1),
        rules=("mlp=none",),
        remat="full",
    )
    assert parallel.with_open_layout() == ParallelConfig(rules=("mlp=none",), remat="full")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_settings_are_read_under_their_earlier_names(old, new):
    assert canonical([(old, "none", f"--set {old}=none")]) == {new: "none"}
    section, _, name = old.partition(".")
    stored = json.loads(Config().to_json())
    stored[section] = {name: "none"}
    assert Config.from_json(json.dumps(stored)) == Config().with_values({new: "none"})


@pytest.mark.parametrize(
    ("text", "run", "step"),
    [
        ("runs/a", "runs/a", None),
        ("runs/a@500", "runs/a", 500),
        ("runs/a@500/", "runs/a@500/", None),
        ("me@host/a", "me@host/a", None),
        ("s3://bucket/a@7", "s3://bucket/a", 7),
    ],
)
def test_a_checkpoint_is_named_by_its_run_and_step(text, run, step):
    named = RunCheckpoint.parse(text, what="--init-from")
    assert (named.run, named.step) == (run, step)
    assert str(named) == text
    whole = named.with_whole_path()
    assert whole == RunCheckpoint.parse(str(whole), what="--init-from")
    assert Path(whole.run) == Path(run).absolute() if "://" not in run else whole == named
    config = make_config("gpt2-nano", {"init_from": text})
    assert Config.from_json(config.to_json()).init_from == str(whole)
    with pytest.raises(ConfigError, match="--init-from"):
        Config(init_from="ftp://x/y@3")


@pytest.mark.parametrize(
    ("name", "value"), [("lora_r", 8), ("model.tuning.targets", "qkvo"), ("lora_alpha", 2.0)]
)
def test_settings_of_adapters_need_adapters(name: str, value: object):
    """A newcomer who forgets the method would train the whole model at an adapter's rate."""
    settings = {ALIASES.get(name, name): value}
    with pytest.raises(ConfigError, match=r"(?s)without adapters.*model.tuning.method=lora"):
        make_config("llama-nano", settings)
    make_config("llama-nano", {**settings, "model.tuning.method": "lora"})


@pytest.mark.parametrize("name", ["rank", "alpha", "rank_scaling"])
def test_settings_of_another_method_are_refused(name: str):
    value = {"rank_scaling": "sqrt_rank"}.get(name, 4)
    settings = {f"model.tuning.{name}": value, "model.tuning.targets": "key"}
    with pytest.raises(ConfigError, match=rf"ia3 has no such setting\n.*{name}={value}; .*=ia3\n"):
        make_config("llama-nano", {**settings, "model.tuning.method": "ia3"})
    make_config("llama-nano", {**settings, "model.tuning.method": "lora"})


def test_codes_of_another_run_are_decoded_by_a_setting_that_the_error_names():
    nf4 = make_config(
        "llama-nano", {"model.tuning.method": "lora", "model.tuning.base_precision": "nf4"}
    )
    with pytest.raises(ConfigError, match=r"or set model.tuning.base_precision=f32$"):
        nf4.with_values({"model.tuning.method": "none"})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("optimizer.lr_factors.atention", "did you mean 'optimizer.lr_factors.attention'"),
        ("lr_factors.mlps", "did you mean 'optimizer.lr_factors.mlp'"),
        ("optimizer.lr_factors.foo", "choose one of: optimizer.lr_factors.embedding, "),
        ("optimizer.lr_factors.attn", "choose one of: optimizer.lr_factors.embedding, "),
        ("lr_factors", "choose one of: optimizer.lr_factors.embedding, "),
        ("optimizer.lr_factors", "choose one of: optimizer.lr_factors.embedding, "),
        ("model.features.num_layers", "did you mean 'model.num_layers'"),
    ],
)
def test_unknown_settings_of_an_inner_section_suggest_those_of_that_section(name, advice):
    with pytest.raises(ConfigError) as caught:
        make_config("gpt2-nano", {name: 2.0})
    assert str(caught.value).partition("do: ")[2].strip().startswith(advice)


def test_an_adapter_needs_its_projection():
    lora = {"model.tuning.method": "lora", "model.tuning.targets": "gate,up"}
    check_family(make_config("llama-nano", lora).model)
    with pytest.raises(ConfigError, match="has no projection 'gate'"):
        check_family(make_config("gpt2-nano", lora).model)


@pytest.mark.parametrize("old", RETIRED)
def test_retired_settings_are_ignored_in_stored_configs_and_explained_elsewhere(old):
    section, _, name = old.partition(".")
    stored = json.loads(Config().to_json())
    stored[section] = {name: 0.5}
    assert Config.from_json(json.dumps(stored)) == Config()
    with pytest.raises(ConfigError, match=rf"(?s)no setting {old} any more.*budget_share"):
        canonical([(old, "0.5", f"--set {old}=0.5")])


@pytest.mark.parametrize(
    "mesh", ["data=2,fsdp=4", {"data": 2, "fsdp": 4}, AxisSizes(data=2, fsdp=4)], ids=str
)
def test_a_mesh_is_a_text_a_dict_or_sizes(mesh):
    config = make_config("gpt2-nano", dotted({"mesh": mesh}))
    assert config.parallel.axes == AxisSizes(data=2, fsdp=4)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (8, r"sizes of its axes(.|\n)*mesh=8 \(int\)(.|\n)*\"fsdp\": 4"),
        ({}, "sizes of its axes"),
        ({"model": 2}, "unknown mesh axis 'model'"),
        ({"data": 2.5}, "one whole number"),
        (jax.sharding.AbstractMesh((2,), ("data",)), "makes the Mesh of JAX itself"),
    ],
    ids=str,
)
def test_another_mesh_is_refused(mesh, message):
    with pytest.raises((ConfigError, PlanError), match=message):
        make_config("gpt2-nano", dotted({"mesh": mesh}))
