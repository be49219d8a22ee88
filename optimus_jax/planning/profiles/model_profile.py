"""Profile a model by kind of layer, independent of devices: parameters, FLOPs, activation bytes.

Parameters come from abstract shapes, FLOPs and bytes from the traced program of a layer
(models/layer_program.py); models/flops.py states what counts. All figures are of the whole model;
FLOPs and bytes are per token of a sequence. Nothing is measured.
"""

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import jax

from optimus_jax.config import REMAT_POLICIES, AttentionKernel, ModelConfig, Precision, RematPolicy
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.models.families import generator_of
from optimus_jax.models.flops import Passes, layer_flops, outer_flops
from optimus_jax.models.generator import GENERATOR
from optimus_jax.models.layer_program import (
    EMBED,
    MLP,
    LayerProgram,
    LayerSizes,
    core_products,
    is_of_heads,
    layer_programs,
    matrix_products,
    whole_sizes,
)
from optimus_jax.models.program_reader import Amount, ProgramPart
from optimus_jax.models.shapes import model_shapes

ITEM_BYTES: dict[Precision, int] = {"f32": 4, "bf16": 2, "f16": 2}


class LayerKind(enum.StrEnum):
    """The kinds of layer into which all work of a step is divided."""

    EMBEDDING = "embedding"
    """Token and position embedding tables."""
    NORMS = "norms"
    """All norms. The activations that they save are their inputs, the residual stream."""
    ATTENTION = "attention"
    """The projections of attention."""
    ATTENTION_CORE = "attention core"
    """softmax(q k / sqrt(K)) v, which is quadratic in the sequence length."""
    FEED_FORWARD = "feed-forward"
    """The feed-forward blocks."""
    HEAD = "head"
    """Logits and loss. Has no parameters if it shares the embedding table."""
    GENERATOR = "generator"
    """A generator as a whole, with its own logits and loss; its parameters are those that it does
    not share."""


