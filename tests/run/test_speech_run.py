"""A run that learns to write down tones."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from published_models import libraries
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.config import DataConfig
from optimus_jax.config.presets import model_preset
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import ConfigError
from optimus_jax.inference.loading import load_text_model
from optimus_jax.inference.transcription import SpeechModel
from optimus_jax.run.model_card import generation_config
from optimus_jax.run.requested_config import requested_config

soundfile = pytest.importorskip("soundfile")
TINY = {"global_batch": 16, "progress": "none", "control": "off", "lr": 1e-2}
TINY |= {"model.frames": 50, "model.max_length": 66}
WORDS = ("low", "mid", "high", "top")


@pytest.fixture(scope="module")
def tones(tmp_path_factory) -> Path:
    """Tones of four heights, each with its name."""
    folder, rng = tmp_path_factory.mktemp("tones"), np.random.default_rng(0)
    rows = ["file_name,text"]
    for number in range(64):
        which = number % len(WORDS)
        time = np.arange(16_000) / 16_000
        tone = np.sin(2 * np.pi * (300 * 2**which + 20 * rng.random()) * time)
        sound = tone * rng.uniform(0.3, 0.9) + 0.01 * rng.standard_normal(len(time))
        soundfile.write(folder / f"{number:02}.wav", sound * 0.9, 16_000)
        rows.append(f"{number:02}.wav,{WORDS[which]}")
    (folder / "metadata.csv").write_text("\n".join(rows))
    return folder


def test_tones_are_written_down_after_training_on_a_mesh(tones, tmp_path):
    libraries()
    optimus_jax.train(
        "whisper-nano",
        data=str(tones),
        mesh="data=2,fsdp=2,tensor=2",
        steps=90,
        eval_every=90,
        run_dir=tmp_path / "run",
        **{"data.eval_fraction": 0.2},
        **TINY,
    )
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    [found] = [event for event in events if event["event"] == "eval"]
    assert found["loss"] < 0.1, "nats per token; 0.3 without hearing which of four words it is"
    assert found["metrics"]["word_error_rate"] < 0.1
    optimus_jax.export(tmp_path / "run", tmp_path / "exported")
    ours = load_text_model(tmp_path / "run")
    read = load_text_model(tmp_path / "exported")
    jax.tree.map(np.testing.assert_array_equal, used(ours), used(read))
    sounds = [soundfile.read(tones / f"{number:02}.wav")[0] for number in range(len(WORDS))]
    texts = SpeechModel.of(ours).transcribe(sounds)
    assert texts == texts_of_transformers(tmp_path / "exported", sounds)
    assert texts == list(WORDS)
    exported = {"init_from": str(tmp_path / "exported"), "data.sources": str(tones)}
    for given, language in (({}, "none"), ({"data.language": "de"}, "de")):
        config = requested_config(None, None, None, False, exported | given, False)
        assert config.data.language == language, "the export has no tokens of languages"
    assert "automatic-speech-recognition" in (tmp_path / "exported" / "README.md").read_text()


def test_an_export_names_the_language_that_the_run_learnt():
    class Published(ByteTokenizer):
        special_tokens = ("<|startoftranscript|>", "<|de|>", "<|en|>", "<|transcribe|>")

        def token_id(self, token):
            return 300 + self.special_tokens.index(token) if token in self.special_tokens else None

    model, german = model_preset("whisper-nano"), DataConfig(language="de")
    written = json.loads(generation_config(model, Published(), german))
    assert (written["language"], written["task"]) == ("<|de|>", "transcribe")
    assert written["lang_to_id"] == {"<|de|>": 301, "<|en|>": 302}
    assert written["task_to_id"] == {"transcribe": 303}
    assert written["decoder_start_token_id"] == 300
    alone = json.loads(generation_config(model, ByteTokenizer(), german))
    assert not alone["is_multilingual"]
    assert "language" not in alone


def used(loaded):
    """The parameters without those that no layer uses."""
    first = loaded.config.encoder_layers
    params = jax.tree.map(np.asarray, loaded.params)
    cross = params["layers"].pop("cross")
    norms = jax.tree.map(lambda leaf: leaf[first - 1], cross.pop("encoder_norm"))
    return params, norms, jax.tree.map(lambda leaf: leaf[first:], cross)


def texts_of_transformers(directory: Path, sounds: list[np.ndarray]) -> list[str]:
    _, transformers = libraries()
    written = transformers.pipeline("automatic-speech-recognition", model=str(directory))
    greedy = {"num_beams": 1}
    texts = [written(each.astype(np.float32), generate_kwargs=greedy)["text"] for each in sounds]
    return [text.strip() for text in texts]


def test_a_resumed_run_on_another_mesh_hears_the_same(tones, tmp_path):
    options = {"data": str(tones), "eval_every": 0, **TINY, "data.eval_fraction": 0.0}
    options |= {"model.dropout": 0.1, "checkpoint_every": 2}
    whole = optimus_jax.train(
        "whisper-nano", mesh="data=8", steps=4, run_dir=tmp_path / "whole", **options
    )
    run_dir = shutil.copytree(whole.run_dir, tmp_path / "parts")
    shutil.rmtree(run_dir / "checkpoints" / "4")  # as if killed before it was saved
    parts = optimus_jax.train(run_dir=run_dir, resume=True, mesh="pipe=2,fsdp=2,tensor=2")
    is_resumed = [record.plan == parts.plan.digest for record in parts.history]
    assert is_resumed == [False, False, True, True]
    losses = [[record.loss for record in run.history] for run in (whole, parts)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)


def test_what_a_model_of_sound_cannot_do_is_said(tones, tmp_path):
    options = {"data": str(tones), "mesh": "data=8", "steps": 1, "run_dir": tmp_path / "run"}
    with pytest.raises(ConfigError, match="frames of a recording and then its text"):
        optimus_jax.train("whisper-nano", seq_len=48, **options, **TINY)
    with pytest.raises(ConfigError, match="needs a model that reads text"):
        optimus_jax.train("whisper-nano", task="next_token", **options, **TINY)
    text = {"global_batch": 16, "control": "off"}
    with pytest.raises(ConfigError, match="needs a model that reads sound"):
        optimus_jax.train("gpt2-nano", task="transcription", **options, **text)
