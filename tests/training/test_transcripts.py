"""What an evaluation writes down under any plan are the greedy texts of the model."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import fitted
from plans import random_state

from optimus_jax.config import Config, DataConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.data.recordings import Recordings, StoredRecording, Transcript
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.inference.model_on_mesh import ModelOnMesh
from optimus_jax.inference.transcription import SpeechModel
from optimus_jax.mesh.build import discover
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.transcripts import LENGTH_FACTOR, Transcripts

MODEL = replace(
    model_preset("whisper-nano"),
    num_layers=4,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    frames=12,
    max_length=28,
    mel_bins=8,
    vocab_size=257,
)
EOS, NUMBER = ByteTokenizer.eos, 5


class Sounds(Recordings):
    """Recordings whose spectrograms are random."""

    def _frames(self, example):
        shape = self.model.frames, self.model.patch_values
        return np.random.default_rng(example).standard_normal(shape).astype(np.float32)


def transcripts():
    items = [
        Transcript(
            StoredRecording(str(number), b"", "word " * (number + 1)),
            np.array([EOS, *[65] * number, EOS], np.int32),
        )
        for number in range(NUMBER)
    ]
    sounds = Sounds(name="sounds", items=items, model=MODEL)
    return Transcripts(
        recordings=sounds, tokenizer=ByteTokenizer(), number=NUMBER, seq_len=MODEL.max_length
    )


def program_on(mesh, **settings) -> Program:
    config = Config(model=MODEL).with_values(
        {"parallel.mesh": mesh, "data.global_batch": 8} | settings
    )
    axes = AxisSizes.parse(mesh)
    plan = plan_for(config, axes, replace(discover(), num_devices=axes.num_devices))
    return build_program(config, plan, jax.devices()[: axes.num_devices])


def params_of(program):
    """Random ones, with a table in which eos is often the likeliest."""
    params = jax.tree.map(lambda leaf: 2 * leaf, random_state(program).params)
    table = np.random.default_rng(0).standard_normal((MODEL.vocab_size, MODEL.embed_dim))
    table[EOS] *= 1.5
    old = params["embedding"]["table"]
    new = fitted(table.astype(np.float32), old.shape)
    params["embedding"]["table"] = jax.device_put(new, old.sharding)
    return params


@pytest.fixture(scope="module")
def greedy():
    """The texts by a cache on one device, as far as evaluations write them."""
    model = SpeechModel(
        model=ModelOnMesh(MODEL),
        params=params_of(program_on("data=1")),
        tokenizer=ByteTokenizer(),
        data=DataConfig(),
    )
    sounds = transcripts().recordings
    found = model.tokens_of(np.stack([sounds._frames(number) for number in range(NUMBER)]))
    limit = LENGTH_FACTOR * NUMBER  # the longest reference has NUMBER - 1 tokens, and eos
    assert len({len(row) for row in found}) > 1, "some end early, and others do not"
    return [row[:limit].tolist() for row in found]


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("pipe=2,fsdp=2,tensor=2", {"parallel.microbatches": 2}),
        (
            "data=2,fsdp=2,tensor=2",
            {"parallel.sequence_parallel": True, "parallel.zero": 3},
        ),
        pytest.param(
            "pipe=4,tensor=2",
            {"parallel.microbatches": 4, "parallel.sequence_parallel": True},
            marks=pytest.mark.nightly,
        ),
        pytest.param("data=1", {}, marks=pytest.mark.nightly),
    ],
)
def test_texts_of_an_evaluation_are_the_greedy_ones(greedy, mesh, settings):
    program, texts = program_on(mesh, **settings), transcripts()
    [batch] = texts.batches(program, 8)
    found = texts.tokens_of(program, params_of(program), batch, 8)
    assert [row.tolist() for row in found[:NUMBER]] == greedy
    assert all(row.tolist() == greedy[-1] for row in found[NUMBER:]), "the last one repeated"


def test_the_rate_is_that_of_the_texts_and_a_stop_ends_it():
    pytest.importorskip("jiwer")
    texts, expected = transcripts(), np.array([87, 79, 82, 68, EOS])  # "WORD"

    class AlwaysOneWord:
        config, batch_sharding = Config(model=MODEL), program_on("data=1").batch_sharding
        asked = 0

        def put_batch(self, batch, rows):
            return dict(batch)

        def next_tokens(self, params, batch):
            assert (batch["loss_mask"].sum(1) == 1).all(), "one place of each row is asked"
            place = int(np.asarray(batch["loss_mask"][0]).argmax()) - MODEL.frames
            self.asked += 1
            return np.full(4, expected[place])

    program = AlwaysOneWord()
    batches = list(texts.batches(program, 4))
    rate = texts.word_error_rate(program, None, batches, 4, stops=lambda: False)
    assert rate == pytest.approx((1 + 2 + 3 + 4) / 15), "all but the first word of each are missing"
    assert program.asked == 2 * len(expected), "two batches, until all rows have ended"
    assert texts.word_error_rate(program, None, batches, 4, stops=lambda: True) is None
