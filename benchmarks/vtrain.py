"""vTrain's measured steps as samples of the planner's time model.

The rows are iteration times of GPT under Megatron on A100s (Bang et al., MICRO 2024,
https://github.com/VIA-Research/vTrain). They are read from a folder and are not part of this
project. A row becomes a (ModelConfig, Plan, Cluster) and is priced by
`optimus_jax.planning.cost.cost.predict` like the planner's own candidates, except that the
implementation profile is Megatron's. Facts that the rows do not state are inferred from them; the
code that uses such a fact says so.
"""

import csv
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.mesh.rules import make_rules
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.cost.implementation_profile import MEGATRON
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.learning.fit import Sample
from optimus_jax.planning.profiles.cluster import Cluster

DEVICES_PER_HOST = 8
NETWORK = "inter_host=12.5GB/s"
"""Network of vTrain's cluster: four ports of 200 Gb/s for the eight devices of a host."""
VOCAB_SIZES = {True: 50257, False: 51200}
"""Vocabulary on one node (True) and on several (False). The rows on one node fit GPT-2's unaligned
size: at tensor=1 the head is three times as slow as its FLOPs and its speed at tensor=2 suggest. On
several nodes it is not; models and devices there are those of arXiv:2104.04473, which has 51200."""
ONE_NODE, SEVERAL_NODES = "ground_truth_single.csv", "ground_truth_multi.csv"


def gpt(embed: int, layers: int, heads: int, seq_len: int, vocab_size: int) -> ModelConfig:
    """A GPT of these sizes."""
    return ModelConfig(
        name=f"gpt-{embed}x{layers}",
        vocab_size=vocab_size,
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        mlp_dim=4 * embed,
        max_length=seq_len,
    )


def megatron_plan(
    model: ModelConfig, axes: AxisSizes, microbatches: int, *, recomputes: bool
) -> Plan:
    """The plan that Megatron-LM ran.

    It is priced as bf16, because Megatron's f16 sums take two bytes per element, like this
    project's bf16 sums and unlike its f16 sums.
    """
    pipeline = (
        None
        if axes.pipe == 1
        else Pipelining(
            schedule="1f1b",
            layers_per_stage=(model.num_layers // axes.pipe,) * axes.pipe,
            repeats=1,
            send_slack=False,
            keep_residuals=True,
        )
    )
    return Plan(
        axes=axes,
        rules=make_rules(model),
        zero=0,
        pipeline=pipeline,
        microbatches=microbatches,
        remat="full" if recomputes else "none",
        precision="bf16",
        attention="xla",
        loss_chunk_tokens=model.max_length,
    )


class Row:
    """One line of a file."""

    def __init__(self, line: Mapping[str, str]):
        number = {name.strip(): float(value) for name, value in line.items()}
        self.devices, self.global_batch, self.rows = (
            int(number[name]) for name in ("# GPUs", "global batch", "micro batch")
        )
        self.embed, self.layers, self.heads = (
            int(number[name]) for name in ("hidden size", "# layers", "attention heads")
        )
        self.seq_len = int(number["sequence length"])
        self.tensor, self.data, self.pipe = (
            int(number[f"{name} parallelism"]) for name in ("tensor", "data", "pipeline")
        )
        self.step_time_s = number["iteration time (ms)"] / 1e3

    @property
    def model(self) -> tuple[int, ...]:
        """The fields that distinguish models."""
        return self.embed, self.layers, self.heads, self.seq_len

    @property
    def group(self) -> Hashable:
        """The key that rows share if a planner would choose among them."""
        return *self.model, self.devices, self.global_batch

    def sample(self, *, recomputes: bool) -> Sample:
        """The row as a Sample of the planner."""
        hosts = -(-self.devices // DEVICES_PER_HOST)
        model = gpt(self.embed, self.layers, self.heads, self.seq_len, VOCAB_SIZES[hosts == 1])
        return Sample(
            workload=Workload(model=model, seq_len=self.seq_len, global_batch=self.global_batch),
            plan=megatron_plan(
                model,
                AxisSizes(pipe=self.pipe, data=self.data, tensor=self.tensor),
                self.global_batch // (self.data * self.rows),
                recomputes=recomputes,
            ),
            cluster=Cluster.parse(
                f"a100:{hosts}x{DEVICES_PER_HOST}", [NETWORK] if hosts > 1 else []
            ),
            step_time_s=self.step_time_s,
            implementation=MEGATRON,
        )


class Rows:
    """Rows, and their samples in the same order.

    The rows do not state remat. On several nodes it is taken as full, because some row of each
    model would not fit otherwise; on one node, where all rows fit, as none.
    """

    def __init__(self, rows: Iterable[Row]):
        self.rows = list(rows)
        self.samples = [row.sample(recomputes=row.devices > DEVICES_PER_HOST) for row in self.rows]

    @classmethod
    def read(cls, *paths: Path) -> "Rows":
        """Read CSV files, with or without the first column that some have. Exits if unreadable."""
        rows: list[Row] = []
        for path in paths:
            try:
                with path.open(newline="", encoding="utf-8-sig") as file:
                    found = [Row(line) for line in csv.DictReader(file)]
            except (OSError, KeyError, ValueError) as error:
                raise SystemExit(
                    f"error: {path} cannot be read as vTrain's rows: {error!r}"
                ) from error
            if not found:
                raise SystemExit(f"error: {path} has no rows")
            rows += found
        return cls(rows)

    def where(self, wanted: Callable[[Row], bool]) -> "Rows":
        """The rows that satisfy `wanted`."""
        return Rows(filter(wanted, self.rows))


def start() -> Rates:
    """The rates of an A100 before anything is fitted."""
    return Rates.of(Cluster.parse("a100:8").accelerator)
