"""A run that begins with a published model: its parameters, tokenizer and layout, and what is
refused before it begins.
"""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, assert_close, fitted, host_leaves
from hypothesis import given
from hypothesis import strategies as st
from plans import build, case, in_order, model_for
from published_models import MODELS, TINY_RUN, state_dict_of, write
from shared_programs import shared_programs  # noqa: F401
from tensor_weights import TensorWeights

import optimus_jax
from optimus_jax.config import Tuning
from optimus_jax.config.request import make_config
from optimus_jax.errors import CheckpointError, ConfigError, OptimusError, StoreError
from optimus_jax.mesh.boxes import split
from optimus_jax.models import finite_values
from optimus_jax.models.finite_values import is_finite
from optimus_jax.models.huggingface import from_huggingface
from optimus_jax.models.huggingface_tensors import tensor_shapes
from optimus_jax.models.shapes import model_shapes
from optimus_jax.models.tuning_checks import check_freeze
from optimus_jax.run import published_weights
from optimus_jax.run.published_weights import PublishedWeights
from optimus_jax.system.hub_model import HubModel
from optimus_jax.weights.directory import open_model, read_config
from optimus_jax.weights.published import PublishedSource, model_named

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def begun_with(run_dir):
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event["weights"] for event in events if event["event"] in ("start", "resume")]


@pytest.mark.parametrize("most_bytes", [published_weights.BOX_BYTES, 200])
@pytest.mark.parametrize(
    ("family", "kind", "of"),
    [
        (
            "llama",
            "sharded safetensors",
            case("pipe=2,fsdp=2,tensor=2", microbatches=4, zero=1),
        ),
        ("gpt2", "safetensors", case("data=2,fsdp=2,tensor=2", zero=3)),
        ("opt", "legacy bin", case("fsdp=8", zero=2)),
    ],
)
def test_the_shards_are_those_of_the_files(family, kind, of, most_bytes, tmp_path, monkeypatch):
    directory = write(family, kind, "float16", tmp_path / "model")
    model = read_config(directory)
    program = build(model, of).program
    monkeypatch.setattr(published_weights, "BOX_BYTES", most_bytes)
    source = PublishedSource.parse(str(directory), what="--model")
    state, name = PublishedWeights(source).initial_state(program, lambda text: None)
    expected = from_huggingface(state_dict_of(family, "float16"), model, program.shapes.vocab_rows)
    found = in_order(program, host_leaves(state))
    for path, leaf in host_leaves(expected).items():
        leaf = fitted(leaf, found[f"params/{path}"].shape)
        np.testing.assert_array_equal(found[f"params/{path}"], leaf, err_msg=path)
    assert name == str(directory)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == program.state_shardings


@pytest.mark.parametrize("family", ["llama", "gptj", "gpt2"])
@pytest.mark.parametrize("mesh", ["tensor=2,fsdp=4", "pipe=2,data=4"])
def test_added_tokens_begin_as_the_mean_of_the_others(family, mesh, tmp_path):
    directory = write(family, "safetensors", "float32", tmp_path / "model")
    stored = read_config(directory)
    model = replace(stored, vocab_size=stored.vocab_size + 5)
    program = build(model, case(mesh, zero=0)).program
    source, said = PublishedSource.parse(str(directory), what="--model"), []
    state, _ = PublishedWeights(source).initial_state(program, said.append)
    assert any("5 tokens" in text for text in said)
    old, new = stored.vocab_size, model.vocab_size
    whole = host_leaves(from_huggingface(state_dict_of(family), stored, old))
    tables = {path for path in whole if path.split("/")[0] in ("embedding", "head", "head_bias")}
    for path in tables:
        table = host_leaves(state)[f"params/{path}"]
        np.testing.assert_array_equal(table[:old], whole[path])
        mean = np.broadcast_to(whole[path].mean(0), table[old:new].shape)
        assert_close(table[old:new], mean, F32_RELATIVE)
        assert not table[new:].any()
    assert len(tables) == {"llama": 2, "gptj": 3, "gpt2": 1}[family]


