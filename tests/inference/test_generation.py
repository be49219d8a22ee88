"""Sampling with a cache equals a full pass over the text, and the script prints it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_templates import MODELS as CHAT_MODELS
from chat_templates import save_tokenizer
from helpers import F32_RELATIVE, assert_close, fitted
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_process import run_in_process
from plans import FAMILY_MODELS
from published_models import WORDS, libraries, with_tokenizer, write

import optimus_jax
from optimus_jax.cli import generate
from optimus_jax.cli.generate import show
from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from optimus_jax.errors import CheckpointError, ConfigError, DataError, OptimusError
from optimus_jax.inference.chats import ends_of_turns
from optimus_jax.inference.generation import (
    Prompt,
    generate_ids,
    next_tokens,
    prefill,
    rounded_up,
)
from optimus_jax.inference.loaded_model import LoadedModel
from optimus_jax.inference.loading import load_text_model
from optimus_jax.inference.model_on_mesh import ModelOnMesh, unpadded
from optimus_jax.inference.sampling import Sampling, candidates, draw
from optimus_jax.inference.streamed_text import Detokenizer, StreamedText
from optimus_jax.inference.text_model import GenerationSettings, TextModel
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.block import ForwardContext
from optimus_jax.run.api import train

F32 = jnp.dtype(jnp.float32)
SCRIPT = Path(__file__).parents[2] / "scripts" / "generate.py"
MODELS = {
    "gpt2": ModelConfig(
        family="gpt2",
        vocab_size=257,
        num_layers=3,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        mlp_dim=64,
        max_length=64,
        tied=True,
    ),
    "llama with grouped heads": ModelConfig(
        family="llama",
        vocab_size=257,
        num_layers=3,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
        max_length=64,
        tied=False,
    ),
}
PROMPT = np.array([5, 200, 17, 99, 4, 4, 31], np.int32)


class NoEnd(ByteTokenizer):
    """No document ever ends."""

    eos = -1


def random_model(config):
    """A model whose parameters are all random, also those that start at 0 or 1: large enough that
    the likeliest tokens vary, and small enough that it does not amplify rounding. With a deviation
    of 0.5 logits of gemma2 differ by up to 1.03e-5 of the largest on some CPUs, with 0.2 by 2e-6.
    """
    rng = np.random.default_rng(3)

    def values(path, leaf):
        around = 1 if path[-1].key == "scale" else 0
        return jnp.asarray(rng.normal(around, 0.2, leaf.shape), jnp.float32)

    return TextModel(
        model=ModelOnMesh(config),
        params=jax.tree.map_with_path(values, unpadded(config).params),
        tokenizer=NoEnd(),
        step=0,
    )


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return random_model(MODELS[request.param])


@pytest.fixture(scope="module")
def gpt():
    return random_model(MODELS["gpt2"])


def full_logits(model, ids):
    """Logits [N, V] after every token, without a cache."""
    tokens, positions = np.asarray(ids, np.int32)[None], np.arange(len(ids), dtype=np.int32)[None]

    @jax.jit
    def run(params):
        how = ForwardContext(comm=Collectives(F32))
        decoder = unpadded(model.config).module(params, how.comm)
        return decoder.logits(decoder.hidden(tokens, positions, how), how)

    return np.asarray(run(model.params)[0])


def generated(model, *prompts, num_new_tokens=20, seed=0, num_samples=1, ends=(), **sampling):
    """Ids [prompts * num_samples, number of new tokens]; the prompt is PROMPT unless some are
    given.
    """
    counts = np.broadcast_to(num_new_tokens, len(prompts) or 1)
    rows = generate_ids(
        model.model,
        model.params,
        [
            Prompt(ids=np.asarray(prompt), num_new_tokens=int(count), seed=seed)
            for prompt, count in zip(prompts or [PROMPT], counts, strict=True)
        ],
        eos=model.tokenizer.eos,
        sampling=Sampling(**sampling),
        num_samples=num_samples,
        ends=ends,
    )
    return np.stack([ids for ids, _ in rows], axis=1)


@pytest.mark.parametrize("family", ["gptj", "opt", "gemma2", "gemma3_text"])
def test_cached_logits_of_other_families_equal_a_full_pass(family):
    assert_cache_changes_nothing(
        random_model(replace(FAMILY_MODELS[family], vocab_size=257, max_length=64))
    )


def test_cached_logits_equal_a_full_pass(model):
    assert_cache_changes_nothing(model)


def assert_cache_changes_nothing(model):
    ids = np.random.default_rng(0).integers(0, 257, 40).astype(np.int32)
    expected = full_logits(model, ids)
    run = jax.jit(lambda *given: model.model.extend(model.params, *given))
    padded = np.full((1, 32), 99, np.int32)  # padding that would be seen if it were not hidden
    padded[0, :20] = ids[:20]
    empty = model.model.empty_cache(model.params, 64)
    first = np.zeros(1, np.int32)
    for last in range(20):
        logits, cache = run(empty, padded, first, first + last)
        assert_close(logits[0], expected[last], F32_RELATIVE)
    for position in range(20, 40):
        logits, cache = run(cache, ids[None, position : position + 1], first + position, first)
        assert_close(logits[0], expected[position], F32_RELATIVE)


@pytest.mark.parametrize("family", ["gptj", "opt", "gemma2"])
def test_rows_of_other_lengths_change_no_logits(family):
    """Each row is at a position of its own: rotary or learned, in a window."""
    model = random_model(replace(FAMILY_MODELS[family], vocab_size=257, max_length=64))
    rng, lengths = np.random.default_rng(1), np.array([3, 20, 11], np.int32)
    texts = [rng.integers(0, 257, length + 9).astype(np.int32) for length in lengths]
    expected = [full_logits(model, text) for text in texts]
    run = jax.jit(lambda *given: model.model.extend(model.params, *given))
    padded = np.full((3, 32), 99, np.int32)
    for row, text, length in zip(padded, texts, lengths, strict=True):
        row[:length] = text[:length]
    cache = model.model.empty_cache(model.params, 64, rows=3)
    logits, cache = run(cache, padded, np.zeros_like(lengths), lengths - 1)
    for number in range(9):
        for row, length, whole in zip(logits, lengths, expected, strict=True):
            assert_close(row, whole[length - 1 + number], F32_RELATIVE)
        places = lengths + number
        tokens = np.array([[text[place]] for text, place in zip(texts, places, strict=True)])
        logits, cache = run(cache, tokens, places, np.zeros_like(lengths))


SPLIT = (("gpt2", "fsdp=2,tensor=2"), ("gpt2", "fsdp=8"), ("llama with grouped heads", "tensor=4"))
"""Models and meshes that `make test` generates with; `make nightly` takes the other pairs."""


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param(name, axes, marks=() if (name, axes) in SPLIT else pytest.mark.nightly)
        for name in MODELS
        for axes in ("tensor=4", "fsdp=2,tensor=2", "fsdp=8")
    ],
)
def test_a_model_split_over_a_mesh_generates_the_same(name, axes):
    model = random_model(MODELS[name])
    split = ModelOnMesh(model.config, AxisSizes.parse(axes))
    params = jax.tree.map(
        lambda leaf, like, sharding: jax.device_put(fitted(np.asarray(leaf), like.shape), sharding),
        model.params,
        split.shapes.params,
        split.param_shardings,
    )
    other = replace(model, model=split, params=params)
    cache, tokens = model.model.empty_cache(params, 32), PROMPT[None]
    first = jnp.zeros(1, jnp.int32)
    whole, _ = model.model.extend(model.params, cache, tokens, first, first + 6)
    empty = split.empty_cache(params, 32)
    parts, _ = jax.jit(split.extend)(params, empty, tokens, first, first + 6)
    vocab = model.config.vocab_size
    assert_close(np.asarray(parts)[:, :vocab], whole, F32_RELATIVE)
    assert np.isneginf(np.asarray(parts)[:, vocab:]).all()
    expected = full_logits(model, PROMPT)
    assert other.logits(PROMPT).shape == expected.shape
    assert_close(other.logits(PROMPT), expected, F32_RELATIVE)
    for how in ({"temperature": 0.0}, {"seed": 3, "num_samples": 2}):
        both = [generated(each, PROMPT, PROMPT[:2], **how) for each in (other, model)]
        np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("axes", ["data=2", "pipe=2,tensor=2", "tensor=3"])
def test_a_mesh_that_cannot_split_a_model_is_refused(axes):
    with pytest.raises(OptimusError, match=r"(?s)given:.*do:"):
        ModelOnMesh(MODELS["gpt2"], AxisSizes.parse(axes))


def test_greedy_tokens_are_the_likeliest_of_a_full_pass(model):
    tokens = generated(model, temperature=0, num_new_tokens=30, num_samples=2)
    likeliest = full_logits(model, [*PROMPT, *tokens[0]]).argmax(-1)
    assert tokens[0].tolist() == tokens[1].tolist() == likeliest[len(PROMPT) - 1 : -1].tolist()
    assert len(set(tokens[0].tolist())) > 5


def test_logits_of_a_text_are_those_of_a_full_pass(model):
    for ids in (PROMPT, PROMPT[:1], np.tile(PROMPT, 9)):  # also longer than the shortest pass
        assert_close(model.logits(ids), full_logits(model, ids), F32_RELATIVE)
    for wrong in ([], [[1, 2]], [0.5], [257], [-1], [1] * 65):
        with pytest.raises(DataError, match=r"(?s)given:.*do:"):
            model.logits(wrong)


def test_text_may_fill_all_positions(gpt):
    prompt, how = np.arange(60), GenerationSettings(temperature=0, max_new_tokens=6)
    with pytest.warns(
        UserWarning, match="at most 5 new tokens: custom has 64 positions, and the prompt takes 60"
    ):
        pieces = [*gpt.generate(bytes(range(60)).decode(), how)]
    tokens = generated(gpt, prompt, temperature=0, num_new_tokens=5)[0]
    assert tokens.tolist() == full_logits(gpt, [*prompt, *tokens[:-1]]).argmax(-1)[59:].tolist()
    assert "".join(piece for (piece,) in pieces) == gpt.tokenizer.decode(tokens)


def test_text_past_the_trained_length_ends_or_warns(model):
    """Learned positions that were never trained end the text, unless the user insists; rotary ones
    only give a warning.
    """
    short, prompt, messages = replace(model, trained_length=16), bytes(range(10)).decode(), []

    def length(**settings):
        messages.clear()
        how = GenerationSettings(temperature=0, max_new_tokens=20, **settings)
        return len([*short.generate(prompt, how, warn=messages.append)]) - 1

    if model.config.family == "gpt2":
        assert (length(), messages) == (
            7,
            [
                "at most 7 new tokens: custom was trained on 16 tokens at a time, the prompt takes"
                " 10, and learned positions beyond that were not trained; to continue anyway:"
                " --past-trained-length (in Python past_trained_length=)"
            ],
        )
        with pytest.raises(
            DataError,
            match=(
                r"longer than what custom was trained on.*\n.*17 tokens, trained on"
                r" 16\n.*--past-trained-length \(in Python past_trained_length=\)"
            ),
        ):
            short.generate("a" * 17)
        assert (length(past_trained_length=True), len(messages)) == (20, 1)
        assert "past token 16 is noise" in messages[0]
    else:
        assert (length(), messages) == (
            20,
            [
                "custom was trained on 16 tokens at a time; up to 29 are requested, and text"
                " past token 16 may be worse"
            ],
        )
    how = GenerationSettings(temperature=0, max_new_tokens=7)
    assert len([*short.generate(prompt, how, warn=pytest.fail)]) == 8


def test_sample_ends_at_the_end_of_a_document(gpt):
    few = {"num_samples": 3, "top_k": 5}  # of few tokens, samples share some
    free = generated(gpt, **few)
    tokenizer = NoEnd()
    tokenizer.eos = next(token for token in free[0] if all(token in row for row in free))
    ends = [row.tolist().index(tokenizer.eos) for row in free]
    assert len(set(ends)) > 1
    assert max(ends) < 19
    expected = [
        [*row[:end], *[tokenizer.eos] * (max(ends) + 1 - end)]
        for row, end in zip(free, ends, strict=True)
    ]
    assert generated(replace(gpt, tokenizer=tokenizer), **few).tolist() == expected


def test_every_draw_has_a_key_of_its_own(gpt):
    # where all tokens are equally likely
    even = replace(gpt, params=jax.tree.map(jnp.zeros_like, gpt.params))
    three = generated(even, num_samples=3, seed=1)
    assert generated(even, num_samples=3, seed=1).tolist() == three.tolist()
    assert generated(even, num_samples=1, seed=1).tolist() == three[:1].tolist()
    draws = [*three.ravel(), *generated(even, num_samples=3, seed=2).ravel()]
    assert len(set(draws)) > 80, "of 257 tokens, 120 draws hit about 96"


def test_each_prompt_of_a_batch_has_the_text_that_it_has_alone(gpt):
    """Whatever ends the others, however long they are, and in a batch that is not full."""
    ends = NoEnd()
    ends.eos = int(generated(gpt, np.arange(5), temperature=0)[0, 7])
    model = replace(gpt, tokenizer=ends)
    prompts = ["".join(map(chr, range(length))) for length in (5, 33, 1, 12, 60)]
    for more in ({"temperature": 0.0}, {"seed": 5, "num_samples": 2}):
        how, warned = GenerationSettings(max_new_tokens=10, **more), []
        alone = [
            ["".join(parts) for parts in zip(*model.generate(prompt, how, warn=str), strict=True)]
            for prompt in prompts
        ]
        for size in (1, 2, 8):
            texts = model.generate_each(prompts, how, batch_size=size, warn=warned.append)
            assert [*texts] == alone, size
        assert sum("at most 5 new tokens" in each for each in warned) == 3
        short = GenerationSettings(max_new_tokens=10, stop=[alone[1][0][2:4]], **more)
        (first, *_), (second, *_) = model.generate_each(prompts[:2], short, warn=str)
        assert first == alone[0][0].split(short.stop[0])[0]
        assert second == alone[1][0].split(short.stop[0])[0]
    with pytest.raises(DataError, match=r"prompt 2 of 3: the prompt is empty"):
        model.generate_each(["a", "", "b"])
    with pytest.raises(ConfigError, match="batch_size is out of range"):
        model.generate_each(["a"], batch_size=0)


def test_a_batch_ends_when_its_last_row_has(gpt):
    rows = generated(gpt, PROMPT, PROMPT[:3], num_new_tokens=(4, 9), temperature=0)
    assert rows.shape == (2, 9)
    assert (rows[0, 4:] == NoEnd.eos).all()
    assert rows[0, :4].tolist() == generated(gpt, temperature=0, num_new_tokens=4)[0].tolist()


def test_prompts_of_many_lengths_share_one_program(gpt):
    generated(gpt)
    compiled = prefill._cache_size(), next_tokens._cache_size()
    for length in (1, 2, 11, 20):
        generated(gpt, np.arange(length), num_new_tokens=5, seed=length)
    assert (prefill._cache_size(), next_tokens._cache_size()) == compiled
    assert [rounded_up(n, 48) for n in (1, 32, 33, 48)] == [32, 32, 48, 48]


LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=16, max_size=16).map(
    lambda row: np.array([row], np.float32)
)


@settings(deadline=None, max_examples=40)
@given(logits=LOGITS, top_k=st.none() | st.integers(1, 20), top_p=st.floats(0.05, 1))
def test_candidates_are_the_likeliest_tokens(logits, top_k, top_p):
    kept_logits, ids = (
        np.asarray(x[0])
        for x in candidates(jnp.asarray(logits), Sampling(top_k=top_k, top_p=top_p))
    )
    kept = ids[np.isfinite(kept_logits)]
    np.testing.assert_array_equal(kept_logits[np.isfinite(kept_logits)], logits[0, kept])
    descending = np.sort(logits[0].astype(np.float64))[::-1][:top_k]
    np.testing.assert_array_equal(np.sort(logits[0, kept])[::-1], descending[: len(kept)])
    assert len(set(kept.tolist())) == len(kept) > 0
    probability = np.exp(descending) / np.exp(descending).sum()
    assert probability[: len(kept)].sum() >= top_p - 1e-5
    assert probability[: len(kept) - 1].sum() <= top_p + 1e-5


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.2, 0.3, 0.4]),
        (Sampling(temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (Sampling(top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(top_p=0.65), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(top_k=3, top_p=0.4), [0, 0, 0, 1]),
        (Sampling(temperature=0), [0, 0, 0, 1]),
    ],
)
def test_draws_have_the_probabilities_asked_for(sampling, expected):
    num_draws = 20_000
    logits = jnp.log(jnp.tile(jnp.array([[0.1, 0.2, 0.3, 0.4]]), (num_draws, 1)))
    places = jnp.full(num_draws, 7)
    drawn = draw(logits, jax.random.split(jax.random.key(0), num_draws), places, sampling)
    share = np.bincount(np.asarray(drawn), minlength=4) / num_draws
    # four standard deviations at most
    np.testing.assert_allclose(share, expected, atol=4 * 0.5 / num_draws**0.5)
    assert (share[np.array(expected) == 0] == 0).all()


@settings(deadline=None)
@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"])),
    tokens=st.lists(st.integers(0, 256))
    | st.text(st.characters(exclude_categories=["Cs"])).map(lambda text: [*text.encode()]),
)
def test_streamed_pieces_join_to_the_whole_text(prompt, tokens):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(prompt)
    text = Detokenizer(tokenizer, ids)
    pieces = [*map(text.push, tokens), text.rest()]
    whole = tokenizer.decode([*ids, *tokens])
    assert prompt + "".join(pieces) == whole
    assert (
        not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        or "\N{REPLACEMENT CHARACTER}" in whole
    )


@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@example(text="aba", stop=["b", "aba"])
def test_text_ends_before_the_first_stop(text, stop):
    """The first is that which is complete first, wherever it begins."""
    shown = StreamedText(Detokenizer(ByteTokenizer(), np.array([], np.int32)), stop)
    pieces = [shown.push(ord(character)) for character in text]
    prefixes = [text[: size + 1] for size in range(len(text))]
    found = [prefix for prefix in prefixes if any(each in prefix for each in stop)]
    end = min(found[0].find(each) for each in stop if each in found[0]) if found else None
    assert "".join([*pieces, shown.rest()]) == text[:end]
    assert shown.is_over == bool(found)
    for number in range(len(pieces)):  # nothing is held back longer than a stop may need
        done = "".join(pieces[: number + 1])
        assert len(done) >= min(number + 1, len(text) if end is None else end) - 3


def test_generation_ends_when_all_samples_have_stopped(gpt):
    text = "".join(first for (first,) in gpt.generate("abc", GenerationSettings(seed=1), warn=str))
    stop = text[5:7]
    pieces = [*gpt.generate("abc", GenerationSettings(seed=1, stop=[stop]), warn=str)]
    assert "".join(first for (first,) in pieces) == text[: text.find(stop)]
    assert len(pieces) < 12
    with pytest.raises(ConfigError, match="stop is out of range"):
        GenerationSettings(stop=[""])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is out of range"),
        ({"num_samples": 0}, "num_samples"),
        ({"seed": -1}, "seed"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GenerationSettings(**settings)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("a" * 65, "longer than the positions .*\n.*65 tokens, 64 positions"),
        ("\udcff", "the prompt is not text"),
        ("é", "does not know a token .*\n.*token 195, of a vocabulary of 100"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_refused(gpt, prompt, message):
    with pytest.raises(DataError, match=message):
        replace(gpt, model=ModelOnMesh(replace(gpt.config, vocab_size=100))).generate(prompt)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps on eight devices, each saved; the vocabulary has rows of padding."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 200)
    return train(
        "gpt2-nano",
        data=str(folder / "text.txt"),
        mesh="fsdp=4,tensor=2",
        cpu_devices=8,
        steps=3,
        seq_len=16,
        lr=0.01,
        eval_every=0,
        checkpoint_every=1,
        progress="none",
        run_dir=folder / "run",
        **{
            "model.num_layers": 1,
            "model.embed_dim": 64,
            "model.head_dim": 8,  # as a published GPT-2 of this width has
            "model.mlp_dim": 128,
            "data.eval_fraction": 0.0,
        },
    )


def test_run_is_sampled_in_the_precision_it_was_trained_in(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 100)
    run = train(
        "gpt2-nano",
        data=str(tmp_path / "text.txt"),
        cpu_devices=8,
        steps=1,
        seq_len=16,
        precision="bf16",
        eval_every=0,
        progress="none",
        run_dir=tmp_path / "run",
        **{"model.num_layers": 1, "model.embed_dim": 64, "model.mlp_dim": 128},
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(load_text_model(run.run_dir).params)} == {
        jnp.dtype("bfloat16")
    }


@pytest.fixture
def copied(trained, tmp_path):
    """The run's directory, to be damaged."""
    return shutil.copytree(trained.run_dir, tmp_path / "run")


