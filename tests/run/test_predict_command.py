"""Labels and answers that trained models give to records without labels."""

import contextlib
import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.cli import main as cli
from optimus_jax.cli.predict import _rename_to_new
from optimus_jax.config import Config
from optimus_jax.config.model import CLASS_TOKEN, PATCH_TOKEN
from optimus_jax.config.presets import model_preset
from optimus_jax.data import unlabelled
from optimus_jax.data.images import StoredImage, decoded, patches_of
from optimus_jax.errors import ConfigError, DataError, OptimusError
from optimus_jax.inference.loaded_model import _check_tokens_used
from optimus_jax.inference.model_on_mesh import ModelOnMesh
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.shapes import model_shapes
from optimus_jax.run import predict
from optimus_jax.run.predict import label_model_config
from optimus_jax.training.task import scaled

SIZES = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
    "model.max_length": 48,
    "model.init_std": 0.3,
    "seq_len": 48,
}
TINY = {
    "global_batch": 8,
    "lr": 1e-3,
    "steps": 1,
    "mesh": "data=8",
    "eval_every": 0,
    "progress": "none",
    "control": "off",
    "data.eval_fraction": 0.0,
}
EOS = 256
"""Of the tokenizer of bytes: before and after each text."""
MESHES = ("", "data=2", "tensor=2")
RNG = np.random.default_rng(0)
TEXTS = ["".join(RNG.choice(list("abcdé "), RNG.integers(1, 30))) for _ in range(7)] + ["z" * 80]
WORDS = [text.split() or ["a"] for text in TEXTS]
QUESTIONS = [
    {"question": text[:9], "context": " ".join(words)}
    for text, words in zip(TEXTS, WORDS, strict=True)
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def train(folder, name, model, records, **settings):
    data = write(folder / f"{name}.jsonl", records)
    return optimus_jax.train(model, data=data, run_dir=folder / name, **TINY | settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each kind, by name, all but the last of texts."""
    folder = tmp_path_factory.mktemp("runs")
    labels = ["one", "two", "six"]
    texts = [{"text": text, "label": labels[len(text) % 3]} for text in TEXTS]
    words = [
        {"text": words, "labels": [labels[len(word) % 3] for word in words]} for words in WORDS
    ]
    answers = [
        {**one, "answers": {"text": [one["context"][:1]], "answer_start": [0]}} for one in QUESTIONS
    ]
    return {
        "texts": train(folder, "texts", "bert-nano", texts, task="classification", **SIZES),
        "last": train(folder, "last", "gpt2-nano", texts, task="classification", **SIZES),
        "words": train(folder, "words", "bert-nano", words, task="token_classification", **SIZES),
        "answers": train(
            folder, "answers", "bert-nano", answers, task="question_answering", **SIZES
        ),
    }


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A run on images, and a folder of them."""
    pillow = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("images")
    for number in range(24):
        place = folder / "data" / str(number % 3)
        place.mkdir(parents=True, exist_ok=True)
        pixels = RNG.integers(0, 256, (8, 8), dtype=np.uint8)
        pillow.fromarray(pixels).save(place / f"{number}.png")
    run = optimus_jax.train(
        "vit-nano", data=folder / "data", run_dir=folder / "run", **TINY, **{"model.init_std": 0.3}
    )
    return run, folder / "data"


def model_of(run):
    return Config.from_json((run.run_dir / "config.json").read_text()).model


def chances(run, tokens, *, types=None, patches=None, over=-1):
    """Probabilities at each of some tokens, [L, N]: the model on one device, and one record at a
    time.

    Args:
      over: the dimension over which they add up to 1; 0: tokens, -1: labels.
    """
    config, params = model_of(run), jax.device_get(run.state.params)
    comm = Collectives(jnp.dtype(jnp.float32))
    model = model_shapes(config, config.vocab_size).module(params, comm)
    context, tokens = ForwardContext(comm=comm, kernel="xla"), jnp.asarray([tokens], jnp.int32)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    types = None if types is None else jnp.asarray([types], jnp.int32)

    @jax.jit
    def forward(tokens, types, patches):
        x = model.embed(tokens, places, context, types, patches)
        x = model.run_layers(x, places, context).x_BLD
        return model.logits(model.head_input(x, comm), context)[0]

    return np.asarray(jax.nn.softmax(forward(tokens, types, patches), over))


def framed(text):
    return [EOS, *text.encode()[: SIZES["seq_len"] - 2], EOS]


def loaded(run, mesh):
    return optimus_jax.load(run.run_dir, mesh=mesh, warn=lambda text: None)


def assert_alike(found, expected):
    """Equal, but for rounding of scores."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            if name in ("score", "scores"):
                assert one[name] == pytest.approx(other[name], rel=F32_RELATIVE)
            else:
                assert one[name] == other[name]


def expected_labels(run, text, place):
    of_labels = chances(run, framed(text) if place == 0 else framed(text)[1:])[place]
    ranked = sorted(
        zip(model_of(run).labels, map(float, of_labels), strict=True), key=lambda pair: -pair[1]
    )
    return {"label": ranked[0][0], "score": ranked[0][1], "scores": dict(ranked)}


@pytest.mark.parametrize(("name", "place"), [("texts", 0), ("last", -1)])
def test_texts_have_the_labels_of_the_model_on_every_mesh(runs, name, place):
    texts = TEXTS if name == "texts" else TEXTS[:-1]  # the long one keeps other tokens
    expected = [expected_labels(runs[name], text, place) for text in texts]
    assert len({one["label" if name == "texts" else "score"] for one in expected}) > 1
    for mesh in MESHES if name == "texts" else MESHES[:1]:
        assert_alike(loaded(runs[name], mesh).predict(texts), expected)


def test_words_have_labels(runs):
    expected = []
    for words in WORDS:
        of_tokens = chances(runs["words"], framed(" ".join(words)))
        starts = np.cumsum([1, *(len(word.encode()) + 1 for word in words[:-1])])
        seen = [place if place < len(of_tokens) - 1 else None for place in starts.tolist()]
        labels, names = (
            [None if at is None else of_tokens[at] for at in seen],
            model_of(runs["words"]).labels,
        )
        expected.append(
            {
                "words": words,
                "labels": [each if each is None else names[each.argmax()] for each in labels],
                "scores": [each if each is None else float(each.max()) for each in labels],
            }
        )
    records = [{"text": words} for words in WORDS]
    for mesh in MESHES:
        assert_alike(loaded(runs["words"], mesh).predict(records), expected)
    assert len({label for one in expected for label in one["labels"]}) > 1
    [of_text] = loaded(runs["words"], "").predict("ab  c" + " d" * 40)
    assert of_text["words"][:3] == ["ab", "c", "d"]
    assert of_text["labels"][-1] is None, "it does not fit"
    assert of_text["labels"][0] is not None


def best_span(run, record, most):
    """The likeliest answer, by trying all."""
    asked, text = record["question"].encode(), record["context"]
    first = len(asked) + 2
    tokens = [EOS, *asked, EOS, *text.encode(), EOS]
    types = [0] * first + [1] * (len(tokens) - first)
    of_tokens = chances(run, tokens, types=types, over=0)
    character = [n for n, each in enumerate(text) for _ in each.encode()]
    best = {"answer": None, "start": None, "end": None, "score": of_tokens[0, 0] * of_tokens[0, 1]}
    for begin in range(len(character)):
        for end in range(begin, min(begin + most, len(character))):
            score = of_tokens[first + begin, 0] * of_tokens[first + end, 1]
            start, stop = character[begin], character[end] + 1
            if score > best["score"]:
                best = {"answer": text[start:stop], "start": start, "end": stop, "score": score}
    if text := best["answer"]:
        best["start"] += len(text) - len(text.lstrip())
        best["answer"] = text.strip()
        best["end"] = best["start"] + len(best["answer"])
    return best


def test_questions_have_the_likeliest_answers(runs):
    records = [*QUESTIONS[:-1], {"question": "what", "context": ""}]
    for most in (30, 2):
        expected = [best_span(runs["answers"], record, most) for record in records]
        for mesh in MESHES if most == 2 else MESHES[:1]:
            model = loaded(runs["answers"], mesh)
            assert_alike(model.predict(records, max_answer_tokens=most), expected)
    assert {one["answer"] is None for one in expected} == {True, False}


def test_images_have_the_labels_of_the_model_on_every_mesh(images, tmp_path):
    run, folder = images
    paths = sorted(folder.rglob("*.png"))[::3]
    model, expected = model_of(run), []
    tokens = [CLASS_TOKEN, *[PATCH_TOKEN] * (model.max_length - 1)]
    for path in paths:
        patches = patches_of(decoded(StoredImage(path.name, path, None), model), model.patch_size)
        patches = scaled(jnp.asarray(np.pad(patches, ((1, 0), (0, 0)))[None]), model)
        of_labels = chances(run, tokens, patches=patches)[0]
        label = model.labels[of_labels.argmax()]
        expected.append({"file": str(path), "label": label, "score": float(of_labels.max())})
    assert len({one["label"] for one in expected}) > 1
    for mesh in MESHES:
        found = loaded(run, mesh).predict(paths, top=2)
        assert [next(iter(one.pop("scores"))) for one in found] == [
            one["label"] for one in expected
        ]
        assert_alike(found, expected)
    [alone] = loaded(run, "").predict(str(paths[0]))
    assert alone["file"] == str(paths[0])
    assert len(alone["scores"]) == 3
    optimus_jax.export(run.run_dir, tmp_path / "exported")
    published = optimus_jax.load(tmp_path / "exported", warn=lambda text: None)
    assert published.step is None
    assert_alike(published.predict(folder, top=3), loaded(run, "").predict(folder, top=3))
    with pytest.raises(DataError, match="images are read from files"):
        loaded(run, "").predict([{"image": b""}])
    _check_tokens_used(tmp_path / "exported", "<end>", None)


def test_answers_come_before_the_last_image_is_read(images, tmp_path):
    run, folder = images
    paths = [*map(str, sorted(folder.rglob("*.png"))[:8]), str(tmp_path / "broken.png")]
    (tmp_path / "broken.png").write_text("no image")
    answers, found = loaded(run, "").loaded.predict(tuple(paths), batch_size=8), []
    with pytest.raises(OptimusError, match="batches of records cannot be made"):
        found.extend(iter(lambda: next(answers)["file"], None))
    assert found == paths[:8]


def command(monkeypatch, capsys, *words):
    """Exit code, answers and errors of `optimus predict`."""
    monkeypatch.setattr(sys, "argv", ["optimus", "predict", *map(str, words)])
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    capsys.readouterr()
    code = cli.main()
    shown = capsys.readouterr()
    return code, [json.loads(line) for line in shown.out.splitlines()], shown.err


def test_the_command_writes_a_line_for_each_record(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(unlabelled, "RECORDS_AT_ONCE", 4)
    run = runs["texts"]
    expected = loaded(run, "").predict(TEXTS, top=2)
    data = write(tmp_path / "new.jsonl", [{"body": text} for text in TEXTS])
    out = tmp_path / "out.jsonl"
    words = ["--run", run.run_dir, "--data", data, "--set", "data.text_field=body", "--top", 2]
    mesh = ("--mesh", "pipe=2,data=2,tensor=2", "--batch-size", 16)
    code, found, _ = command(monkeypatch, capsys, *words, *mesh)
    assert code == 0
    assert {len(one["scores"]) for one in found} == {2}
    assert_alike(found, expected)
    code, shown, _ = command(monkeypatch, capsys, *words, "--mesh", "fsdp=8", "--output", out)
    assert (code, shown) == (0, [])
    written = out.read_text(encoding="utf-8")
    assert_alike([json.loads(line) for line in written.splitlines()], expected)
    code, _, error = command(monkeypatch, capsys, *words, "--output", out)
    assert code == 2
    assert "a new file" in error
    assert out.read_text(encoding="utf-8") == written
    assert {path.name for path in tmp_path.iterdir()} == {"new.jsonl", "out.jsonl"}


def test_a_partial_file_stays_and_no_other_is_lost(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(unlabelled, "RECORDS_AT_ONCE", 4)
    data = write(tmp_path / "new.jsonl", [*({"text": text} for text in TEXTS[:5]), {"text": 3}])
    out, other = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    other.write_text("mine")
    words = ["--run", runs["texts"].run_dir, "--data", data, "--output", out, "--mesh", "data=8"]
    code, _, error = command(monkeypatch, capsys, *words)
    assert code == 2
    assert "line 6" in error
    assert "cannot be written" not in error
    assert not out.exists()
    [part] = {*tmp_path.iterdir()} - {data, other}
    assert f"the answers so far are in {part}" in error
    assert len(part.read_text(encoding="utf-8").splitlines()) == 4
    assert other.read_text() == "mine"
    out.write_text("made meanwhile")
    with pytest.raises(FileExistsError):
        _rename_to_new(part, out)
    assert out.read_text() == "made meanwhile"

    def no_link(*_):
        raise PermissionError

    monkeypatch.setattr("os.link", no_link)
    with pytest.raises(ConfigError, match="a new file"):
        _rename_to_new(part, out)
    out.unlink()
    _rename_to_new(part, out)
    assert (out.exists(), part.exists()) == (True, False)


def test_processes_compare_their_records(runs, monkeypatch):
    compared = []
    model = loaded(runs["texts"], "").loaded
    monkeypatch.setattr(unlabelled, "RECORDS_AT_ONCE", 4)
    monkeypatch.setattr(predict.jax, "process_count", lambda: 2)
    monkeypatch.setattr(predict, "all_or_none", contextlib.nullcontext)
    monkeypatch.setattr(predict, "assert_same_everywhere", compared.append)
    groups = predict._same_everywhere(model._groups(TEXTS, lambda note: None))
    assert [len(group.records) for group in groups] == [4, 4]
    assert len({one["the records"] for one in compared}) == 3
    assert compared[-1] == {"the records": "no more"}


def test_a_batch_has_as_many_examples_as_it_says(runs):
    given = {"evaluation.seq_len": 24, "data.global_batch": 16}
    config = label_model_config(runs["texts"].run_dir, given)
    assert (config.seq_len, config.eval_seq_len) == (24, 24)


def test_settings_without_effect_are_refused(runs):
    for setting in ({"eos": "<end>"}, {"chat_template": "a.jinja"}):
        with pytest.raises(ConfigError, match="has no use"):
            optimus_jax.load(runs["texts"].run_dir, **setting)


def test_advice_names_predict_only_for_models_that_it_asks():
    electra = model_preset("electra-nano")
    with pytest.raises(ConfigError, match="head over the vocabulary") as raised:
        ModelOnMesh(electra)
    assert "predict" not in str(raised.value)
    with pytest.raises(ConfigError, match="predict"):
        ModelOnMesh(replace(model_preset("gpt2-nano"), labels=("a", "b")))


def test_errors_say_what_to_do(runs, tmp_path, monkeypatch, capsys):
    texts = write(tmp_path / "new.jsonl", [{"text": "a"}, {"other": "b"}])
    words = ["--mesh", "data=8", "--data", texts]
    run = ["--run", runs["texts"].run_dir]

    def error(*words):
        code, found, shown = command(monkeypatch, capsys, *words)
        assert code == 2
        assert not found
        return shown

    assert "line 2, is not a record that the model reads" in error(*run, *words)
    assert "data.text_field" in error(*run, *words)
    assert "top is out of range" in error(*run, *words, "--top", 0)
    assert "no use for this model" in error(*run, *words, "--max-answer-tokens", 3)
    assert "the model has learnt" in error(*run, *words, "--set", "model.labels=a,b")
    assert "no record is skipped" in error(*run, *words, "--set", "data.skip_bad_lines=true")
    empty = write(tmp_path / "empty.jsonl", [])
    assert "empty.jsonl" in error(*run, "--data", empty, "--mesh", "data=8")
    answers = ["--run", runs["answers"].run_dir, "--mesh", "data=8"]
    assert "'question'" in error(*answers, "--data", texts)
    text = tmp_path / "a.txt"
    text.write_text("a text")
    assert "holds no questions" in error(*answers, "--data", text)
    (tmp_path / "none").mkdir()
    assert "neither a run" in error("--run", tmp_path / "none", *words)
    code, found, _ = command(monkeypatch, capsys, *run, "--data", text, "--mesh", "data=8")
    assert (code, len(found)) == (0, 1)


def test_a_model_of_text_generates_and_predicts_nothing(tmp_path, runs, monkeypatch, capsys):
    data = tmp_path / "texts.txt"
    data.write_text("some text. " * 80)
    run = optimus_jax.train("gpt2-nano", data=data, run_dir=tmp_path / "run", **TINY, **SIZES)
    code, _, error = command(monkeypatch, capsys, "--run", run.run_dir, "--data", data)
    assert code == 2
    assert "the model predicts no labels" in error
    assert "generate" in error
    with pytest.raises(ConfigError, match="continue texts with"):
        loaded(run, "").predict(["a"])
    model = loaded(runs["texts"], "")
    assert (model.step, model.config.labels) == (1, ("one", "six", "two"))
    for use in (model.generate, model.logits, model.transcribe):
        with pytest.raises(ConfigError, match=r"writes no text[^$]*predict"):
            use("a")
    assert model.predict(("a", "b")) == model.predict([{"text": "a"}, {"text": "b"}])
    assert model.predict(data) == model.predict(data.read_text())
    with pytest.raises(DataError, match="is empty"):
        model.predict([])
    with pytest.raises(DataError, match="records must be"):
        model.predict({1, 2})
