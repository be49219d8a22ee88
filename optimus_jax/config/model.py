"""Settings of the model: its sizes, and features that differ from its family's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

from optimus_jax.config.checks import check_counts, check_not_negative, check_positive
from optimus_jax.config.tuning import Tuning
from optimus_jax.errors import ConfigError, explain

CLASS_TOKEN, PATCH_TOKEN, HIDDEN_PATCH = 0, -1, -2
"""Token ids of a model of images: of the class, a row of its embedding; of a patch, which a frame
of sound has too; and of a patch that the model does not see."""
COLUMNS_PER_FRAME = 2
"""Columns of a spectrogram that become a frame."""
MOST_LAYERS = 10_000
"""More are a typo, and too many to assign to stages one by one."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretching of rotary frequencies, for sequences longer than those of the first training."""

    kind: Literal["llama3", "linear"] = "llama3"
    """linear divides all frequencies by factor; llama3 (arXiv:2407.21783) spares high ones."""
    factor: float = 8.0
    """How far low frequencies are stretched."""
    low_frequency_factor: float = 1.0
    """llama3: wavelengths above original_length / this are stretched by the whole factor."""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths below original_length / this are left alone."""
    original_length: int = 8192
    """llama3: sequence length, in tokens, of the training before stretching."""

    def __post_init__(self) -> None:
        check_positive(
            self, "factor", "low_frequency_factor", "high_frequency_factor", "original_length"
        )
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if self.kind == "llama3" and low >= high:
            raise ConfigError(
                explain(
                    "low_frequency_factor must be below high_frequency_factor",
                    given=f"model.rope_scaling.low_frequency_factor={low},"
                    f" high_frequency_factor={high}",
                    do="set them as the model's config.json has them; Llama 3.1 has 1 and 4",
                )
            )


Bias = Literal["query", "key", "value", "out", "up", "down"]
Labelled = Literal["sequence", "token", "span", "replacement"]
SPAN_LABELS = ("begin", "end")
"""Labels of a model that finds spans."""
REPLACEMENT_LABELS = ("replaced",)
"""Label of a model that finds replaced tokens: the odds that one is."""
FIXED_LABELS: Mapping[str, tuple[str, ...]] = {
    "span": SPAN_LABELS,
    "replacement": REPLACEMENT_LABELS,
}
"""Labels that no data names, by what has one each."""
LayerType = Literal["full", "window"]
Medium = Literal["text", "images", "sound"]
Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
"""Filters of Pillow, which numbers them in this order."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """The architecture of a decoder apart from its sizes. None: as the model's family has it
    (`models/families.py`), which leaves none open.
    """

    positions: Literal["none", "learned", "sinusoid", "rotary"] | None = None
    """Encoding of positions: a table (learned, or sinusoids) added to the embedding, or rotated
    queries and keys."""
    position_offset: int | None = None
    """Rows of a learned table before that of the first position."""
    rope_pairs: Literal["halves", "interleaved"] | None = None
    """Dimensions that are rotated together: i and i + dims/2, or 2i and 2i + 1."""
    rope_dims: int | None = None
    """Dimensions of a head that are rotated, from the first; 0: all."""
    window_rope_theta: float | None = None
    """Base of rotary frequencies in layers with a window; 0: that of all layers."""
    norm: Literal["layer", "rms", "rms_plus_one"] | None = None
    """LayerNorm with bias, RMSNorm, or RMSNorm whose scale is stored minus one."""
    norm_place: Literal["pre", "post", "sandwich", "output"] | None = None
    """Norm before each sublayer (pre-norm), after each addition to the residual (post-norm), before
    and after each sublayer, or after it alone."""
    parallel: bool | None = None
    """Whether attention and feed-forward read the same normed residual, and are added to it
    together."""
    final_norm: bool | None = None
    """Whether a norm precedes the head."""
    biases: tuple[Bias, ...] | None = None
    """Projections with a bias; an empty list is none of them."""
    causal: bool | None = None
    """Whether a token sees itself and earlier ones only; otherwise it sees all of its document."""
    attention_scale: float | None = None
    """Factor of attention scores; 0: 1 / sqrt(head_dim)."""
    qk_norm: Literal["none", "head", "whole"] | None = None
    """RMSNorm of queries and keys: of each head, or of all heads together."""
    attention_softcap: float | None = None
    """Scores s become c tanh(s / c); 0: no cap."""
    window: int | None = None
    """Keys that a query sees in layers with a window, its own included; 0: no window."""
    layer_types: tuple[LayerType, ...] | None = None
    """Pattern of layers with and without a window, repeated over the depth; one entry is for all
    layers."""
    gated: bool | None = None
    """Whether a gate multiplies the feed-forward's hidden values."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] | None = None
    """Nonlinearity of the feed-forward, or of its gate."""
    scale_embedding: bool | None = None
    """Whether embedded tokens are multiplied by sqrt(embed_dim)."""
    table_dim: int | None = None
    """Width of the embedding's rows, projected to embed_dim; 0: embed_dim."""
    token_types: int | None = None
    """Rows of a table of token types, such as first and second sentence; 0: no types."""
    embedding_norm: bool | None = None
    """Whether tokens, positions and types are added in the width of the embedding's rows and
    normed, before they are projected to embed_dim."""
    table_bias: bool | None = None
    """Whether the projection from table_dim to embed_dim has a bias."""
    head_transform: bool | None = None
    """Whether a projection, the activation and a norm precede the output head."""
    pooler: Literal["none", "tanh", "activation"] | None = None
    """What precedes a head of labels of whole sequences: nothing, or a projection and tanh or the
    activation."""
    head_bias: bool | None = None
    """Whether the output head has a bias."""
    head_softcap: float | None = None
    """Logits l become c tanh(l / c); 0: no cap."""

    def __post_init__(self) -> None:
        counts = ("position_offset", "rope_dims", "window", "table_dim", "token_types")
        floats = ("window_rope_theta", "attention_scale", "attention_softcap", "head_softcap")
        check_not_negative(self, *counts, *floats)
        check_counts(self, *counts)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Sizes of a generator: a smaller model of the same family, which restores masked tokens with
    the same embedding. The model beside it finds those that it got wrong.

    Clark et al. 2020 (arXiv:2003.10555), section 3.2: a quarter to a half of the model's width is
    best.
    """

    num_layers: int = 12
    """Layers."""
    embed_dim: int = 64
    """Width of the residual stream."""
    num_heads: int = 1
    """Heads, of embed_dim / num_heads each."""
    mlp_dim: int = 256
    """Hidden width of the feed-forward block."""

    def __post_init__(self) -> None:
        counts = ("num_layers", "embed_dim", "num_heads", "mlp_dim")
        check_positive(self, *counts)
        check_counts(self, *counts)
        if self.embed_dim % self.num_heads:
            raise ConfigError(
                explain(
                    "the heads of a generator have no whole width",
                    given=f"model.generator.embed_dim={self.embed_dim},"
                    f" model.generator.num_heads={self.num_heads}",
                    do=f"set model.generator.num_heads to a divisor of {self.embed_dim}",
                )
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a model; its family (`models/families.py`) and features determine the
    architecture.
    """

    name: str = "custom"
    """Name of the preset."""
    family: str = "gpt2"
    """Architecture: a key of `models.families.FAMILIES`."""
    vocab_size: int = 50257
    """Number of token ids, before padding to equal shards."""
    num_layers: int = 12
    """Layers; of an encoder and a decoder together, if there are both."""
    embed_dim: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Query heads."""
    num_kv_heads: int = 12
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: int = 64
    """Width of a head."""
    mlp_dim: int = 3072
    """Hidden width of the feed-forward block."""
    max_length: int = 1024
    """Longest sequence, in tokens."""
    image_size: int = 0
    """Pixels of a side of the images that the model reads; 0: it reads text."""
    patch_size: int = 16
    """Pixels of a side of a patch, which is a token."""
    num_channels: int = 3
    """Values of a pixel."""
    pixel_mean: tuple[float, ...] = ()
    """Mean of each channel, whose values are from 0 to 1: it is subtracted from them. Empty: 0.5
    each."""
    pixel_std: tuple[float, ...] = ()
    """Standard deviation of each channel, by which the values are then divided. Empty: 0.5 each."""
    resize: int = 0
    """Pixels of a side to which an image is scaled, of which the middle (`image_size`) is read; 0:
    `image_size`, so that nothing is cut off."""
    keep_aspect: bool = False
    """Whether it is the shorter side of an image that is scaled to that, and not both."""
    resample: Resample = "bilinear"
    """How an image is scaled."""
    encoder_layers: int = 0
    """Layers, the first ones, of an encoder of sound: the others read text, and attend to what it
    gives. 0: there is no encoder."""
    frames: int = 0
    """Frames of sound that the encoder reads, each a token of two columns of a spectrogram."""
    mel_bins: int = 80
    """Frequencies of the spectrogram."""
    tied: bool = True
    """Whether the output head is the embedding."""
    norm_epsilon: float = 1e-5
    """Added to the variance in every norm."""
    rope_theta: float = 10000.0
    """Base of rotary frequencies; unused by families with learned positions."""
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary frequencies, or None."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections into the residual get / sqrt(2 layers)."""
    labels: tuple[str, ...] = ()
    """Names of the labels that the head tells apart, in order; empty: the head is over the
    vocabulary."""
    labelled: Labelled = "sequence"
    """What has a label each: a whole sequence, or every token; or spans, which begin at one token
    and end at another; or whether a token was replaced."""
    generator: Generator | None = None
    """The model that replaces tokens, which this one finds; None: there is none."""
    features: Features = field(default_factory=Features)
    """Features that differ from those of the family."""
    dropout: float = 0.0
    """Probability on embeddings, attention weights and both residual branches."""
    tuning: Tuning = field(default_factory=Tuning)
    """Which parameters are trained, and adapters."""

    @property
    def base(self) -> "ModelConfig":
        """The model without adapters, all of it trained."""
        return replace(self, tuning=Tuning())

    @property
    def body(self) -> "ModelConfig":
        """The same model with a head over the vocabulary."""
        return replace(self, labels=(), labelled="sequence", generator=None)

    @property
    def num_outputs(self) -> int:
        """Outputs of the head for a token: labels, values of a patch, or token ids."""
        return len(self.labels) or (self.patch_values if self.image_size else self.vocab_size)

    @property
    def predicts_tokens(self) -> bool:
        """Whether the head is over the vocabulary, and not of labels or values of patches."""
        return not self.labels and not self.image_size

    @property
    def patch_values(self) -> int:
        """Values of a patch of an image, or of a frame of sound; 0: there is text alone."""
        if self.frames:
            return COLUMNS_PER_FRAME * self.mel_bins
        return self.patch_size**2 * self.num_channels if self.image_size else 0

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel of an image, whose values are from 0 to 1."""
        halves = (0.5,) * self.num_channels
        return self.pixel_mean or halves, self.pixel_std or halves

    @property
    def resized(self) -> int:
        """Pixels of a side to which an image is scaled."""
        return self.resize or self.image_size

    @property
    def reads(self) -> Medium:
        """What the model reads; of sound, an encoder does, and a decoder writes text."""
        if self.frames:
            return "sound"
        return "images" if self.image_size else "text"

    @property
    def reads_documents(self) -> bool:
        """Whether an example may hold several documents, or end within one; otherwise it is an
        image or a recording."""
        return self.reads == "text"

    @property
    def draws_dropout(self) -> bool:
        """Whether a training step drops anything."""
        return self.dropout > 0 or self.tuning.dropout > 0

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Computed once, because models are cache keys."""
        return self._hash

    def __post_init__(self) -> None:
        counts = (
            "vocab_size",
            "num_layers",
            "embed_dim",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "max_length",
        )
        check_positive(self, *counts, "norm_epsilon", "rope_theta", "patch_size", "num_channels")
        sizes = ("image_size", "resize", "encoder_layers", "frames")
        check_positive(self, "mel_bins")
        check_not_negative(self, *sizes)
        check_counts(self, *counts, *sizes, "patch_size", "num_channels", "mel_bins")
        self._check_encoder()
        self._check_normalisation()
        self._check_resize()
        if self.image_size % self.patch_size:
            raise ConfigError(
                explain(
                    "an image cannot be divided into whole patches",
                    given=f"model.image_size={self.image_size}, model.patch_size={self.patch_size}",
                    do="choose an image_size that patch_size divides",
                )
            )
        tokens = (self.image_size // self.patch_size) ** 2 + 1
        if self.image_size and self.max_length != tokens:
            raise ConfigError(
                explain(
                    "a model of images has a position for each patch, and one for the class",
                    given=f"model.max_length={self.max_length}, {tokens - 1} patches",
                    do=f"set model.max_length={tokens}",
                )
            )
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(
                explain(
                    "model.num_layers is too large",
                    given=self.num_layers,
                    do=f"choose {MOST_LAYERS:,} or less",
                )
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                explain(
                    "model.num_heads must be a multiple of model.num_kv_heads",
                    given=f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}",
                    do=f"set model.num_kv_heads to a divisor of {self.num_heads}",
                )
            )
        if len(set(self.labels)) != len(self.labels):
            raise ConfigError(
                explain(
                    "labels must have different names",
                    given=f"model.labels={','.join(self.labels)}",
                    do="name each once",
                )
            )
        if self.tuning.base_precision == "nf4" and (self.head_dim % 2 or self.mlp_dim % 2):
            raise ConfigError(
                explain(
                    "nf4 stores two elements of a head, or of the feed-forward, in a byte",
                    given=f"head_dim={self.head_dim}, mlp_dim={self.mlp_dim}",
                    do="use even sizes, or set model.tuning.base_precision=int8",
                )
            )
        if self.init_std < 0:
            raise ConfigError(
                explain(
                    "model.init_std cannot be negative", given=self.init_std, do="choose 0 or more"
                )
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                explain(
                    "model.dropout is a probability",
                    given=self.dropout,
                    do="choose 0 <= dropout < 1",
                )
            )

    def _check_encoder(self) -> None:
        """Raise ConfigError if there is half an encoder, or nothing beside it."""
        given = f"model.encoder_layers={self.encoder_layers}, model.frames={self.frames}"
        if bool(self.encoder_layers) != bool(self.frames):
            raise ConfigError(
                explain(
                    "an encoder has layers and frames of sound",
                    given=given,
                    do="set both, or leave both at 0",
                )
            )
        if not self.frames:
            return
        if self.encoder_layers >= self.num_layers or self.frames >= self.max_length:
            raise ConfigError(
                explain(
                    "an encoder leaves no layers or no positions for text",
                    given=f"{given}, num_layers={self.num_layers}, max_length={self.max_length}",
                    do="choose a num_layers above encoder_layers, and a max_length above frames",
                )
            )
        if self.image_size or self.labels:
            raise ConfigError(
                explain(
                    "a model of sound writes text, and has neither images nor labels",
                    given=f"model.frames={self.frames}, model.image_size={self.image_size},"
                    f" model.labels={','.join(self.labels)}",
                    do="set model.frames=0 and model.encoder_layers=0, or leave the others out",
                )
            )

    def _check_resize(self) -> None:
        """Raise ConfigError unless an image that is scaled has the pixels that are read."""
        if self.resize and not (self.image_size and self.resize >= self.image_size):
            raise ConfigError(
                explain(
                    "an image is scaled to at least the pixels that the model reads",
                    given=f"model.resize={self.resize}, model.image_size={self.image_size}",
                    do=f"choose {self.image_size} or more, or 0"
                    if self.image_size
                    else "leave it out: the model reads no images",
                )
            )

    def _check_normalisation(self) -> None:
        """Raise ConfigError unless each channel of an image has a mean and a deviation."""
        for name in ("pixel_mean", "pixel_std"):
            values = getattr(self, name)
            fits = len(values) == self.num_channels and self.image_size
            if values and not (fits and (name == "pixel_mean" or min(values) > 0)):
                raise ConfigError(
                    explain(
                        f"model.{name} has a number for each channel of an image"
                        + (", above 0" if name == "pixel_std" else ""),
                        given=f"model.{name}={','.join(map(str, values))},"
                        f" model.num_channels={self.num_channels},"
                        f" model.image_size={self.image_size}",
                        do=f"give {self.num_channels} of them, or leave it out for 0.5 each"
                        if self.image_size
                        else "leave it out: the model reads no images",
                    )
                )
