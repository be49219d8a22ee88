"""Greedy texts of recordings: those of transformers, with caches that change nothing."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fitted
from published_models import libraries

from optimus_jax.cli import transcribe
from optimus_jax.config import DataConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.data.word_errors import word_errors
from optimus_jax.errors import ConfigError, DataError
from optimus_jax.inference.loaded_model import LoadedModel
from optimus_jax.inference.model_on_mesh import ModelOnMesh, unpadded
from optimus_jax.inference.text_model import TextModel
from optimus_jax.inference.transcription import SpeechModel, language_of
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface

SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "num_mel_bins": 8,
    "vocab_size": 270,
}
TOKENS = {
    "pad_token_id": ByteTokenizer.eos,
    "bos_token_id": ByteTokenizer.eos,
    "eos_token_id": ByteTokenizer.eos,
    "decoder_start_token_id": ByteTokenizer.eos,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def speech_model(params, config):
    model = ModelOnMesh(config)
    return SpeechModel(model=model, params=params, tokenizer=ByteTokenizer(), data=DataConfig())


def test_texts_equal_those_of_transformers():
    torch, transformers = libraries()
    torch.manual_seed(0)
    theirs = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**SIZES, **TOKENS)
    ).eval()
    for name, weight in theirs.named_parameters():
        if "encoder.embed_positions" not in name:
            weight.data = 0.3 * torch.randn_like(weight) + (weight.data if weight.ndim == 1 else 0)
    config = config_from_huggingface(theirs.config.to_dict())
    state = {name: each.numpy() for name, each in theirs.state_dict().items()}
    params = jax.tree.map(jnp.asarray, from_huggingface(state, config, config.vocab_size))
    values = np.random.default_rng(0).standard_normal((3, 20, 16)).astype(np.float32)
    columns = np.swapaxes(values.reshape(3, 40, 8), 1, 2).copy()
    found = speech_model(params, config).tokens_of(values)
    ids = torch.full((3, 1), ByteTokenizer.eos)
    for _ in range(15):
        with torch.no_grad():
            logits = theirs(input_features=torch.tensor(columns), decoder_input_ids=ids).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    for row, expected in zip(found, ids[:, 1:].tolist(), strict=True):
        end = expected.index(ByteTokenizer.eos) if ByteTokenizer.eos in expected else 15
        assert row.tolist() == expected[:end]
    assert len({tuple(row.tolist()) for row in found}) > 1, "of different recordings"


def test_a_token_is_the_likeliest_after_all_before_it():
    config = model_preset("whisper-nano")
    shapes = unpadded(config)
    params = jax.tree.map(lambda x: 3 * x, shapes.initial(jnp.int32(1)))
    values = np.random.default_rng(1).standard_normal((2, config.frames, 160)).astype(np.float32)
    found = speech_model(params, config).tokens_of(values)
    run = ForwardContext(comm=Collectives(jnp.dtype(jnp.float32)))
    model = shapes.module(params, run.comm)
    for row, tokens in enumerate(found):
        text = np.array([ByteTokenizer.eos, *tokens])[: config.max_length - config.frames]
        ids = np.concatenate([np.full(config.frames, -1), text])[None].astype(np.int32)
        places = np.concatenate([np.arange(config.frames), np.arange(len(text))])[None]
        whole = np.zeros((1, ids.shape[1], 160), np.float32)
        whole[0, : config.frames] = values[row]
        x = model.embed(ids, jnp.asarray(places), run, patches_BLP=jnp.asarray(whole))
        x = model.run_layers(x, jnp.asarray(places), run).x_BLD
        likeliest = np.asarray(model.logits(model.head_input(x, run.comm), run)).argmax(-1)[0]
        assert likeliest[: len(tokens)].tolist() == tokens.tolist()


@pytest.mark.parametrize(
    "axes",
    [
        "fsdp=2,tensor=2",
        pytest.param("tensor=4", marks=pytest.mark.nightly),
        pytest.param("fsdp=8", marks=pytest.mark.nightly),
    ],
)
def test_a_model_split_over_a_mesh_writes_down_the_same(axes):
    config = replace(model_preset("whisper-nano"), vocab_size=257)
    params = jax.tree.map(lambda x: 3 * x, unpadded(config).initial(jnp.int32(1)))
    whole = speech_model(params, config)
    split = ModelOnMesh(config, AxisSizes.parse(axes))
    parts = jax.tree.map(
        lambda leaf, like, sharding: jax.device_put(fitted(np.asarray(leaf), like.shape), sharding),
        params,
        split.shapes.params,
        split.param_shardings,
    )
    values = np.random.default_rng(1).standard_normal((3, config.frames, 160)).astype(np.float32)
    for one, other in zip(
        whole.tokens_of(values),
        replace(whole, model=split, params=parts).tokens_of(values),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_long_recordings_are_written_down_in_parts():
    config = model_preset("whisper-nano")
    params = jax.tree.map(lambda x: 3 * x, unpadded(config).initial(jnp.int32(1)))
    model = speech_model(params, config)
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal(32_000).astype(np.float32) for _ in range(2))
    one, two = model.transcribe([first, second])
    assert model.transcribe([np.concatenate([first, second])]) == [f"{one} {two}".strip()]


def test_word_errors_count_words_alone():
    pytest.importorskip("jiwer")
    for space in ("\n", "\t", "\u00a0", "\r\n", "\u3000", " , "):
        spaced = f"one{space}two three"
        assert word_errors([spaced], ["one two three"]) == 0
        assert word_errors(["one two three"], [spaced]) == 0
    assert word_errors(["one, two three"], ["One two  three."]) == 0
    assert word_errors(["one two", "three four"], ["one too", "three"]) == 0.5
    with pytest.raises(DataError, match="no words"):
        word_errors(["..."], ["a"])


def test_models_of_text_and_of_sound_are_told_apart():
    text = TextModel(
        model=ModelOnMesh(model_preset("gpt2-nano")),
        params={},
        tokenizer=ByteTokenizer(),
        step=None,
    )
    with pytest.raises(ConfigError, match="does not read sound"):
        SpeechModel.of(text)
    sound = TextModel(
        model=ModelOnMesh(model_preset("whisper-nano")),
        params={},
        tokenizer=ByteTokenizer(),
        step=None,
    )
    with pytest.raises(ConfigError, match="optimus transcribe"):
        sound.encode("hello")


def test_help_names_what_is_read(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["optimus transcribe", "--help"])
    with pytest.raises(SystemExit):
        transcribe.main()
    text = " ".join(capsys.readouterr().out.split())
    assert "word error rate" in text
    assert "Parquet, Arrow and tar files" in text


@pytest.fixture
def spoken(tmp_path):
    """A folder of one recording, whose text is in the field `sentence`."""
    soundfile = pytest.importorskip("soundfile")
    noise = np.random.default_rng(0).standard_normal(8_000).astype(np.float32)
    soundfile.write(tmp_path / "0.wav", 0.1 * noise, 16_000)
    (tmp_path / "metadata.csv").write_text("file_name,sentence\n0.wav,one two\n")
    return tmp_path


def untrained(**data):
    """A model with settings of a run's data."""
    config = model_preset("whisper-nano")
    text_model = TextModel(
        model=ModelOnMesh(config),
        params=unpadded(config).initial(jnp.int32(1)),
        tokenizer=ByteTokenizer(),
        step=None,
        data=DataConfig(**data),
    )
    return LoadedModel(source="", loaded=text_model, step=None)