@pytest.mark.parametrize(
    ("family", "frozen"), [("llama", "embedding, head"), ("gpt2", "embedding")]
)
def test_added_tokens_that_stay_as_they_begin_are_said(family, frozen, tmp_path):
    """With what trains them, whether or not the head is the embedding."""
    directory = write(family, "safetensors", "float32", tmp_path / "model")
    stored = read_config(directory)
    tuning = Tuning(method="lora", rank=2)
    model = replace(stored, vocab_size=stored.vocab_size + 5, tuning=tuning)
    source, said = PublishedSource.parse(str(directory), what="--model"), []
    program = build(model, case("fsdp=8", zero=3)).program
    PublishedWeights(source).initial_state(program, said.append)
    (text,) = [text for text in said if "5 tokens" in text]
    assert f"being frozen ({frozen})" in text
    found = make_config(model, {"model.tuning.freeze": text.partition("freeze=")[2]}).model
    check_freeze(found)
    leaves = jax.tree.leaves(model_shapes(found, found.vocab_size).leaves)
    assert all(leaf.trained for leaf in leaves if "vocab" in leaf.dims)
    assert not all(leaf.trained for leaf in leaves)


@pytest.fixture(scope="module", params=["f32", "nf4"])
def program(request):
    """The program of a model whose frozen matrices are stored so."""
    of = case("fsdp=8", zero=3)
    tuning = Tuning(method="lora", base_precision=request.param)
    return build(replace(model_for(of, "qwen2"), tuning=tuning), of).program


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", np.nan),
        ("float16", np.inf),
        ("bfloat16", -np.inf),
        ("bfloat16", -np.nan),
        ("float64", 1e300),
    ],
)
def test_values_that_are_not_finite_are_refused_by_their_tensor(dtype, value, program, monkeypatch):
    """In one layer's part of a leaf that holds two tensors; searched a few rows at a time."""
    monkeypatch.setattr(published_weights, "BOX_BYTES", 4000)
    monkeypatch.setattr(finite_values, "SEARCHED_BYTES", 500)
    large = 65504 if dtype == "float16" else 3e38
    tensors = {
        name: np.full(shape, large).astype(dtype)
        for name, shape in tensor_shapes(program.config.model.base).items()
    }
    TensorWeights(tensors, "here").initial_state(program, lambda text: None)
    tensors["layers.1.mlp.up_proj.weight"][-1, -1] = value
    with pytest.raises(CheckpointError, match="not finite") as caught:
        TensorWeights(tensors, "here").initial_state(program, lambda text: None)
    assert re.findall(r"layers[\w.]+", str(caught.value)) == ["layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.float64])
@given(data=st.data())
def test_any_bits_are_finite_or_not_as_numpy_says(dtype, data):
    size = np.dtype(dtype).itemsize
    bits = data.draw(st.lists(st.integers(0, 2 ** (8 * size) - 1), max_size=4))
    values = np.array(bits, f"u{size}").view(dtype)
    assert is_finite(values) == np.isfinite(values).all()


@pytest.mark.parametrize("most", [1, 3, 5, 12, 100])
def test_a_box_is_split_without_gap_or_overlap(most):
    box = (slice(2, 4), slice(0, 5), slice(1, 4))
    count = np.zeros((4, 5, 4), int)
    for part in split(box, (1, 0, 2), most):
        count[part] += 1
        assert count[part].size <= most
    assert (count[box] == 1).all()
    assert count.sum() == 30


def test_a_run_begins_with_a_published_model_and_keeps_its_tokenizer(llama, words, tmp_path):
    gone, run_dir = shutil.copytree(llama, tmp_path / "tiny-llama"), tmp_path / "run"
    command = {
        "model": str(gone),
        "run_dir": run_dir,
        "data": words,
        "mesh": "fsdp=4,tensor=2",
        "resume": "auto",
        **TINY_RUN,
    }
    optimus_jax.train(**command)
    assert begun_with(run_dir) == [str(gone)]
    config = json.loads((run_dir / "config.json").read_text())
    assert config["model"]["name"] == "tiny-llama"
    assert config["data"]["tokenizer"] == str(gone)
    assert (run_dir / "tokenizer.json").read_text() == (llama / "tokenizer.json").read_text()
    shutil.rmtree(gone)
    for steps, resume in ((2, "auto"), (3, True)):
        resumed = optimus_jax.train(**command | {"steps": steps, "resume": resume})
        assert resumed.history[-1].step == steps
    with pytest.raises(ConfigError, match="changes to init_from"):
        optimus_jax.train(**command | {"model": str(llama)})


def test_the_layout_is_planned_from_the_config_alone(llama, tmp_path):
    directory = tmp_path / "tiny-llama"
    directory.mkdir()
    shutil.copy(llama / "config.json", directory)
    (best,) = optimus_jax.find_plans(str(directory), "h100:1x2", top=1, global_batch=8)
    assert best.axes.num_devices == 2
    with pytest.raises(OptimusError, match="without a tokenizer"):
        optimus_jax.train(str(directory))
    with pytest.raises(CheckpointError, match="holds no weights"):
        optimus_jax.train(str(directory), tokenizer="bytes", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_adapters_are_trained_on_a_published_model(llama, words, tmp_path):
    tuning = {"model.tuning.method": "lora", "model.tuning.base_precision": "bf16"}
    run = {"data": words, "mesh": "fsdp=4,tensor=2", "run_dir": tmp_path / "run", **TINY_RUN}
    done = optimus_jax.train(str(llama), **run, **tuning)
    leaves = host_leaves(done.state.params)
    expected = host_leaves(
        from_huggingface(state_dict_of("llama", "bfloat16"), read_config(llama), 40)
    )
    for path, leaf in expected.items():
        found = leaves[path]
        np.testing.assert_array_equal(found.astype(np.float32), fitted(leaf, found.shape), path)
    adapters = {path: leaf for path, leaf in leaves.items() if path not in expected}
    assert all("adapter" in path for path in adapters)
    assert any(leaf.any() for path, leaf in adapters.items() if path.endswith("/b"))


def test_settings_take_precedence_over_what_a_published_model_brings(llama, words, tmp_path):
    one = {"data": words, "mesh": "data=8", **TINY_RUN}
    optimus_jax.train(str(llama), init_from="none", run_dir=tmp_path / "fresh", **one)
    assert begun_with(tmp_path / "fresh") == ["seed 0"]
    optimus_jax.train(str(llama), init_from=tmp_path / "fresh", run_dir=tmp_path / "second", **one)
    assert begun_with(tmp_path / "second") == [f"{tmp_path / 'fresh'}@1"]


def test_tokens_may_be_added_to_a_published_model_but_not_removed(llama, words, tmp_path):
    command = {"data": words, "mesh": "data=8", "run_dir": tmp_path / "run", **TINY_RUN}
    with pytest.raises(CheckpointError, match=r"(?s)can only grow.*30; .* has 37.*leave it out"):
        optimus_jax.train(str(llama), **command, **{"model.vocab_size": 30})
    optimus_jax.train(str(llama), **command, **{"model.vocab_size": 50})
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["vocab_size"] == 50


def test_another_model_or_a_broken_directory_is_refused_before_a_run_exists(llama, tmp_path):
    with pytest.raises(CheckpointError, match=r"(?s)another model.*model.family.*--model .*out"):
        optimus_jax.train("gpt2-nano", init_from=llama, run_dir=tmp_path / "run")
    settings = {"model.num_layers": 3, "model.features.activation": "relu"}
    leave_out = ", ".join(sorted(settings))
    with pytest.raises(CheckpointError, match=rf"num_layers=2, requested 3.*\n.* {leave_out} out$"):
        optimus_jax.train(str(llama), run_dir=tmp_path / "run", **settings)
    with pytest.raises(CheckpointError, match=r"leave model.mlp_dim out, and leave --model "):
        optimus_jax.train(
            "gpt2-nano", init_from=llama, run_dir=tmp_path / "run", **{"model.mlp_dim": 9}
        )
    broken = shutil.copytree(llama, tmp_path / "broken")
    shard = next(broken.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=shard.name):
        optimus_jax.train(str(broken), run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"(?s)--model names no model.*no config.json"):
        optimus_jax.train(str(tmp_path), run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"(?s)--model names no model.*is no directory"):
        optimus_jax.train(str(tmp_path / "missing"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def hub(llama, tmp_path, monkeypatch):
    """An offline cache of the hub, which has the model ORG/tiny."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--ORG--tiny"
    shutil.copytree(llama, model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    monkeypatch.chdir(tmp_path)
    return model


def test_a_model_on_the_hub_is_read_from_its_cache(hub, words, tmp_path):
    assert model_named("ORG/tiny") == model_named("hf://ORG/tiny@main")
    assert model_named("ORG/tiny").vocab_size == MODELS["llama"]["vocab_size"]
    optimus_jax.train("ORG/tiny", data=words, mesh="data=8", run_dir=tmp_path / "run", **TINY_RUN)
    assert begun_with(tmp_path / "run") == [f"hf://ORG/tiny@{COMMIT}"]
    assert (tmp_path / "run" / "tokenizer.json").exists()
    (tmp_path / "ORG").mkdir()  # from now on ORG/... are paths
    with pytest.raises(ConfigError, match="names no model"):
        model_named("ORG/tiny")


def test_a_process_reads_one_commit_of_a_model(hub):
    source, other = PublishedSource.parse("hf://ORG/tiny", what="--model"), "f" * 40
    before = source.fetched()
    shutil.copytree(hub / "snapshots" / COMMIT, hub / "snapshots" / other)
    (hub / "refs" / "main").write_text(other)  # the branch moves
    assert source.fetched() == before
    assert source.exact(before) == f"hf://ORG/tiny@{COMMIT}"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ORG/other", "not in the cache, and HF_HUB_OFFLINE is set"),
        ("hf://ORG/tiny@v2", "not in the cache, and HF_HUB_OFFLINE is set"),
    ],
)
def test_a_model_that_is_not_in_the_cache_is_one_error(hub, name, wanted):
    with pytest.raises(StoreError, match=wanted):
        model_named(name)


def test_the_hub_needs_its_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(StoreError, match=r"pip install 'optimus-jax\[hub\]'"):
        model_named("hf://ORG/tiny")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("hf://gpt2", HubModel("gpt2")),
        ("hf://a/b@x/y", HubModel("a/b", "x/y")),
        ("a/b-1.5", HubModel("a/b-1.5")),
        ("a/b@v1", HubModel("a/b", "v1")),
        ("a", None),
        ("a/b/c", None),
        ("./a/b", None),
        ("/a/b", None),
        ("~/a", None),
        ("a/tokenizer.json", None),
        ("here/b", None),
        ("s3://a/b", None),
    ],
)
def test_names_of_models_on_the_hub(text, wanted, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert HubModel.parse(text, bare=True) == wanted
    assert HubModel.parse(text) == (wanted if text.startswith("hf://") else None)
    if wanted is not None:
        assert HubModel.parse(str(wanted)) == wanted


def test_a_preset_and_a_directory_of_its_name_are_told_apart(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, "gpt2")
    with pytest.raises(ConfigError, match=r"write --model ./gpt2 for the directory"):
        model_named("gpt2")
    assert model_named("./gpt2").family == "llama"
    assert model_named("gpt2/config.json") == model_named("./gpt2")
    Path("gpt2-nano").mkdir()  # a run's, perhaps
    assert model_named("gpt2-nano").family == "gpt2"


@pytest.mark.parametrize("text", ["hf://", "hf://a/b/c", "hf://a/b.json", "hf://a/..", "hf://a@"])
def test_a_malformed_url_of_the_hub_is_refused(text):
    with pytest.raises(ConfigError, match="not the URL of a model"):
        HubModel.parse(text)


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, ORG/tiny."""

    directory: Path
    asked: list[str]

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        type(self).asked.append(f"{self.command} {self.path}")
        names = sorted(path.name for path in self.directory.iterdir())
        path, status, headers = self.path.partition("?")[0], 404, {}
        body = b'{"error": "Repository not found"}'
        if path.startswith("/api/models/ORG/tiny/revision/"):
            siblings = [{"rfilename": name} for name in names]
            info = {"id": "ORG/tiny", "sha": COMMIT, "siblings": siblings}
            status, body = 200, json.dumps(info).encode()
        elif path.startswith("/api/models/ORG/tiny/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": (self.directory / name).stat().st_size,
                    "oid": name,
                }
                for name in names
            ]
            status, body = 200, json.dumps(tree).encode()
        elif path.startswith("/ORG/tiny/resolve/"):
            name = path.rpartition("/")[2]
            if name in names:
                status, body = 200, (self.directory / name).read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{zlib.crc32(body):08x}"'}
        else:
            headers = {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_a_model_is_fetched_from_the_hub_as_far_as_it_is_needed(llama, tmp_path):
    pytest.importorskip("huggingface_hub")
    handler = type("TinyHub", (Hub,), {"directory": llama, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "from optimus_jax.weights.published import *; from optimus_jax.weights.directory import *\n"
        "source = PublishedSource.parse('ORG/tiny', what='--model')\n"
        "source.config(); print('configured'); source.tokenizer(); print(source.tokenizer())\n"
        "directory = source.fetched(); print(source.exact(directory))\n"
        "print(len(open_model(directory).tensors))\n"
        "try: model_named('ORG/other')\n"
        "except Exception as error: print(type(error).__name__, 'is not on the hub' in str(error))"
    )
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
        "no_proxy": "127.0.0.1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.stdout.splitlines() == [
        "configured",
        "hf://ORG/tiny",
        f"hf://ORG/tiny@{COMMIT}",
        str(len(open_model(llama).tensors)),
        "StoreError True",
    ], (done.stderr, handler.asked)
    fetched = [path for path in handler.asked if path.startswith("GET /ORG/tiny/resolve")]
    names = [path.rpartition("/")[2] for path in fetched]
    assert len(names) == len(set(names))
    assert names[0] == "config.json"
    assert not any(name.endswith(".safetensors") for name in names[:3])
