"""The decoder families: what each has of the features in `config.Features`. A new family is a new
row, and a format in `models/huggingface_formats.py` if weights of it are to be read.
"""

from dataclasses import fields, replace
from functools import lru_cache
from typing import NamedTuple

from optimus_jax.config import Features, ModelConfig
from optimus_jax.config.model import REPLACEMENT_LABELS
from optimus_jax.errors import ConfigError, explain, nearest

GPT2 = Features(
    positions="learned",
    position_offset=0,
    rope_pairs="halves",
    rope_dims=0,
    window_rope_theta=0.0,
    norm="layer",
    norm_place="pre",
    parallel=False,
    final_norm=True,
    biases=("query", "key", "value", "out", "up", "down"),
    causal=True,
    attention_scale=0.0,
    qk_norm="none",
    attention_softcap=0.0,
    window=0,
    layer_types=("window",),
    gated=False,
    activation="gelu_tanh",
    scale_embedding=False,
    table_dim=0,
    token_types=0,
    embedding_norm=False,
    table_bias=False,
    head_transform=False,
    pooler="none",
    head_bias=False,
    head_softcap=0.0,
)
LLAMA = replace(GPT2, positions="rotary", norm="rms", biases=(), gated=True, activation="silu")
BERT = replace(
    GPT2,
    causal=False,
    norm_place="post",
    final_norm=False,
    activation="gelu",
    token_types=2,
    embedding_norm=True,
    head_transform=True,
    pooler="tanh",
    head_bias=True,
)
GEMMA2 = replace(
    LLAMA,
    norm="rms_plus_one",
    norm_place="sandwich",
    activation="gelu_tanh",
    layer_types=("window", "full"),
    scale_embedding=True,
)

FAMILIES: dict[str, Features] = {
    "gpt2": GPT2,
    "gpt_neo": replace(
        GPT2,
        biases=("out", "up", "down"),
        attention_scale=1.0,
        window=256,
        layer_types=("full", "window"),
    ),
    "gptj": replace(
        GPT2,
        positions="rotary",
        rope_pairs="interleaved",
        rope_dims=64,
        parallel=True,
        biases=("up", "down"),
        head_bias=True,
    ),
    "opt": replace(GPT2, position_offset=2, activation="relu"),
    "bert": BERT,
    "megatron-bert": replace(BERT, norm_place="pre", final_norm=True, embedding_norm=False),
    "vit": replace(GPT2, causal=False, activation="gelu"),
    "whisper": replace(GPT2, activation="gelu", biases=("query", "value", "out", "up", "down")),
    "electra": replace(BERT, table_bias=True, pooler="activation"),
    "llama": LLAMA,
    "mistral": LLAMA,
    "phi3": LLAMA,
    "qwen2": replace(LLAMA, biases=("query", "key", "value")),
    "qwen3": replace(LLAMA, qk_norm="head"),
    "olmo2": replace(LLAMA, norm_place="output", qk_norm="whole"),
    "gemma2": GEMMA2,
    "gemma3_text": replace(
        GEMMA2,
        qk_norm="head",
        window_rope_theta=10_000.0,
        layer_types=(*["window"] * 5, "full"),
    ),
}
"""Names are Hugging Face's `model_type`."""
BLOCKS: dict[str, type] = {}
"""The class of a layer, by family; those of other families are `Block` (models/block.py), whose
constructor and `__call__` any other has too (docs/howto/own_block.md)."""


@lru_cache(maxsize=1 << 10)
def features_of(model: ModelConfig) -> Features:
    """A model's features, none of them None: its own, and its family's for the rest.

    Raises ConfigError naming the nearest family if its family is unknown.
    """
    if model.family not in FAMILIES:
        raise ConfigError(
            explain(
                f"unknown model family {model.family!r}",
                given=f"model.family={model.family}",
                do=f"{nearest(model.family, FAMILIES)}; one of your own is added to FAMILIES first",
            )
        )
    own = {
        field.name: value
        for field in fields(Features)
        if (value := getattr(model.features, field.name)) is not None
    }
    return replace(FAMILIES[model.family], **own)


@lru_cache
def _first_row(family: str) -> tuple[Features, type | None]:
    """A family's rows when it was first used: what was traced since is kept by its name."""
    return FAMILIES[family], BLOCKS.get(family)


