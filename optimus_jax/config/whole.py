"""All settings of a run as one value, and its JSON form."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from optimus_jax.config.aliases import RENAMED, RETIRED, SPELLED_ANEW
from optimus_jax.config.checks import check_counts, check_positive
from optimus_jax.config.data import DataConfig
from optimus_jax.config.export import ExportConfig
from optimus_jax.config.model import ModelConfig
from optimus_jax.config.parallel import ParallelConfig, PrecisionConfig
from optimus_jax.config.published_config import WHAT, published_kind
from optimus_jax.config.run_checkpoint import INIT_FROM, RunCheckpoint
from optimus_jax.config.running import ControlConfig, DistributedConfig, FaultConfig, StoreConfig
from optimus_jax.config.settings import build, changed, check_finite
from optimus_jax.config.training import (
    AugmentationConfig,
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    MaskingConfig,
    OptimizerConfig,
    PatchMaskingConfig,
    PreferenceConfig,
)
from optimus_jax.errors import ConfigError, counted, explain
from optimus_jax.system.hub_model import HubModel
from optimus_jax.system.json_input import JSONInputError, parse_json

LEAST_SHARE_IN_BF16 = 2.0**-8
"""Half of the widest relative gap between bf16 numbers (8 significant bits): a moment that changes
by a smaller fraction may round back to its old value."""
DERIVED = "derived"
"""Key of config.json under which derived values are stored."""
EVAL_EXAMPLES = 128
"""Default number of held-out examples of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    patch_masking: PatchMaskingConfig = field(default_factory=PatchMaskingConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    controller: ControlConfig = field(default_factory=ControlConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    recipe: str | None = None
    """Name of published settings to start from (`config/recipes.py`); other settings of the run
    replace them."""
    steps: int = 300
    """Number of optimizer steps."""
    task: str | None = None
    """What is learnt: next_token, cross-entropy of every next token; mlm, of masked tokens;
    replaced_tokens, which tokens a generator replaced; classification, a label of each text;
    token_classification, of each word; question_answering, the part of a text that answers a
    question; image_classification, a label of each image; mim, the pixels of hidden patches;
    transcription, the text of each recording; or dpo, which of two continuations is preferred
    (needs adapters). None: image_classification for models of images, transcription for those of
    sound, replaced_tokens for those with a generator, that of the labels for others with some, mlm
    for encoders, such as BERT, next_token for decoders."""
    seed: int = 0
    """Seed of initial weights, data order and dropout; below 2^31."""
    init_from: str | None = None
    """Begin with these parameters. Of another run: DIR or DIR@STEP, where DIR is its directory or
    URL and STEP that of a checkpoint (otherwise the newest good one). Of a published model: its
    directory, or hf://ORG/NAME. None: draw them from the seed."""
    adapters_from: str | None = None
    """Begin with these adapters beside the parameters: a directory in PEFT's format. None: new ones
    begin as nothing, and equal ones of init_from are kept."""
    eval_every: int = 100
    """Steps between evaluations, plus one at the end; 0: never."""
    eval_batches: int | None = None
    """Old name of evaluation.examples, counted in batches of the first phase's size."""
    control: Literal["off", "advise", "auto"] = "off"
    """Whether the controller is off, only advises, or re-meshes by itself (auto)."""
    cpu_devices: int | None = None
    """Number of virtual CPU devices; None: the devices that JAX finds."""

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "steps", "eval_batches", "cpu_devices")
        check_counts(self, "steps", "eval_batches", "cpu_devices")
        self.model.tuning.check_trains()
        if not 0 <= self.seed < 2**31:  # weights are drawn with an int32 seed
            raise ConfigError(
                explain("seed is out of range", given=self.seed, do=f"choose 0 to {2**31 - 1}")
            )
        if self.init_from is not None and HubModel.parse(self.init_from) is None:
            RunCheckpoint.parse(self.init_from, what=INIT_FROM)
        if self.adapters_from is not None and self.init_from is None:
            raise ConfigError(
                explain(
                    "adapters need the model that they are for",
                    given=f"adapters_from={self.adapters_from}, and no {INIT_FROM}",
                    do=f"name it: {INIT_FROM} DIR",
                )
            )
        if self.log.profiled_steps is not None and self.log.profiled_steps[0] > self.steps:
            raise ConfigError(
                explain(
                    f"the run has {counted(self.steps, 'step')}",
                    given=f"--profile {self.log.profile}",
                    do="profile earlier steps, such as --profile 10:15",
                )
            )
        if self.log.profile is not None and self.control != "off":
            raise ConfigError(
                explain(
                    "steps take other times while they are traced, which the controller would take"
                    " for other conditions",
                    given=f"--profile {self.log.profile}, --control {self.control}",
                    do="profile with --control off",
                )
            )
        if self.eval_every < 0 or self.checkpoint.every < 0:
            raise ConfigError(
                explain(
                    "eval_every and checkpoint.every cannot be negative",
                    given=f"{self.eval_every}, {self.checkpoint.every}",
                    do="choose 0 or more",
                )
            )
        if self.model.tuning.freeze_layers >= self.model.num_layers:
            raise ConfigError(
                explain(
                    "no layer would be trained",
                    given=f"model.tuning.freeze_layers={self.model.tuning.freeze_layers},"
                    f" model.num_layers={self.model.num_layers}",
                    do="freeze fewer layers, or all with model.tuning.freeze=attention,mlp,norm",
                )
            )
        if (self.parallel.kept_layers or 0) > self.model.num_layers:
            raise ConfigError(
                explain(
                    f"{self.model.name} has {counted(self.model.num_layers, 'layer')}",
                    given=f"parallel.kept_layers={self.parallel.kept_layers}",
                    do=f"keep {self.model.num_layers} or fewer",
                )
            )
        for name in ("beta1", "beta2"):
            beta = getattr(self.optimizer, name)
            if self.precision.moments == "bf16" and 1 - beta < LEAST_SHARE_IN_BF16:
                raise ConfigError(
                    explain(
                        "a moment in bf16 with so slow a decay would round back to its old value"
                        " and never decrease",
                        given=f"optimizer.{name}={beta}, precision.moments=bf16",
                        do=(
                            f"use {name} of {1 - LEAST_SHARE_IN_BF16:.3f} or less, or"
                            " precision.moments=f32"
                        ),
                    )
                )
        if (self.evaluation.seq_len or 0) > self.model.max_length:
            raise ConfigError(
                explain(
                    f"evaluation examples exceed the longest sequence of {self.model.name}",
                    given=(
                        f"evaluation.seq_len={self.evaluation.seq_len}, "
                        f"model.max_length={self.model.max_length}"
                    ),
                    do=f"use --set evaluation.seq_len={self.model.max_length} or less",
                )
            )
        for phase in (None, *self.data.phases):
            seq_len = self.seq_len if phase is None else phase.seq_len or 0
            if seq_len > self.model.max_length:
                raise ConfigError(
                    explain(
                        f"the sequence length exceeds the longest sequence of {self.model.name}",
                        given=(
                            f"data.{'phases' if phase else 'seq_len'}={phase or seq_len},"
                            f" model.max_length={self.model.max_length}"
                        ),
                        do=(
                            f"use {'phases of' if phase else '--seq-len'}"
                            f" {self.model.max_length}{' tokens' if phase else ''} or less, or"
                            f" --set model.max_length={seq_len}"
                        ),
                    )
                )

    @property
    def mask_token(self) -> int:
        """Id of the mask token."""
        last = self.model.vocab_size - 1
        return last if self.masking.token is None else self.masking.token

    @property
    def num_random_tokens(self) -> int:
        """Ids below this are those of random tokens in place of masked ones."""
        return min(self.masking.random_below or self.model.vocab_size, self.model.vocab_size)

    @property
    def seq_len(self) -> int:
        """Tokens per example in the first phase, derived where the user left it open."""
        longest = self.model.max_length
        return self.data.seq_len or (min(longest, 1024) if self.model.reads == "text" else longest)

    @property
    def separates_documents(self) -> bool:
        """Whether attention needs to know which document a token is of."""
        return self.data.respect_documents and self.model.reads_documents

    @property
    def warmup_steps(self) -> int:
        """Warm-up steps, derived where the user left them open."""
        given = self.optimizer.warmup_steps
        return min(2000, math.ceil(self.steps * 0.05)) if given is None else given

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate's decay ends, derived where the user left it open."""
        return self.optimizer.decay_steps or self.steps

    @property
    def eval_examples(self) -> int:
        """Number of held-out examples per evaluation, independent of the phase."""
        if self.evaluation.examples is not None:
            return self.evaluation.examples
        return (
            EVAL_EXAMPLES
            if self.eval_batches is None
            else self.eval_batches * self.data.global_batch
        )

    @property
    def eval_seq_len(self) -> int:
        """Tokens per held-out example, independent of the phase."""
        return self.evaluation.seq_len or self.seq_len

    @property
    def compiled_lengths(self) -> tuple[int, ...]:
        """Lengths of the sequences for which a phase compiles programs."""
        return (self.seq_len, *((self.eval_seq_len,) if self.eval_every else ()))

    @property
    def stored(self) -> "Config":
        """The config without what holds for one process or one start: what a run keeps."""
        return dataclasses.replace(
            self,
            distributed=DistributedConfig(),
            data=dataclasses.replace(self.data, allow_change=False),
            checkpoint=dataclasses.replace(self.checkpoint, resume_step=None),
            log=dataclasses.replace(self.log, profile=None),
        )

    def to_json(self, *, derived: Mapping[str, Any] | None = None) -> str:
        """What a run keeps of the config, as indented JSON.

        Args:
          derived: the derived values of settings left open, by dotted name. They belong to that
            run, which keeps them when it is resumed (run/resumed_config.py); a new run from the
            same settings derives its own.
        """
        value = dataclasses.asdict(self.stored)
        return (
            json.dumps(value if derived is None else {**value, DERIVED: dict(derived)}, indent=2)
            + "\n"
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "Config":
        """The inverse of `to_json`. Raises ConfigError for unknown keys and wrong types."""
        try:
            value = parse_json(text, finite=False)  # `build` names the setting that is not finite
        except JSONInputError as error:
            raise ConfigError(
                explain(
                    "a config is not JSON",
                    given=str(error),
                    do="restore the file, or start a new run",
                )
            ) from error
        return cls.from_value(value)

    @classmethod
    def from_value(cls, value: Any) -> "Config":
        """The config from a parsed JSON value, in which settings may have earlier names.

        Raises ConfigError for unknown keys and wrong types, and for the config of something
        published.
        """
        if (kind := published_kind(value)) is not None:
            raise ConfigError(
                explain(
                    f"a config is not that of a run, but of {WHAT[kind]}",
                    given=", ".join(list(value)[:4]) + ", ...",
                    do="give a run's",
                )
            )
        return build(
            cls,
            (
                _renamed({name: item for name, item in value.items() if name != DERIVED})
                if isinstance(value, Mapping)
                else value
            ),
        )

    @classmethod
    def derived_in(cls, text: str) -> dict[str, Any]:
        """The derived values stored in a run's config.json, by dotted name; empty if there are
        none.

        Raises:
          ConfigError: the text is not a config's.
        """
        cls.from_json(text)
        derived = parse_json(text, finite=False).get(DERIVED, {})
        if not isinstance(derived, dict):
            raise ConfigError(
                explain(
                    f"{DERIVED!r} in config.json must be an object",
                    given=f"{DERIVED}: {derived!r}",
                    do="restore the run's config.json, or start a new run",
                )
            )
        return derived

    def with_open_layout(self) -> "Config":
        """A copy that leaves the layout to the planner; see `ParallelConfig.with_open_layout`."""
        return dataclasses.replace(self, parallel=self.parallel.with_open_layout())

    def with_values(self, values: Mapping[str, Any]) -> "Config":
        """A copy with some fields changed.

        Args:
          values: dotted names (`optimizer.lr`, `steps`) to values; text is converted to the
            type of the field.
        Raises:
          ConfigError: a name is unknown (the closest known one is suggested) or a value does not
            fit.
        """
        return changed(self, values)


def _renamed(value: dict[str, Any]) -> dict[str, Any]:
    """The value of a config with the present names of its settings, without retired ones."""
    for old in RETIRED:
        section, _, name = old.partition(".")
        if isinstance(fields := value.get(section), Mapping) and name in fields:
            kept = {other: item for other, item in fields.items() if other != name}
            value = value | {section: kept}
    for old, (new, present_value) in SPELLED_ANEW.items():
        section, _, name = old.partition(".")
        if isinstance(fields := value.get(section), Mapping) and name in fields:
            kept = {other: item for other, item in fields.items() if other != name}
            value = value | {section: {new.partition(".")[2]: present_value(fields[name])} | kept}
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        if isinstance(fields := value.get(section), Mapping) and name in fields:
            present = {new.partition(".")[2]: fields[name]}
            rest = {other: item for other, item in fields.items() if other != name}
            value = value | {section: present | rest}
    return value