@dataclass(frozen=True, kw_only=True)
class KindProfile:
    """The total of all layers of one kind. FLOPs and bytes are per token."""

    kind: LayerKind
    num_params: int
    """Parameter elements, without padding."""
    model_flops: float
    """FLOPs of forward and backward, as counted for MFU."""
    forward_flops: float
    """FLOPs of forward."""
    backward_flops: float
    """FLOPs of backward, without recomputation."""
    recomputed_flops: Mapping[RematPolicy, float]
    """FLOPs that backward recomputes, by remat policy."""
    activation_bytes: Mapping[RematPolicy, float]
    """Bytes saved from forward to backward, by remat policy."""

    @property
    def flops(self) -> tuple[float, ...]:
        """All FLOPs: what counts, forward, backward, and recomputed under each remat policy."""
        counted = self.model_flops, self.forward_flops, self.backward_flops
        return *counted, *self.recomputed_flops.values()


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The profile of a model with a given sequence length, precision and attention kernel."""

    name: str
    """Name of the model."""
    seq_len: int
    """Tokens per sequence."""
    precision: Precision
    """Format of activations."""
    kernel: AttentionKernel
    """Attention kernel: xla or cudnn."""
    kinds: tuple[KindProfile, ...]
    """One profile for each LayerKind, in the order of the enum; GENERATOR only if there is one."""
    saved_once_bytes: Mapping[RematPolicy, float]
    """Bytes per token saved once for all layers (rotary angles, masks), by remat policy."""

    def __getitem__(self, kind: LayerKind) -> KindProfile:
        return next(profile for profile in self.kinds if profile.kind == kind)

    @property
    def num_params(self) -> int:
        """Number of parameter elements."""
        return sum(kind.num_params for kind in self.kinds)

    @property
    def model_flops(self) -> float:
        """FLOPs per token, as counted for MFU."""
        return sum(kind.model_flops for kind in self.kinds)

    def activation_bytes(self, remat: RematPolicy) -> float:
        """Bytes per token saved for backward."""
        return (
            sum(kind.activation_bytes[remat] for kind in self.kinds) + self.saved_once_bytes[remat]
        )

    def to_json(self) -> str:
        """All figures as a JSON object."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def describe(self) -> str:
        """A table for people, in MFLOPs and KiB per token, with a row for each kind and one for the
        total.
        """
        columns = [
            "layer kind",
            "parameters",
            "counts",
            "forward",
            "backward",
            *(f"again {p}" for p in REMAT_POLICIES),
            *(f"KiB {p}" for p in REMAT_POLICIES),
        ]
        flops = [kind.flops for kind in self.kinds]
        saved = [self.activation_bytes(remat) for remat in REMAT_POLICIES]
        rows = [
            columns,
            *(
                _row(kind.kind, kind.num_params, kind.flops, kind.activation_bytes.values())
                for kind in self.kinds
            ),
            _row("all", self.num_params, map(sum, zip(*flops, strict=True)), saved),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        title = (
            f"{self.name}: {self.num_params:,} parameters; sequences of {self.seq_len:,} tokens,"
            f" {self.precision}, attention {self.kernel}. MFLOPs per token (what counts for MFU:"
            " attention to what a token can see), KiB per token; read from the traced program, not"
            " measured"
        )
        return (
            "\n".join(
                [
                    title,
                    *(
                        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
                        for row in rows
                    ),
                ]
            )
            + "\n"
        )


def _row(
    name: str, num_params: int, num_flops: Iterable[float], num_bytes: Iterable[float]
) -> list[str]:
    return [
        name,
        f"{num_params:,}",
        *(f"{number / 1e6:,.2f}" for number in num_flops),
        *(f"{number / 1024:,.1f}" for number in num_bytes),
    ]


def profile_model(
    model: ModelConfig, *, seq_len: int, precision: Precision, kernel: AttentionKernel
) -> ModelProfile:
    """Profile a model as if it ran on one device.

    Args:
      seq_len: tokens per sequence. Document borders are ignored.
      kernel: the attention kernel that runs: xla or cudnn, not auto.
    """
    assert kernel != "auto", "which kernel runs is known when a profile is made"
    params, layers = _params_by_kind(model), model.num_layers
    programs = layer_programs(model, seq_len=seq_len, precision=precision, kernel=kernel)
    by_remat: dict[RematPolicy, LayerProgram] = {
        remat: programs.under(remat) for remat in REMAT_POLICIES
    }
    sizes = whole_sizes(model)
    plain = by_remat["none"]

    def saved(kind: LayerKind) -> dict[RematPolicy, float]:
        return {
            remat: layers
            / seq_len
            * sum(amount.of(sizes) for amount in program.saved if _kind_of(amount) == kind)
            for remat, program in by_remat.items()
        }

    def matmuls(kind: LayerKind) -> KindProfile:
        def flops(part: ProgramPart) -> float:
            products = matrix_products(part, of_feed_forward=kind is LayerKind.FEED_FORWARD)
            return layers / seq_len * sum(product.flops(sizes) for product in products)

        again: dict[RematPolicy, float] = {
            remat: flops(program.backward) - flops(plain.backward)
            for remat, program in by_remat.items()
        }
        passes = Passes(flops(plain.forward), flops(plain.backward))
        return _matmuls(kind, params, passes, again, saved(kind))

    none = Passes(0.0, 0.0)
    stream, nothing = model.embed_dim * ITEM_BYTES[precision], dict.fromkeys(REMAT_POLICIES, 0.0)
    kinds = (
        _matmuls(LayerKind.EMBEDDING, params, none, nothing, nothing),
        # The input of the final norm is saved like that of a layer.
        _matmuls(
            LayerKind.NORMS,
            params,
            none,
            nothing,
            {p: n + stream for p, n in saved(LayerKind.NORMS).items()},
        ),
        matmuls(LayerKind.ATTENTION),
        _core(model, by_remat, sizes, seq_len, saved(LayerKind.ATTENTION_CORE)),
        matmuls(LayerKind.FEED_FORWARD),
        # The head's forward also computes the gradient of its input, which is saved for backward
        # (training/loss.py).
        _matmuls(
            LayerKind.HEAD,
            params,
            Passes(*(flops / seq_len for flops in outer_flops(model, seq_len))),
            nothing,
            dict.fromkeys(REMAT_POLICIES, float(stream)),
        ),
    )
    if (generator := generator_of(model)) is not None:
        own = profile_model(generator, seq_len=seq_len, precision=precision, kernel=kernel)
        kinds = (*kinds, _as_one_kind(own, params[LayerKind.GENERATOR]))
    return ModelProfile(
        name=model.name,
        seq_len=seq_len,
        precision=precision,
        kernel=kernel,
        kinds=kinds,
        saved_once_bytes={
            remat: program.saved_once_bytes(model, sizes) / seq_len
            for remat, program in by_remat.items()
        },
    )


def _as_one_kind(generator: ModelProfile, num_params: int) -> KindProfile:
    """A generator's work as that of one kind. What it saves is gone when the model's begins."""
    return KindProfile(
        kind=LayerKind.GENERATOR,
        num_params=num_params,
        model_flops=sum(kind.model_flops for kind in generator.kinds),
        forward_flops=sum(kind.forward_flops for kind in generator.kinds),
        backward_flops=sum(kind.backward_flops for kind in generator.kinds),
        recomputed_flops={
            remat: sum(kind.recomputed_flops[remat] for kind in generator.kinds)
            for remat in REMAT_POLICIES
        },
        activation_bytes=dict.fromkeys(REMAT_POLICIES, 0.0),
    )


def _kind_of(saved: Amount) -> LayerKind:
    """The kind of layer that a saved array belongs to."""
    if MLP in saved.factors:
        return LayerKind.FEED_FORWARD
    if is_of_heads(saved):
        return LayerKind.ATTENTION
    return LayerKind.NORMS if EMBED in saved.factors else LayerKind.ATTENTION_CORE


def _matmuls(
    kind: LayerKind,
    params: Mapping[LayerKind, int],
    passes: Passes,
    again: Mapping[RematPolicy, float],
    saved: Mapping[RematPolicy, float],
) -> KindProfile:
    """The profile of a kind whose products have these FLOPs per token."""
    return KindProfile(
        kind=kind,
        num_params=params[kind],
        model_flops=sum(passes),
        forward_flops=passes.forward,
        backward_flops=passes.backward,
        recomputed_flops=again,
        activation_bytes=saved,
    )


def _core(
    model: ModelConfig,
    by_remat: Mapping[RematPolicy, LayerProgram],
    sizes: LayerSizes,
    seq_len: int,
    saved: Mapping[RematPolicy, float],
) -> KindProfile:
    layers = model.num_layers

    def flops(part: ProgramPart) -> float:
        products = sum(product.flops(sizes) for product in core_products(part))
        # A fused kernel is assumed to skip every masked pair; how many its tiles compute beyond
        # that is not published.
        fused = sum(each.flops(sizes) for each in part.fused)
        return layers / seq_len * (products + fused)

    forward = flops(by_remat["none"].forward)
    return KindProfile(
        kind=LayerKind.ATTENTION_CORE,
        num_params=0,
        model_flops=3 * layers / seq_len * layer_flops(model, seq_len)[1],
        forward_flops=forward,
        backward_flops=2 * forward,
        activation_bytes=saved,
        recomputed_flops={
            remat: flops(program.backward) - 2 * forward for remat, program in by_remat.items()
        },
    )


_KIND_OF_PART = {
    "embedding": LayerKind.EMBEDDING,
    "positions": LayerKind.EMBEDDING,
    "token_types": LayerKind.EMBEDDING,
    "embedding_norm": LayerKind.NORMS,
    "final_norm": LayerKind.NORMS,
    "head": LayerKind.HEAD,
    "attention_norm": LayerKind.NORMS,
    "attention_out_norm": LayerKind.NORMS,
    "mlp_norm": LayerKind.NORMS,
    "mlp_out_norm": LayerKind.NORMS,
    "patches": LayerKind.EMBEDDING,
    "patch_bias": LayerKind.EMBEDDING,
    "hidden_patch": LayerKind.EMBEDDING,
    "table_in": LayerKind.EMBEDDING,
    "table_bias": LayerKind.EMBEDDING,
    "table_out": LayerKind.HEAD,
    "transform_bias": LayerKind.HEAD,
    "transform_norm": LayerKind.NORMS,
    "label_table": LayerKind.HEAD,
    "head_bias": LayerKind.HEAD,
    "sound": LayerKind.EMBEDDING,
    "attention": LayerKind.ATTENTION,
    "norm": LayerKind.NORMS,
    "encoder_norm": LayerKind.NORMS,
    "mlp": LayerKind.FEED_FORWARD,
    GENERATOR: LayerKind.GENERATOR,
}
"""Kind of the parameters, by names of modules in models/transformer.py and models/block.py."""
_KIND_OF_GROUP = {"attention": LayerKind.ATTENTION, "norm": LayerKind.NORMS}
"""That of parameters of other names, in layers of a class of their own; the rest is
feed-forward."""


def _params_by_kind(model: ModelConfig) -> dict[LayerKind, int]:
    """Number of parameter elements by kind, from abstract shapes with an unpadded vocabulary."""
    counts = dict.fromkeys(LayerKind, 0)
    shapes = model_shapes(model, model.vocab_size)
    groups = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.group
        for path, leaf in jax.tree.leaves_with_path(shapes.leaves)
    }
    for path, size in shapes.sizes().items():
        name = path.removeprefix(f"{LAYERS}/").removeprefix("cross/").partition("/")[0]
        own = _KIND_OF_GROUP.get(groups[path], LayerKind.FEED_FORWARD)
        counts[_KIND_OF_PART.get(name, own)] += size
    return counts