def test_a_sharded_run_is_loaded_onto_one_device(trained):
    model = load_text_model(trained.run_dir)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("float32")}
    assert (model.step, model.trained_length) == (3, 16)
    assert trained.state.params["embedding"]["table"].shape[0] == 264
    for leaf, saved in zip(
        jax.tree.leaves(model.params), jax.tree.leaves(trained.state.params), strict=True
    ):
        assert leaf.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(leaf, np.asarray(saved)[: len(leaf)])
    assert load_text_model(trained.run_dir, 1).step == 1


def test_a_loaded_model_generates_gives_logits_and_is_exported(trained, tmp_path):
    model = optimus_jax.load(trained.run_dir)
    how = {"max_new_tokens": 8, "temperature": 0.0}
    text = model.generate("the cat", **how)
    pieces = model.text_model.generate("the cat", GenerationSettings(**how))
    assert text == "".join(piece for (piece,) in pieces)
    assert text == "".join(model.stream("the cat", **how))
    assert model.generate(["the cat", "a mat"], **how) == [text, model.generate("a mat", **how)]
    logits = model.logits("the cat")
    assert logits.shape == (len("the cat"), model.config.vocab_size)
    assert optimus_jax.load(trained.run_dir, step=1, mesh="tensor=2").step == 1
    exported = model.export(tmp_path / "exported")
    published = optimus_jax.load(exported.directory)
    assert (exported.step, published.step) == (3, None)
    assert_close(published.logits("the cat"), logits, F32_RELATIVE)
    with pytest.raises(ConfigError, match=r"(?s)num_samples=2.*another seed="):
        model.generate("the cat", num_samples=2)
    with pytest.raises(ConfigError, match=r"(?s)max_tokens=2.*max_new_tokens"):
        model.generate(["the cat"], max_tokens=2)
    with pytest.raises(ConfigError, match="does not read sound"):
        model.transcribe(np.zeros(16_000, np.float32))