def table_width(model: ModelConfig) -> int:
    """Width of the embedding's rows."""
    return features_of(model).table_dim or model.embed_dim


def generator_of(model: ModelConfig) -> ModelConfig | None:
    """The generator of a model as a model of its own; None: there is none."""
    sizes, width = model.generator, table_width(model)
    if sizes is None:
        return None
    return replace(
        model.body,
        name=f"{model.name}, generator",
        num_layers=sizes.num_layers,
        embed_dim=sizes.embed_dim,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.embed_dim // sizes.num_heads,
        mlp_dim=sizes.mlp_dim,
        tied=True,
        features=replace(model.features, table_dim=0 if width == sizes.embed_dim else width),
    )


class HeadTransform(NamedTuple):
    """What is between the residual stream and the head's matrix: a projection, and more."""

    width: int
    """Width of its result."""
    activation: str | None = None
    """The nonlinearity after it, and before that a bias; None: neither."""
    is_normed: bool = False


def head_transform_of(model: ModelConfig) -> HeadTransform | None:
    """What precedes the head's matrix; None: nothing."""
    features = features_of(model)
    if model.labels:
        if model.labelled == "replacement":
            return HeadTransform(model.embed_dim, features.activation)
        if features.pooler == "none" or model.labelled != "sequence":
            return None
        tanh = features.pooler == "tanh"
        return HeadTransform(model.embed_dim, "tanh" if tanh else features.activation)
    if features.head_transform:
        return HeadTransform(table_width(model), features.activation, is_normed=True)
    return HeadTransform(features.table_dim) if features.table_dim else None


