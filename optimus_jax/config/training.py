"""Settings of the optimizer, evaluation, checkpoints and progress output."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from optimus_jax.config.checks import check_not_negative, check_positive
from optimus_jax.config.data import whole_path
from optimus_jax.config.weighted_sources import weighted_sources
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.paths import local_path, user_path

LearningRateSchedule = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True)
class LearningRateFactors:
    """Factors on the learning rate, by the group of a parameter (config/tuning.py)."""

    embedding: float = 1.0
    """Tables of tokens and positions; with tied weights also the head's matrix."""
    attention: float = 1.0
    """Projections of attention, and their biases."""
    mlp: float = 1.0
    """Projections of the feed-forward, and their biases."""
    norm: float = 1.0
    """Norms."""
    head: float = 1.0
    """The output head, where it is not the embedding."""
    adapter: float = 1.0
    """Adapters (model.tuning.method)."""

    def __post_init__(self) -> None:
        for name, factor in vars(self).items():
            if factor <= 0:
                raise ConfigError(
                    explain(
                        f"optimizer.lr_factors.{name} must be positive",
                        given=factor,
                        do="choose a value above 0; model.tuning.freeze names groups that are not"
                        " trained",
                    )
                )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: str = "adamw"
    """adamw, or sgd with momentum beta1, which needs a learning rate (lr)."""
    lr: float | None = None
    """Peak learning rate; None: by model size, after GPT-3's table (arXiv:2005.14165, table
    2.1)."""
    schedule: LearningRateSchedule = "cosine"
    """Shape after warm-up: cosine or linear decay to min_lr_ratio, wsd (flat, then linear), or
    constant."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; None: 5% of the steps of the run's first start, at most 2000."""
    decay_steps: int | None = None
    """Step at which the decay ends, counted from the start of the run; None: the last step
    (docs/extending.md)."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Fraction of all steps over which wsd decays."""
    lr_factors: LearningRateFactors = field(default_factory=LearningRateFactors)
    """Factors on the learning rate, by group; weight decay follows, since the rate multiplies it
    too."""
    layer_lr_decay: float = 1.0
    """Each layer has this times the learning rate of the layer above it, and the embedding this
    times that of the lowest (arXiv:2003.10555)."""
    beta1: float = 0.9
    """Decay of the first moment, or of sgd's momentum."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    max_skipped_steps: int = 5
    """Consecutive skipped steps (loss or gradient not finite) that end the run; 0: never."""
    loss_rise: float = 0.25
    """Warn when the loss (median of 10 steps) stays this fraction above its lowest for 20 steps; 0:
    never."""

    def __post_init__(self) -> None:
        check_positive(self, "lr", "epsilon", "decay_steps")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    explain(
                        f"optimizer.{name} must be at least 0 and below 1",
                        given=getattr(self, name),
                        do="choose 0 or more and less than 1",
                    )
                )
        if not 0 < self.layer_lr_decay <= 1:
            raise ConfigError(
                explain(
                    "optimizer.layer_lr_decay is a factor above 0 and up to 1",
                    given=self.layer_lr_decay,
                    do="choose 0 < layer_lr_decay <= 1; 1 gives all layers the same rate",
                )
            )
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    explain(
                        f"optimizer.{name} lies between 0 and 1",
                        given=getattr(self, name),
                        do="choose a value in [0, 1]",
                    )
                )
        for name in ("warmup_steps", "weight_decay", "clip_norm", "max_skipped_steps", "loss_rise"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(
                    explain(
                        f"optimizer.{name} cannot be negative",
                        given=getattr(self, name),
                        do="choose 0 or more",
                    )
                )
        if (self.warmup_steps or 0) > (self.decay_steps or math.inf):
            raise ConfigError(
                explain(
                    "the decay of the learning rate cannot end before warm-up does",
                    given=f"optimizer.decay_steps={self.decay_steps}, "
                    f"optimizer.warmup_steps={self.warmup_steps}",
                    do="choose warmup_steps <= decay_steps",
                )
            )


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """How pairs of a preferred and a rejected continuation are learnt (task=dpo)."""

    beta: float = 0.1
    """Factor of the logarithm of probability ratios (arXiv:2305.18290): the larger, the closer the
    model stays to the reference."""
    label_smoothing: float = 0.0
    """Share of pairs that are taken to be the wrong way round; below 0.5."""

    def __post_init__(self) -> None:
        check_positive(self, "beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                explain(
                    "preference.label_smoothing is a share below a half",
                    given=self.label_smoothing,
                    do="choose 0 <= label_smoothing < 0.5",
                )
            )


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Which tokens a model restores, and what it sees in their place (task=mlm)."""

    share: float = 0.15
    """Share of the tokens that are chosen to be restored."""
    masked: float = 0.8
    """Share of the chosen ones that become the mask token."""
    random: float = 0.1
    """Share of the chosen ones that become a random token; the rest stays."""
    whole_words: bool = False
    """Whether all tokens of a word are chosen together."""
    token: int | None = None
    """Id of the mask token; None: that of the tokenizer, or if it has none the model's last id."""
    random_below: int | None = None
    """Random tokens have ids below this; None: below the number of the tokenizer's ids."""
    discriminator_weight: float = 50.0
    """Weight of the loss of finding replaced tokens, beside that of the generator, which is 1
    (task=replaced_tokens)."""

    def __post_init__(self) -> None:
        check_not_negative(self, "masked", "random")
        check_positive(self, "discriminator_weight")
        if not 0 < self.share <= 1:
            raise ConfigError(
                explain(
                    "masking.share is the share of tokens to restore",
                    given=self.share,
                    do="choose 0 < share <= 1",
                )
            )
        if self.masked + self.random > 1:
            raise ConfigError(
                explain(
                    "shares of the chosen tokens add up to more than all of them",
                    given=f"masking.masked={self.masked}, masking.random={self.random}",
                    do="choose masked + random <= 1",
                )
            )
        if self.token is not None and self.token < 0:
            raise ConfigError(
                explain("masking.token is a token id", given=self.token, do="choose 0 or more")
            )
        if self.random_below is not None:
            check_positive(self, "random_below")


