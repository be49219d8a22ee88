"""The logits of a model with frozen matrices in nf4, beside those of bitsandbytes.

Blocks lie along other dimensions in some matrices, so codes differ there, and logits are as far
from each other as from the exact ones. The test needs `pip install bitsandbytes`.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from optimus_jax.config import Tuning
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.base_formats import stored_alike
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface
from optimus_jax.models.shapes import model_shapes

SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = np.random.Generator(np.random.PCG64(3)).integers(0, 256, (4, 64), dtype=np.int32)
RUN = ForwardContext(comm=Collectives(jnp.dtype(jnp.float32)))
MARGIN = 1.2
"""For six seeds, our error was 0.91 to 1.07 of theirs, and both were 0.93 to 1.09 of it apart."""


def test_logits_are_as_near_as_those_of_bitsandbytes():
    nn: Any = pytest.importorskip("bitsandbytes.nn")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name in ("embed_tokens", "lm_head"):  # which are bf16 beside codes
        weight = theirs.get_submodule(name if name == "lm_head" else f"model.{name}").weight
        weight.data = weight.data.bfloat16().float()
    model = config_from_huggingface(config.to_dict())
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    base = from_huggingface(state, model, model.vocab_size)
    tokens = torch.tensor(TOKENS).long()
    with torch.no_grad():
        exact = theirs(tokens).logits.numpy()
        for name, module in list(theirs.model.named_modules()):
            if isinstance(module, torch.nn.Linear):
                coded = nn.Linear4bit(
                    module.in_features,
                    module.out_features,
                    bias=False,
                    compute_dtype=torch.float32,
                    compress_statistics=True,
                    quant_type="nf4",
                )
                coded.load_state_dict(module.state_dict())
                theirs.model.set_submodule(name, coded.to("cpu"))
        assert theirs.model.layers[3].mlp.down_proj.weight.dtype == torch.uint8
        found_theirs = theirs(tokens).logits.numpy()

    def logits(model: Any, params: Any) -> np.ndarray:
        decoder = model_shapes(model, model.vocab_size).module(params, RUN.comm)
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        return np.asarray(decoder.logits(decoder.hidden(jnp.asarray(TOKENS), positions, RUN), RUN))

    frozen = ("embedding", "attention", "mlp", "head")
    coded_model = replace(model, tuning=Tuning(freeze=frozen, base_precision="nf4"))
    codes = stored_alike(base, model_shapes(coded_model, model.vocab_size))
    assert codes["layers"]["mlp"]["down"]["codes"].dtype == jnp.uint8
    ours = logits(coded_model, codes)

    def apart(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.linalg.norm(one - other) / np.linalg.norm(exact))

    assert apart(logits(model, base), exact) < 1e-5
    error, error_theirs = apart(ours, exact), apart(found_theirs, exact)
    print(f"ours {error:.5f}, theirs {error_theirs:.5f}, apart {apart(ours, found_theirs):.5f}")
    assert error < MARGIN * error_theirs
    # Independent errors would be 1.4 times as far apart; but out and down have the same blocks.
    assert apart(ours, found_theirs) < MARGIN * error_theirs
