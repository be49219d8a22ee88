"""Runs whose frozen matrices are quantised: from published models and other runs, on every mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, assert_close, host_leaves
from plans import build, case, in_order
from published_models import TINY_RUN, state_dict_of, write

import optimus_jax
from optimus_jax.config import Tuning
from optimus_jax.inference.loading import load_text_model
from optimus_jax.inference.text_model import GenerationSettings
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.mesh.quantised import decoded, encoded
from optimus_jax.models.huggingface import from_huggingface
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.run import published_weights
from optimus_jax.run.published_weights import PublishedWeights
from optimus_jax.weights.directory import read_config
from optimus_jax.weights.published import PublishedSource

NF4 = {"model.tuning.method": "lora", "model.tuning.base_precision": "nf4"}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(
    ("family", "of"),
    [
        ("llama", case("pipe=2,fsdp=4", microbatches=4, zero=3)),
        pytest.param("gpt2", case("data=2,fsdp=4", zero=3), marks=pytest.mark.nightly),
    ],
)
def test_codes_are_those_of_the_files(family, of, kind, tmp_path, monkeypatch):
    directory = write(family, "safetensors", "float16", tmp_path / "model")
    tuning = Tuning(method="lora", rank=2, base_precision=kind)
    model = replace(read_config(directory), tuning=tuning)
    program = build(model, of).program
    monkeypatch.setattr(published_weights, "BOX_BYTES", 200)
    source = PublishedSource.parse(str(directory), what="--model")
    state, _ = PublishedWeights(source).initial_state(program, lambda text: None)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == program.state_shardings
    found = in_order(program, host_leaves(state))
    base = from_huggingface(state_dict_of(family, "float16"), model.base, program.shapes.vocab_rows)
    leaves = named_leaves(program.shapes.base.leaves)
    for path, values in host_leaves(base).items():
        leaf = leaves[path]
        if leaf.is_matrix and leaf.is_in_layers:
            codes = encoded(jnp.asarray(values), leaf, kind)
            for name, part in codes.items():
                theirs = found[f"params/{path}/{name}"]
                np.testing.assert_array_equal(theirs[: len(part)], part, err_msg=path)
        elif leaf.is_matrix:
            assert found[f"params/{path}"].dtype == jnp.bfloat16
        else:
            np.testing.assert_array_equal(found[f"params/{path}"][: len(values)], values)


def test_a_run_begins_goes_on_elsewhere_and_is_exported(llama, words, tmp_path):
    run = tmp_path / "run"
    settings = {**TINY_RUN, "steps": 2, "checkpoint_every": 2, **NF4}
    optimus_jax.train(str(llama), data=words, mesh="pipe=2,fsdp=4", run_dir=run, **settings)
    result = optimus_jax.train(resume=True, run_dir=run, steps=4, mesh="data=4,fsdp=2")
    assert [record.step for record in result.history][-1] == 4
    done = optimus_jax.export(run, tmp_path / "out", dtype="f32")
    sampling = GenerationSettings(temperature=0, max_new_tokens=8)
    texts = [
        "".join(first for (first,) in load_text_model(each).generate("the c", sampling))
        for each in (run, done.directory)
    ]
    assert texts[0] == texts[1]


def test_a_run_quantises_what_another_trained(words, tmp_path):
    """Its codes are those of the other's parameters, and a third run decodes them."""
    sizes = {"model.num_layers": 2, "model.embed_dim": 32, "model.mlp_dim": 64}
    settings = {**TINY_RUN, "data": words, "steps": 1}
    first = optimus_jax.train("llama-nano", run_dir=tmp_path / "first", **sizes, **settings)
    still = {**settings, "lr": 1e-30}
    second = optimus_jax.train(
        init_from=str(tmp_path / "first"), run_dir=tmp_path / "second", **NF4, **still
    )
    plain = {"model.tuning.method": "none", "model.tuning.base_precision": "f32"}
    third = optimus_jax.train(
        init_from=str(tmp_path / "second"), run_dir=tmp_path / "third", **plain, **still
    )
    before, after, again = (host_leaves(each.state) for each in (first, second, third))
    leaf = "params/layers/mlp/down"
    row = Leaf(("layers", "embed", "mlp"), "matrix_back", "mlp")
    codes = encoded(jnp.asarray(before[leaf]), row, "nf4")
    for name, part in codes.items():
        np.testing.assert_array_equal(after[f"{leaf}/{name}"], part)
    assert_close(again[leaf], np.asarray(decoded(codes, row, jnp.float32)), F32_RELATIVE)