@lru_cache(maxsize=1 << 8)
def has_window(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has a window."""
    features = features_of(model)
    types = features.layer_types or ("full",)
    return tuple(
        bool(features.window) and types[layer % len(types)] == "window"
        for layer in range(model.num_layers)
    )


def rotated_dims(model: ModelConfig) -> int:
    """Dimensions of a head that positions rotate; 0 without rotary positions."""
    features = features_of(model)
    return (features.rope_dims or model.head_dim) if features.positions == "rotary" else 0


def check_family(config: ModelConfig) -> None:
    """Raise ConfigError if a model's sizes or features are impossible, or its family's row has
    changed.
    """
    features, dims = features_of(config), rotated_dims(config)
    if (FAMILIES.get(config.family), BLOCKS.get(config.family)) != _first_row(config.family):
        raise ConfigError(
            explain(
                f"model family {config.family!r} has changed since it was first used",
                given=f"another row {config.family!r} of FAMILIES or BLOCKS",
                do="give the new row another name, or start Python again",
            )
        )
    if {"key", "value"} & set(features.biases or ()) == {"key"}:
        raise ConfigError(
            explain(
                "keys have a bias only where values have one",
                given=f"model.features.biases={','.join(features.biases or ())}",
                do="leave key out, or name key and value",
            )
        )
    if config.encoder_layers:
        if config.family in BLOCKS:
            raise ConfigError(
                explain(
                    "layers of a model with an encoder attend to it, as Whisper's do",
                    given=f"a row {config.family!r} of BLOCKS,"
                    f" model.encoder_layers={config.encoder_layers}",
                    do="set model.encoder_layers=0 and model.frames=0, or leave the row out",
                )
            )
        _check_encoder(config, features)
    if config.generator is not None:
        _check_generator(config)
    if config.tuning.has_adapters and "gate" in config.tuning.targets and not features.gated:
        raise ConfigError(
            explain(
                f"{config.name} has no projection 'gate'",
                given=f"model.tuning.targets={','.join(config.tuning.targets)}",
                do="name others: all, qkvo, mlp, query, key, value, out, up, down",
            )
        )
    if features.parallel and features.norm_place != "pre":
        raise ConfigError(
            explain(
                "parallel attention and feed-forward read one norm, which precedes them",
                given=f"model.features.parallel=true, norm_place={features.norm_place}",
                do="set model.features.norm_place=pre",
            )
        )
    if features.window and not features.causal:
        raise ConfigError(
            explain(
                "a window is of the nearest earlier tokens, so attention must be causal",
                given=f"model.features.causal=false, window={features.window}",
                do="set model.features.window=0, or model.features.causal=true",
            )
        )
    if features.positions == "sinusoid" and config.embed_dim % 2:
        raise ConfigError(
            explain(
                "sinusoidal positions are as many sines as cosines",
                given=f"model.features.positions=sinusoid, model.embed_dim={config.embed_dim}",
                do="set model.embed_dim to an even number",
            )
        )
    if dims > config.head_dim or (features.rope_dims and dims % 2):
        most = config.head_dim - config.head_dim % 2
        raise ConfigError(
            explain(
                "rotary positions turn pairs of a head's dimensions",
                given=f"model.features.rope_dims={dims}, model.head_dim={config.head_dim}",
                do=f"set model.features.rope_dims to an even number, {most} at most",
            )
        )
    if dims % 2:
        raise ConfigError(
            explain(
                f"rotary positions turn the dimensions of a head in pairs, and {config.name} has an"
                " odd number",
                given=f"model.head_dim={config.head_dim}",
                do=(
                    f"set model.head_dim to {config.head_dim - 1} or {config.head_dim + 1}"
                    if config.head_dim > 1
                    else "set model.head_dim to 2 or more"
                ),
            )
        )


def _check_generator(config: ModelConfig) -> None:
    """Raise ConfigError if a model with a generator does not find what that replaces, or parts are
    trained, or stored, as only models without one have them.
    """
    without = "set model.generator=none"
    if config.family != "electra":
        raise ConfigError(
            explain(
                "a generator has the embedding of its model, as ELECTRA's has",
                given=f"model.generator, model.family={config.family}",
                do=f"name a model of the family electra, or {without}",
            )
        )
    if config.labelled != "replacement" or config.labels != REPLACEMENT_LABELS:
        raise ConfigError(
            explain(
                "a model with a generator finds replaced tokens",
                given=f"model.labels={','.join(config.labels) or 'none'},"
                f" model.labelled={config.labelled}",
                do=f"set model.labels={','.join(REPLACEMENT_LABELS)} and"
                f" model.labelled=replacement, or {without}",
            )
        )
    tuning = config.tuning
    if tuning.has_adapters or tuning.freeze_layers or tuning.base_precision != "f32":
        raise ConfigError(
            explain(
                "a model with a generator has no adapters, all its layers are trained, and its"
                " parameters are float32",
                given=f"model.tuning.method={tuning.method},"
                f" model.tuning.freeze_layers={tuning.freeze_layers},"
                f" model.tuning.base_precision={tuning.base_precision}",
                do=f"leave them out, or {without}",
            )
        )


_BESIDE_AN_ENCODER = {
    "positions": "learned",
    "norm_place": "pre",
    "parallel": False,
    "final_norm": True,
    "causal": True,
    "qk_norm": "none",
    "window": 0,
    "scale_embedding": False,
    "table_dim": 0,
    "token_types": 0,
    "embedding_norm": False,
    "head_transform": False,
    "head_bias": False,
}
"""What a model with an encoder has of the features that would mean something else in each side."""


def _check_encoder(config: ModelConfig, features: Features) -> None:
    """Raise ConfigError if a model with an encoder has what two sides in one stack cannot have."""
    given = {name: getattr(features, name) for name in _BESIDE_AN_ENCODER}
    wrong = [name for name, value in given.items() if value != _BESIDE_AN_ENCODER[name]]
    if wrong:
        raise ConfigError(
            explain(
                f"{config.name} has an encoder, and features that only other models have",
                given=", ".join(f"model.features.{name}={given[name]}" for name in wrong),
                do="set " + ", ".join(f"{name}={_BESIDE_AN_ENCODER[name]}" for name in wrong),
            )
        )
    tuning = config.tuning
    if tuning.has_adapters or tuning.freeze_layers:
        raise ConfigError(
            explain(
                f"{config.name} has an encoder, whose layers are trained with the others",
                given=f"model.tuning.method={tuning.method},"
                f" model.tuning.freeze_layers={tuning.freeze_layers}",
                do="leave model.tuning.method and model.tuning.freeze_layers out; groups of"
                " parameters may be frozen with model.tuning.freeze",
            )
        )