def test_damaged_checkpoint_is_skipped_with_a_warning(copied):
    manifest = copied / "checkpoints" / "3" / "manifest"
    for path in filter(Path.is_file, manifest.rglob("*")):
        path.write_bytes(b"")
    warned = []
    assert load_text_model(copied, warn=warned.append).step == 2
    assert len(warned) == 1
    assert "step 3 is damaged" in warned[0]
    with pytest.raises(CheckpointError, match="no good checkpoint of step 3"):
        load_text_model(copied, 3)


def test_runs_that_cannot_be_loaded_are_refused(copied, tmp_path):
    with pytest.raises(ConfigError, match=r"no run to sample from\n.*nowhere"):
        load_text_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no good checkpoint of step 9\n.*steps 1, 2, 3"):
        load_text_model(copied, 9)
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(CheckpointError, match=r"no good checkpoint\n.*steps none"):
        load_text_model(copied)
    config = json.loads((copied / "config.json").read_text())
    config["data"]["tokenizer"] = str(tmp_path / "gone.json")
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="a tokenizer file cannot be read"):
        load_text_model(copied)


def script(*flags):
    return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, encoding="utf-8")


def test_script_prints_the_generated_text(trained):
    flags = {
        "max_new_tokens": 40,
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "seed": 3,
        "num_samples": 2,
    }
    done = script(
        "--run",
        trained.run_dir,
        "--prompt",
        "the",
        *(
            word
            for name, value in flags.items()
            for word in ("--" + name.replace("_", "-"), str(value))
        ),
        "--past-trained-length",
    )
    assert (done.returncode, done.stderr) == (
        0,
        (
            "gpt2-nano was trained on 16 tokens at a time; up to 42 are requested, and text"
            " past token 16 is noise, because positions there are learned\ngpt2-nano after step 3\n"
        ),
    )
    how = GenerationSettings(**flags, past_trained_length=True)
    pieces = load_text_model(trained.run_dir).generate("the", how, warn=str)
    first, second = ("the" + "".join(texts) for texts in zip(*pieces, strict=True))
    assert done.stdout == f"{first}\n\n{'-' * 40}\n{second}\n"