@dataclass(frozen=True, kw_only=True)
class PatchMaskingConfig:
    """Which patches of an image a model restores (task=mim)."""

    share: float = 0.6
    """Share of an image that is hidden, as in SimMIM (arXiv:2111.09886)."""
    square: int = 1
    """Patches of a side of the squares that are hidden together. SimMIM hides 32 x 32 pixels: 2 of
    16 pixels."""

    def __post_init__(self) -> None:
        check_positive(self, "square")
        if not 0 < self.share <= 1:
            raise ConfigError(
                explain(
                    "patch_masking.share is the share of an image to restore",
                    given=self.share,
                    do="choose 0 < share <= 1",
                )
            )


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig:
    """How images differ each time that they are learnt from; evaluations see them as they are."""

    flip: bool = False
    """Whether half of them are mirrored, left and right."""
    shift: int = 0
    """Most pixels by which they are moved in each direction; the edge fills what becomes free."""

    def __post_init__(self) -> None:
        check_not_negative(self, "shift")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The fixed set of held-out examples used by every evaluation of a run."""

    data: tuple[str, ...] = ()
    """Held-out data, named as data.sources but without weights; empty: the share
    data.eval_fraction of these."""
    examples: int | None = None
    """Number of held-out examples, taken from the start; None: 128, or as eval_batches says."""
    seq_len: int | None = None
    """Tokens per example; None: those of the training examples in the first phase."""
    transcribed: int = 16
    """Held-out recordings, the first ones, that an evaluation transcribes for their word error
    rate; 0: none. Every token takes a forward pass."""

    def __post_init__(self) -> None:
        check_positive(self, "examples", "seq_len")
        check_not_negative(self, "transcribed")
        for source in self.data:
            user_path(source, what="--eval-data")
        if weighted_sources(self.data):
            raise ConfigError(
                explain(
                    "data to measure on has no weights",
                    given=f"evaluation.data={','.join(self.data)}",
                    do="give paths alone",
                )
            )

    def with_whole_paths(self) -> "EvaluationConfig":
        """The same with absolute paths, so that data is found from any working directory."""
        return replace(self, data=tuple(map(whole_path, self.data)))


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often checkpoints and snapshots are saved, and which are kept."""

    every: int = 500
    """Steps between checkpoints; the last step is always saved. 0: only at the end."""
    keep: int = 3
    """Number of newest checkpoints kept; the newest one known to be good is kept as well, if it is
    older."""
    keep_every: int | None = None
    """Checkpoints of steps divisible by this are kept forever."""
    snapshot_every: int = 0
    """Steps between snapshots in host memory, which survive a process but not a reboot
    (docs/faults.md); 0: no snapshots."""
    snapshot_dir: str = "/dev/shm"
    """In-memory file system for snapshots; needs three times the host's share of the state."""
    resume_step: int | None = None
    """Resume from the checkpoint of this step; later ones are moved to abandoned/ in the run
    directory. Applies to one start and is not saved."""

    def __post_init__(self) -> None:
        check_positive(self, "keep", "keep_every")
        if self.resume_step is not None and self.resume_step < 0:
            raise ConfigError(
                explain(
                    "checkpoint.resume_step is the step of a checkpoint",
                    given=self.resume_step,
                    do="name one in checkpoints/ of the run directory",
                )
            )
        if self.snapshot_every < 0:
            raise ConfigError(
                explain(
                    "checkpoint.snapshot_every cannot be negative",
                    given=self.snapshot_every,
                    do="choose 0 or more steps",
                )
            )
        local_path(
            self.snapshot_dir,
            what="checkpoint.snapshot_dir",
            do="name a file system in this host's memory, such as /dev/shm",
        )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Progress output of a run."""

    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Progress display; auto: rich on a terminal, else plain lines."""
    every: int = 10
    """Steps between plain lines."""
    verbose: bool = False
    """Whether the start table shows all that was chosen: XLA's options, the layout of the largest
    tensors."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where steps, evaluations and decisions are written besides the run directory: tensorboard,
    wandb and mlflow, each an extra."""
    project: str = "optimus_jax"
    """Project of Weights & Biases, and experiment of MLflow."""
    profile: str | None = None
    """Steps to profile, FIRST:LAST (docs/howto/profile_a_run.md). Applies to one start and is not
    saved."""

    def __post_init__(self) -> None:
        check_positive(self, "every")
        _ = self.profiled_steps  # an invalid range is an error when the config is made

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step of `profile`. Raises ConfigError."""
        if self.profile is None:
            return None
        found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", self.profile)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 0 < first <= last:
            raise ConfigError(
                explain(
                    "the steps to profile are a first and a last one",
                    given=f"--profile {self.profile}",
                    do="write FIRST:LAST, such as 10:15",
                )
            )
        return first, last
