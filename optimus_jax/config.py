"""What a person asks for: frozen values, checked when they are made, readable as JSON.

A `Config` holds no arrays and imports no accelerator library. It says what is wanted; what is
there (devices, model sizes in bytes, documents) is found out later, and the layout that follows
from both is a `Plan`. `None` in a field means "derive it", and the run prints what was derived.
"""

import dataclasses
import ipaddress
import itertools
import json
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from optimus_jax import settings
from optimus_jax.errors import ConfigError, explain

Precision = Literal["f32", "bf16", "f16"]
RematPolicy = Literal["none", "selective", "dots", "full"]
REMAT_POLICIES: tuple[RematPolicy, ...] = typing.get_args(RematPolicy)
"""From the least recomputing to the most."""
RematChoice = Literal["auto", "none", "selective", "dots", "full"]
AttentionKernel = Literal["auto", "xla", "cudnn"]
DERIVED = "derived"
"""Where config.json says what was derived."""
LearningRateSchedule = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of rotary frequencies (arXiv:2407.21783, `rope_type: llama3`)."""

    factor: float = 8.0
    """How far low frequencies are stretched."""
    low_frequency_factor: float = 1.0
    """Wavelengths above original_length / this are stretched by the whole factor."""
    high_frequency_factor: float = 4.0
    """Wavelengths below original_length / this are left alone."""
    original_length: int = 8192
    """Sequence length, in tokens, of the training before stretching."""

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_frequency_factor", "high_frequency_factor", "original_length")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of one decoder; what kind of decoder it is, `models/families.py` says by its family."""

    name: str = "custom"
    """What the preset is called."""
    family: str = "gpt2"
    """Architecture: a key of `models.families.FAMILIES`."""
    vocab_size: int = 50257
    """Token ids, before padding to whole shards."""
    num_layers: int = 12
    """Decoder layers."""
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
    """Positions the model can tell apart, tokens."""
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
    dropout: float = 0.0
    """Probability on embeddings, attention weights and both residual branches."""

    def __post_init__(self) -> None:
        _check_positive(self, "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads",
                        "head_dim", "mlp_dim", "max_length", "norm_epsilon", "rope_theta")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(explain(
                "model.num_heads must be a multiple of model.num_kv_heads",
                given=f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}",
                do=f"set model.num_kv_heads to a divisor of {self.num_heads}"))
        if self.init_std < 0:
            raise ConfigError(explain("model.init_std cannot be negative", given=self.init_std, do="choose 0 or more"))
        if not 0 <= self.dropout < 1:
            raise ConfigError(explain("model.dropout is a probability", given=self.dropout, do="choose 0 <= dropout < 1"))


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """Other batches from a step on; what is left open stays as it was before."""

    after_step: int
    """Steps done when they begin."""
    global_batch: int | None = None
    """Examples per step over all devices."""
    seq_len: int | None = None
    """Tokens per example."""

    def __post_init__(self) -> None:
        _check_positive(self, "after_step", "global_batch", "seq_len")
        if self.global_batch is None and self.seq_len is None:
            raise ConfigError(explain("a phase changes nothing", given=f"after_step={self.after_step}", do="give it a global_batch, a seq_len, or both"))

    @classmethod
    def parse(cls, text: str) -> "PhaseConfig":
        """The inverse of `str`. Raises ConfigError for other text."""
        match = re.fullmatch(r"(\d+):(\d+)?(?:x(\d+))?", text.strip())
        if match is None:
            raise ConfigError(explain("a phase is written AFTER_STEP:BATCHxTOKENS", given=text,
                                      do="write 200:64 or 200:64x512, or 200:x512 for longer examples only; commas between phases"))
        after_step, global_batch, seq_len = (None if part is None else int(part) for part in match.groups())
        return cls(after_step=after_step or 0, global_batch=global_batch, seq_len=seq_len)

    def __str__(self) -> str:
        return f"{self.after_step}:{self.global_batch or ''}" + ("" if self.seq_len is None else f"x{self.seq_len}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how a batch is cut from them."""

    sources: tuple[str, ...] = ("stdlib",)
    """`stdlib` (Python's own library), or files and globs: .txt .md .py .jsonl .parquet .bin."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json."""
    seq_len: int | None = None
    """Tokens per example; None: the model's max_length, at most 1024."""
    global_batch: int = 16
    """Examples per step over all devices."""
    phases: tuple[PhaseConfig, ...] = ()
    """Other batches later in the run, in order: `200:64,400:128x2048` is 64 examples after step 200, then 128 of 2048 tokens."""
    respect_documents: bool = True
    """No attention and no loss across the border of two documents in one example."""
    eval_fraction: float = 0.01
    """Share of documents held out."""
    text_field: str = "text"
    """Name of the text in a JSONL line or a Parquet column."""
    allow_change: bool = False
    """Resume although the data is not what it was when the run saved; holds for one start and is not saved."""

    def __post_init__(self) -> None:
        _check_positive(self, "seq_len", "global_batch")
        if not self.sources:
            raise ConfigError(explain("no data was named", given="data.sources=()", do="name `stdlib` or at least one file"))
        for first, second in itertools.pairwise(self.phases):
            if first.after_step >= second.after_step:
                raise ConfigError(explain("phases follow one another", given=f"data.phases={first},{second}",
                                          do="put them in order, each with an after_step of its own"))
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(explain("data.eval_fraction is a share", given=self.eval_fraction, do="choose 0 <= eval_fraction < 1"))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """What the user fixes of the layout; the rest of the Plan is chosen and printed."""

    mesh: str = "auto"
    """`auto`, or sizes such as `data=2,fsdp=2,tensor=2`; axes left out have size 1."""
    zero: int | None = None
    """Split over fsdp: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters; None: 3 if fsdp > 1, else 0."""
    rules: tuple[str, ...] = ()
    """Changes to the logical-to-mesh rules, such as `mlp=none` (keep whole over tensor)."""
    microbatches: int | None = None
    """Parts of a step's batch run one after the other, their gradients added locally; None: 1, with stages about 4 for each."""
    schedule: str = "auto"
    """Pipeline schedule: gpipe, 1f1b, interleaved, or a table in a JSON file; auto is 1f1b, and none while pipe=1."""
    repeats: int | None = None
    """Interleaved only: visits of a microbatch to each device; None: 2."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage (with repeats: of each visit, in order); empty: as even as they divide."""
    send_slack: bool = False
    """A tick between sending and use, so that sends between stages overlap compute, for more ticks and memory."""
    stage_residuals: Literal["auto", "keep", "recompute"] = "auto"
    """Whether a stage's backward reads what forward has kept (remat says what), or computes the stage again; auto keeps if that fits."""
    remat: RematChoice = "auto"
    """Computed again: none (only norms and activations), selective (+ attention), dots (all but matmuls), full (layers); auto: the least that fits."""
    attention: AttentionKernel = "auto"
    """Attention kernel; auto is cudnn on a GPU in bf16 or f16, else xla."""
    loss_chunk_tokens: int | None = None
    """Tokens of a device whose logits exist at the same time; None: 2048, on a CPU 128 (one device: 256), times the vocabulary's shards."""
    trials: int = 3
    """With mesh=auto: how many of the planner's best are run for a few steps at the start, where that is expected to pay; 1: none."""

    def __post_init__(self) -> None:
        _check_positive(self, "microbatches", "loss_chunk_tokens", "repeats", "trials")
        if self.zero not in (None, 0, 1, 2, 3):
            raise ConfigError(explain("parallel.zero is a ZeRO stage", given=self.zero, do="choose 0, 1, 2 or 3"))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float | None = None
    """Peak learning rate; None: by model size, after GPT-3's table (arXiv:2005.14165, table 2.1)."""
    schedule: LearningRateSchedule = "cosine"
    """Shape after warm-up: to min_lr_ratio by cosine or line, wsd (flat, then line), constant."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; None: 5% of all steps, at most 2000."""
    min_lr_ratio: float = 0.1
    """Last learning rate over the peak."""
    decay_fraction: float = 0.2
    """Share of all steps that wsd decays over."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms and biases have none."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 does not clip."""

    def __post_init__(self) -> None:
        _check_positive(self, "lr", "epsilon")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(explain(f"optimizer.{name} lies between 0 and 1, and 1 would never forget", given=getattr(self, name),
                                          do="choose 0 or more and less than 1"))
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(explain(f"optimizer.{name} lies between 0 and 1", given=getattr(self, name), do="choose a value in [0, 1]"))
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(explain(f"optimizer.{name} cannot be negative", given=getattr(self, name), do="choose 0 or more"))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Master weights, moments and gradient sums are always float32."""

    compute: Precision = "f32"
    """Format of activations and of weights in matmuls."""
    loss_scale: float = 2.0**16
    """f16 only: first factor on the loss."""
    loss_scale_growth_steps: int = 2000
    """f16 only: clean steps before the factor doubles."""
    loss_scale_hysteresis: int = 2
    """f16 only: overflows in a row before the factor halves."""

    def __post_init__(self) -> None:
        _check_positive(self, "loss_scale", "loss_scale_growth_steps", "loss_scale_hysteresis")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept on disk."""

    every: int = 500
    """Steps between checkpoints; the last step is always saved. 0: only at the end."""
    keep: int = 3
    """Newest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints of steps divisible by this are kept for ever."""
    snapshot_every: int = 0
    """Steps between snapshots in host memory, which outlive the processes but not the host (docs/faults.md); 0: none."""
    snapshot_dir: str = "/dev/shm"
    """File system in memory that snapshots are written to; they need three times a host's share of the state there."""

    def __post_init__(self) -> None:
        _check_positive(self, "keep", "keep_every")
        if self.snapshot_every < 0:
            raise ConfigError(explain("checkpoint.snapshot_every cannot be negative", given=self.snapshot_every, do="choose 0 or more steps"))


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """When a process that gets no further is ended, to be started again (docs/faults.md)."""

    watch: Literal["auto", "on", "off"] = "auto"
    """Whether progress is watched; auto: in runs of several processes. Alone, a process may be held in a debugger."""
    floor_s: float = 60.0
    """Least limit on a step, an evaluation or a save, however short they have been."""
    ceiling_s: float = 900.0
    """Largest limit on them, and the limit while too few are known."""
    connect_s: float = 300.0
    """For all processes to find one another."""
    start_s: float = 3600.0
    """Limit on what happens once: restoring, measuring devices, compiling."""
    silence_s: float = 30.0
    """Without a sign of life from another process before it counts as lost; it may be dead, stopped or cut off."""
    stop_s: float = 20.0
    """After SIGTERM, for the step under way to end; without that the process ends and does not save."""
    heartbeat_s: int = 100
    """Without a heartbeat before JAX itself aborts a process (exit code 134): the second line, where the run directory shows no signs of life."""

    def __post_init__(self) -> None:
        _check_positive(self, "floor_s", "ceiling_s", "connect_s", "start_s", "silence_s", "stop_s", "heartbeat_s")
        if self.floor_s > self.ceiling_s:
            raise ConfigError(explain("a limit cannot lie below its floor and above its ceiling", given=f"faults.floor_s={self.floor_s}, faults.ceiling_s={self.ceiling_s}",
                                      do="choose floor_s <= ceiling_s"))


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is shown while a run goes on."""

    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Display; auto is rich on a terminal, else plain lines."""
    every: int = 10
    """Steps between plain lines."""
    tensorboard: bool = False
    """Write TensorBoard scalars into the run directory (extra `tensorboard`)."""

    def __post_init__(self) -> None:
        _check_positive(self, "every")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How processes find one another; what is left open, the environment says (mesh/engines.py)."""

    coordinator: str | None = None
    """HOST:PORT that process 0 listens on."""
    num_processes: int | None = None
    """Processes of the whole run."""
    process_id: int | None = None
    """This process, from 0. The one field that differs between processes; it is not saved."""
    bind: str | None = None
    """Address of process 0's machine on which it listens; None: the coordinator's, if the user has named that as an address, else all."""
    engine: Literal["auto", "none"] = "auto"
    """Whether to ask the environment which cluster engine has started this process; none: it is alone, whatever that says."""

    def __post_init__(self) -> None:
        given = [value is not None for value in (self.coordinator, self.num_processes, self.process_id)]
        if any(given) and not all(given):
            raise ConfigError(explain("a run of several processes needs all three distributed settings",
                                      given=self, do="give --coordinator HOST:PORT --num-processes N --process-id I"))
        _check_positive(self, "num_processes")
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise ConfigError(explain("--coordinator names a host and a port", given=self.coordinator,
                                          do="give HOST:PORT, such as 10.0.0.1:1234"))
        if self.bind is not None and not _is_address(self.bind):
            raise ConfigError(explain("distributed.bind is an address of the machine of process 0", given=self.bind,
                                      do="give one such as 10.0.0.1 or ::1; 0.0.0.0 for all of IPv4"))
        if self.num_processes is not None and self.process_id is not None and not 0 <= self.process_id < self.num_processes:
            raise ConfigError(explain("--process-id must lie below --num-processes", given=self,
                                      do=f"choose 0 to {self.num_processes - 1}"))

    @property
    def listens_on(self) -> str | None:
        """Address of process 0's machine; None: all that it has. A host's name may mean another address there than elsewhere."""
        host = (self.coordinator or "").rpartition(":")[0].strip("[]")
        return self.bind or ("127.0.0.1" if host == "localhost" else host if _is_address(host) else None)


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """When the controller may move a running job to another plan."""

    min_gain: float = 0.05
    """Least share of a step's time that another plan has to save."""
    min_probability: float = 0.9
    """Least probability that a switch saves time at all."""
    gain_over_cost: float = 2.0
    """Least expected gain over the rest of the run, in costs of the switch."""
    budget_share: float = 0.01
    """Of the run's wall time, what all switches together may take."""
    max_switches: int | None = None
    """Of a run; None: as many as the budget allows. 0 freezes the plan."""
    cooldown_steps: int = 30
    """Steps after a switch without another one."""
    window_steps: int = 20
    """Steps that a reading looks back on."""
    canary_steps: int = 5
    """Steps under a new plan, after which it is kept or taken back."""
    probe_share: float = 0.002
    """Of wall time, what probes of links and compute may take; 0: none."""
    allow: tuple[str, ...] = ()
    """Meshes that may be switched to, such as `data=4,tensor=2`; empty: all legal ones."""
    move_bytes: int = 256 * 2**20
    """Of state on the way at the same time on a device while it is moved."""
    executables: int = 3
    """Compiled plans kept in memory, so that going back is cheap."""

    def __post_init__(self) -> None:
        _check_positive(self, "gain_over_cost", "window_steps", "canary_steps", "move_bytes", "executables")
        for name in ("min_gain", "min_probability", "budget_share", "probe_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(explain(f"controller.{name} is a share", given=getattr(self, name), do="choose 0 or more and less than 1"))
        for name in ("max_switches", "cooldown_steps"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(explain(f"controller.{name} cannot be negative", given=getattr(self, name), do="choose 0 or more"))


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    controller: ControlConfig = field(default_factory=ControlConfig)
    steps: int = 300
    """Optimizer steps of the whole run."""
    seed: int = 0
    """Of initial weights, data order and dropout; below 2^31."""
    eval_every: int = 100
    """Steps between held-out evaluations, and one at the end; 0: never."""
    eval_batches: int = 8
    """Global batches of one evaluation."""
    control: Literal["off", "advise", "auto"] = "off"
    """Whether the controller watches, advises or re-meshes."""
    cpu_devices: int | None = None
    """Virtual devices on a CPU; None: whatever JAX finds."""

    def __post_init__(self) -> None:
        _check_positive(self, "steps", "eval_batches", "cpu_devices")
        if not 0 <= self.seed < 2**31:  # it is an int32 where weights are drawn
            raise ConfigError(explain("seed is out of range", given=self.seed, do=f"choose 0 to {2**31 - 1}"))
        if self.eval_every < 0 or self.checkpoint.every < 0:
            raise ConfigError(explain("eval_every and checkpoint.every cannot be negative",
                                      given=f"{self.eval_every}, {self.checkpoint.every}", do="choose 0 or more"))
        for phase in (None, *self.data.phases):
            seq_len = self.seq_len if phase is None else phase.seq_len or 0
            if seq_len > self.model.max_length:
                raise ConfigError(explain(
                    f"a sequence is longer than the positions of {self.model.name}",
                    given=f"data.{'phases' if phase else 'seq_len'}={phase or seq_len}, model.max_length={self.model.max_length}",
                    do=f"use {'phases of' if phase else '--seq-len'} {self.model.max_length}{' tokens' if phase else ''} or less, "
                       f"or --set model.max_length={seq_len}"))

    @property
    def seq_len(self) -> int:
        """Tokens per example in the first phase, derived where the user left it open."""
        return self.data.seq_len or min(self.model.max_length, 1024)

    @property
    def warmup_steps(self) -> int:
        """Warm-up steps, derived where the user left them open."""
        given = self.optimizer.warmup_steps
        return min(2000, math.ceil(self.steps * 0.05)) if given is None else given

    def to_json(self, *, derived: Mapping[str, Any] | None = None) -> str:
        """The config as indented JSON, without what belongs to one process or one start only.

        Args:
          derived: what a run made of the settings left open, by dotted name; to be read by people, not by `from_json`.
        """
        value = dataclasses.asdict(dataclasses.replace(
            self, distributed=DistributedConfig(), data=dataclasses.replace(self.data, allow_change=False)))
        return json.dumps(value if derived is None else {**value, DERIVED: dict(derived)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """The inverse of `to_json`. Raises ConfigError for unknown keys and wrong types."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(explain("a config is not JSON", given=str(error), do="restore the file, or start a new run")) from error
        if isinstance(value, dict):
            value.pop(DERIVED, None)
        return settings.build(cls, value)

    def with_values(self, values: Mapping[str, Any]) -> "Config":
        """A copy with some fields changed.

        Args:
          values: dotted names (`optimizer.lr`, `steps`) to values; text is converted to the
            type of the field.
        Raises:
          ConfigError: a name is unknown (the nearest known one is named) or a value does not fit.
        """
        return settings.changed(self, values)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_positive(value: Any, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if number is not None and number <= 0:
            raise ConfigError(explain(f"{name} must be positive", given=f"{type(value).__name__}.{name}={number}", do="choose a value above 0"))