def test_a_published_model_continues_a_prompt_as_transformers_does(tmp_path):
    torch, transformers = libraries()
    directory = with_tokenizer(write("llama", "safetensors", "float32", tmp_path / "tiny"))
    ids = [2, 3, 4, 5]
    prompt = " ".join(WORDS[each] for each in ids)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory)
    expected = reference.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=8, eos_token_id=1, pad_token_id=1
    )[0, len(ids) :]
    for axes in ("", "tensor=2", "fsdp=4"):
        mesh = AxisSizes.parse(axes) if axes else AxisSizes()
        model = load_text_model(directory, mesh=mesh)
        found = generated(model, model.encode(prompt), num_new_tokens=8, temperature=0)
        assert found[0].tolist() == expected.tolist()
    with pytest.raises(ConfigError, match="has no checkpoints"):
        load_text_model(directory, 3)
    assert load_text_model(directory, eos=WORDS[5]).tokenizer.eos == 5
    # A BOS token before texts, and several tokens that end one.
    library = pytest.importorskip("tokenizers")
    whole = library.Tokenizer.from_file(str(directory / "tokenizer.json"))
    begin = (WORDS[6], 6)
    whole.post_processor = library.processors.TemplateProcessing(f"{begin[0]} $0", None, [begin])
    whole.save(str(directory / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    model, greedy = load_text_model(directory), GenerationSettings(temperature=0, max_new_tokens=8)
    assert model.encode(prompt).tolist() == theirs(prompt)["input_ids"] == [6, *ids]
    tokens = generated(model, model.encode(prompt), num_new_tokens=8, temperature=0)[0].tolist()
    last = next(token for token in tokens[1:] if token != tokens[0])
    assert last != 1
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, last]}))
    (cut,) = map("".join, zip(*load_text_model(directory).generate(prompt, greedy), strict=True))
    before = [6, *ids]
    whole = model.tokenizer.decode([*before, *tokens[: tokens.index(last)]])
    assert cut == whole[len(model.tokenizer.decode(before)) :]
    assert load_text_model(directory, eos=WORDS[5]).generation_tokens("eos_token_id") == ()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="without a tokenizer"):
        load_text_model(directory)