@pytest.mark.parametrize(
    ("data", "flags", "found"),
    [
        ({}, [], "(KeyError: 'text'): --text-field names their column"),
        ({}, ["--text-field", "sentence"], "word error rate "),
        ({"text_field": "sentence"}, [], "word error rate "),
    ],
)
def test_texts_are_found_by_the_name_of_the_run(spoken, data, flags, found, capsys, monkeypatch):
    pytest.importorskip("jiwer")
    monkeypatch.setattr(transcribe, "loaded", lambda given: untrained(**data))
    argv = ["optimus transcribe", "--run", "run", str(spoken), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    transcribe.main()
    out, err = capsys.readouterr()
    assert out.startswith("0.wav\t")
    assert found in err
    assert ("word error rate" in err) == ("word error rate" in found)


def test_a_missing_recording_is_said_before_the_model_is_read(spoken, monkeypatch):
    monkeypatch.setattr(transcribe, "loaded", lambda given: pytest.fail("read"))
    argv = ["optimus transcribe", "--run", "run", str(spoken / "nowhere")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(DataError, match=r"there is no .*/nowhere"):
        transcribe.main()


def test_python_needs_no_texts_of_recordings(spoken):
    assert len(untrained().transcribe(spoken)) == 1
    (spoken / "1.gif").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"1 file in .* left out, .*: 1 \.gif"):
        untrained().transcribe(spoken)


def test_tokens_that_a_published_model_suppresses_are_not_written():
    config = model_preset("whisper-nano")
    params = jax.tree.map(lambda x: 3 * x, unpadded(config).initial(jnp.int32(1)))
    loaded = TextModel(
        model=ModelOnMesh(config), params=params, tokenizer=ByteTokenizer(), step=None
    )
    values = np.random.default_rng(1).standard_normal((2, config.frames, 160)).astype(np.float32)
    free = SpeechModel.of(loaded).tokens_of(values)
    first = sorted({int(row[0]) for row in free if len(row)})
    assert first, "of which at least one recording has a text"
    begin = {"begin_suppress_tokens": first, "suppress_tokens": None}
    begun = SpeechModel.of(replace(loaded, generation_config=begin)).tokens_of(values)
    assert all(row[0] not in first for row in begun if len(row))
    without = replace(loaded, generation_config={"suppress_tokens": first})
    never = SpeechModel.of(without).tokens_of(values)
    assert not any(set(first) & set(row.tolist()) for row in never)
    with pytest.raises(ConfigError, match="suppress_tokens of the model's generation_config"):
        SpeechModel.of(replace(loaded, generation_config={"suppress_tokens": [config.vocab_size]}))


def test_what_is_asked_for_comes_from_the_caller_the_published_model_or_the_run():
    config = model_preset("whisper-nano")
    loaded = TextModel(
        model=ModelOnMesh(config),
        params={},
        tokenizer=ByteTokenizer(),
        step=None,
        data=DataConfig(language="nl", speech_task="translate"),
    )
    asked = SpeechModel.of(loaded).data
    assert (asked.language, asked.speech_task) == ("nl", "translate")
    published = {"language": "<|de|>", "task": "transcribe", "is_multilingual": True}
    with_file = replace(loaded, generation_config=published)
    model = SpeechModel.of(with_file)
    assert (model.data.language, model.data.speech_task) == ("de", "transcribe")
    assert SpeechModel.of(with_file, language="fr").data.language == "fr"
    english = replace(loaded, generation_config=published | {"is_multilingual": False})
    assert SpeechModel.of(english).data.language == "none"


def test_a_language_in_words_is_known_by_its_only_token_or_asked_for():
    class Published(ByteTokenizer):
        def token_id(self, token):
            return {"<|en|>": 300, "<|hi|>": 301}.get(token)

    hindi = {"language": "hindi"}
    assert language_of({"language": "HI"}, Published()) == "hi"
    assert language_of(hindi | {"lang_to_id": {"<|hi|>": 301}}, Published()) == "hi"
    assert language_of(hindi, ByteTokenizer()) == "hindi", "which has no tokens of languages"
    assert language_of({}, Published()) is None
    several = hindi | {"lang_to_id": {"<|en|>": 300, "<|hi|>": 301}}
    with pytest.raises(ConfigError, match=r"'hindi'(.|\n)*--language CODE"):
        language_of(several, Published())