def test_a_chat_is_written_out_and_ends_with_the_turn(tmp_path):
    _, transformers = libraries()
    folder = save_tokenizer(tmp_path / "model", **CHAT_MODELS["chatml"])
    tokenizer = load_tokenizer(str(folder))
    config = replace(MODELS["gpt2"], vocab_size=tokenizer.vocab_size, max_length=128)
    model = replace(random_model(config), tokenizer=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = "what is <|im_end|> here?"
    ids = model.encode(prompt, chat=True)
    plain = model.encode("what?", chat=True).tolist()
    assert plain == theirs.apply_chat_template(
        [{"role": "user", "content": "what?"}], add_generation_prompt=True, return_dict=False
    )
    (end,) = ends_of_turns(tokenizer, pytest.fail)
    assert theirs.convert_ids_to_tokens(end) == "<|im_end|>"
    assert ids.tolist().count(end) == 1  # the template's own, not that of the message
    drawn = generated(model, ids, num_new_tokens=8, temperature=0)[0].tolist()
    again = generated(model, ids, num_new_tokens=8, temperature=0, ends=(drawn[3],))
    assert again[0].tolist() == [*drawn[: drawn.index(drawn[3])], tokenizer.eos]
    with pytest.raises(DataError, match="chat template"):
        replace(model, tokenizer=ByteTokenizer()).encode("what?", chat=True)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": "this"},
        {"role": "user", "content": "and?"},
    ]
    assert model.encode(messages).tolist() == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    greedy = GenerationSettings(max_new_tokens=3, temperature=0)
    loaded = LoadedModel(source="a model", loaded=model, step=None)
    ask = {"max_new_tokens": 3, "temperature": 0}
    alone = loaded.generate(messages, **ask)
    assert [alone] == next(model.generate_each([messages], greedy))
    assert loaded.generate([messages, messages[1:2]], **ask) == [
        alone,
        loaded.generate("what?", chat=True, **ask),
    ]
    assert loaded.generate(tuple(messages), **ask) == alone
    assert loaded.generate({"messages": messages}, **ask) == alone
    assert loaded.generate([{"messages": messages}], **ask) == [alone]
    wrong = ([{"content": "what?"}], "an object with a role"), (messages[1], "no field 'messages'")
    for prompt, why in (*wrong, ([], "a list of")):
        with pytest.raises(DataError, match=f"(?s)no conversation.*{why}"):
            model.encode(prompt)
    with pytest.raises(DataError, match="no conversation"):
        loaded.generate(messages[1], **ask)


def test_script_reads_a_prompt_from_a_file_and_stops(trained, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("the\n")
    common = ["generate", "--run", str(trained.run_dir), "--temperature", "0"]
    more = ["--max-new-tokens", "10", "--mesh", "fsdp=2,tensor=2"]
    for flags in (["--prompt", "the"], ["--prompt-file", str(tmp_path / "prompt.txt")]):
        monkeypatch.setattr(sys, "argv", [*common, *flags, *more])
        generate.main()
    one, two = capsys.readouterr().out.splitlines()
    assert one == two
    assert one.startswith("the")
    stop = one[5:7]
    monkeypatch.setattr(sys, "argv", [*common, "--prompt", "the", *more, "--stop", stop])
    generate.main()
    assert capsys.readouterr().out == one[: one.index(stop, 3)] + "\n"
    monkeypatch.setattr(sys, "argv", [*common, "--prompt-file", str(tmp_path / "gone")])
    with pytest.raises(ConfigError, match="prompt cannot be read"):
        generate.main()


def test_script_continues_each_prompt_of_a_file(trained, tmp_path, capsys, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    common = ["generate", "--run", str(trained.run_dir), "--max-new-tokens", "6"]

    def printed(*flags):
        monkeypatch.setattr(sys, "argv", [*common, *flags])
        generate.main()
        return capsys.readouterr().out

    prompts.write_text('"the cat"\n\n{"prompt": "a mat", "id": 3}\n')
    greedy = ["--prompts", str(prompts), "--temperature", "0"]
    both = [json.loads(line) for line in printed(*greedy).splitlines()]
    assert [(each["prompt"], each.get("id")) for each in both] == [("the cat", None), ("a mat", 3)]
    for each in both:
        alone = printed("--prompt", each["prompt"], "--temperature", "0")
        assert alone == each["prompt"] + each["text"] + "\n"
    assert printed(*greedy, "--batch-size", "1") == printed(*greedy)
    with pytest.raises(ConfigError, match="without --prompts"):
        printed("--prompt", "the", "--batch-size", "2")
    for line in printed("--prompts", str(prompts), "--num-samples", "2").splitlines():
        assert len(json.loads(line)["texts"]) == 2
    prompts.write_text("\n \n")
    with pytest.raises(ConfigError, match=r"(?s)there is no prompt.*not blank"):
        printed(*greedy)
    for wrong in ("the cat", '{"text": "the cat"}', "7"):
        prompts.write_text(f'"fine"\n{wrong}\n')
        with pytest.raises(ConfigError, match=r"(?s)line 2 holds no prompt.*--prompts"):
            printed(*greedy)


def test_script_takes_the_chat_template_that_its_error_asks_for(
    trained, tmp_path, capsys, monkeypatch
):
    def output(*flags: str) -> str:
        prompt = [] if {"--prompt", "--prompts"} & {*flags} else ["--prompt", "th"]
        common = ["--temperature", "0", "--max-new-tokens", "4", *prompt, *flags]
        monkeypatch.setattr(sys, "argv", ["generate", "--run", str(trained.run_dir), *common])
        generate.main()
        return capsys.readouterr().out

    with pytest.raises(DataError, match=r"do: +name one: --chat-template FILE$"):
        output("--chat")
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}e")
    assert "the" + output("--chat", "--chat-template", str(template)) == output("--prompt", "the")
    template.write_text("{{ raise_exception('not today') }}")
    with pytest.raises(DataError, match=r"(?s)says: not today\n.*--chat-template FILE"):
        output("--chat", "--chat-template", str(template))
    with pytest.raises(ConfigError, match="without --chat"):
        output("--chat-template", str(template))
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}e")
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "t"}, {"role": "assistant", "content": "h"}]
    chats.write_text(json.dumps({"messages": messages}))
    with pytest.raises(ConfigError, match=r"(?s)line 1 is a conversation.*add --chat"):
        output("--prompts", str(chats))
    (tmp_path / "both.jsonl").write_text(json.dumps({"prompt": "the", "messages": messages}))
    assert json.loads(output("--prompts", str(tmp_path / "both.jsonl")))["prompt"] == "the"
    answered = json.loads(
        output("--prompts", str(chats), "--chat", "--chat-template", str(template))
    )
    assert answered["messages"] == messages
    assert "the" + answered["text"] + "\n" == output("--prompt", "the")
    template.write_text("{{ messages[0].content }}{{ tools[0].name }}")
    asked = {"messages": messages[:1], "tools": [{"name": "he"}]}
    chats.write_text(json.dumps(asked))
    assert json.loads(
        output("--prompts", str(chats), "--chat", "--chat-template", str(template))
    ) == asked | {"text": answered["text"]}
    chats.write_text(json.dumps({"prompt": "t"} | {"tools": [{"name": "he"}]}))
    again = json.loads(output("--prompts", str(chats), "--chat", "--chat-template", str(template)))
    assert (again["prompt"], again["text"]) == ("t", answered["text"])
    chats.write_text(json.dumps(asked | {"tools": "a search"}))
    with pytest.raises(DataError, match=r"(?s)no conversation.*'tools' is a text that is not JSON"):
        output("--prompts", str(chats), "--chat", "--chat-template", str(template))
    with pytest.raises(ConfigError, match=r"leave --eos \(in Python eos=\) out"):
        output("--eos", "x")


def test_script_error_says_what_is_wrong(tmp_path):
    done = run_in_process("generate", "--run", tmp_path, "--prompt", "the")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no run to sample from")


def test_script_streams_text_to_a_terminal(monkeypatch):
    class Terminal:
        written, shown = "", ""

        def write(self, text):
            self.written += text

        def flush(self):
            self.shown = self.written

        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    seen = []

    def pieces():
        for piece in ("a", "b", "c"):
            seen.append(terminal.shown)
            yield [piece, piece.upper()]

    show("> ", pieces())
    assert seen == ["> ", "> a", "> ab"]
    assert terminal.written == f"> abc\n\n{'-' * 40}\n> ABC\n"


def test_script_ends_quietly_when_its_pipe_is_closed():
    """As with `| head -c 1`: the pipe is closed while text is still being made."""
    program = f"""
import os, runpy, sys
from optimus_jax.inference import loading
class Model:
    config, step = type("", (), {{"name": "tiny"}}), 1
    def generate(self, *_, **__):
        return iter([["x" * 100000]] * 3)
loading.load_text_model = lambda *_, **__: Model()
sys.argv = ["generate.py", "--run", "r", "--prompt", "p"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "tiny after step 1\n")
