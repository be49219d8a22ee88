"""The held-out loss and metrics, and how the examples of an evaluation are split into batches.

The examples depend on the run alone (`Config.eval_examples`, `Config.eval_seq_len`), so that losses
are comparable under all its plans and in all its phases. A *row* is a position in the batch, as in
data/loader.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax

from optimus_jax.cluster.distributed import gather_from_all
from optimus_jax.config import Config
from optimus_jax.data.batch import HostBatch
from optimus_jax.errors import OptimusError
from optimus_jax.plan import Plan
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import EvalSums, Program
from optimus_jax.training.task import WORD_ERROR_RATE
from optimus_jax.training.tasks import task_of
from optimus_jax.training.transcripts import Transcripts


def eval_rows(config: Config, plan: Plan, num_examples: int | None = None) -> int:
    """Rows of an evaluation batch, over all devices.

    A multiple of the number of parts that the plan divides a batch into, with at most as many
    tokens as a training batch and at most one row per example, if possible.

    Args:
      config: config of the phase that `plan` is for.
      num_examples: examples of the evaluation; None: those that the loss is of.
    """
    num_examples = config.eval_examples if num_examples is None else num_examples
    least = plan.batch_ways() * (1 if plan.pipeline is None else plan.microbatches)
    by_tokens = config.data.global_batch * config.seq_len // (config.eval_seq_len * least)
    return least * max(1, min(by_tokens, -(-num_examples // least)))


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """This process's part of the data of evaluations."""

    batches: Callable[[], Iterable[HostBatch]]
    """Starts a pass over the held-out batches."""
    transcripts: Transcripts | None = None
    """Of a model of sound; None: no texts are written down."""


class HeldOutResult(NamedTuple):
    """What an evaluation finds."""

    loss: float
    """Sum over terms, as those of `metrics`."""
    tokens: int
    metrics: dict[str, float]
    rates: dict[str, float]
    """Rates, which are not divided by `tokens`."""

    @property
    def mean_loss(self) -> float:
        """Of each term."""
        return self.loss / self.tokens

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Of each term, and the rates."""
        return {name: total / self.tokens for name, total in self.metrics.items()} | self.rates


def held_out_sums(
    program: Program, state: TrainState, held_out: HeldOut, *, stops: Callable[[], bool]
) -> HeldOutResult | None:
    """Sums over the held-out batches; None if `stops` answered True between these. Rates are left
    out if it does so later.
    """
    num_rows = eval_rows(program.config, program.plan)
    sums: list[EvalSums] = []
    for batch in all_batches(held_out.batches):
        if stops():
            return None
        on_devices = program.put_batch(batch, num_rows)
        sums.append(program.eval_step(state.params, on_devices))
        # one batch runs while the next is prepared; a requested stop waits for few batches
        jax.block_until_ready(sums[-2:-1])
    sums, rates = jax.device_get(sums), dict[str, float]()
    if held_out.transcripts is not None:
        rate = _word_error_rate(program, state, held_out.transcripts, stops)
        rates = {} if rate is None else {WORD_ERROR_RATE: rate}
    return HeldOutResult(
        loss=float(sum(float(each.loss) for each in sums)),
        tokens=sum(int(each.tokens) for each in sums),
        metrics={
            name: float(sum(float(each.metrics[name]) for each in sums))
            for name in (sums[0].metrics if sums else ())
        },
        rates=rates,
    )


def transcript_rows(config: Config, plan: Plan) -> int:
    """`eval_rows` of the recordings that are transcribed; 0 if none are."""
    number = config.evaluation.transcribed if task_of(config).reads == "recordings" else 0
    return eval_rows(config, plan, number) if number and config.eval_every else 0


def _word_error_rate(
    program: Program, state: TrainState, transcripts: Transcripts, stops: Callable[[], bool]
) -> float | None:
    num_rows = transcript_rows(program.config, program.plan)
    batches = all_batches(lambda: transcripts.batches(program, num_rows))
    return transcripts.word_error_rate(program, state.params, batches, num_rows, stops=stops)


def all_batches(
    make_batches: Callable[[], Iterable[HostBatch]], *, what: str = "held-out batches"
) -> Iterator[HostBatch]:
    """The batches of an evaluation, each once all processes have built it: if one fails, no other
    starts a step that would wait for it.

    Args:
      what: what is made, for messages.
    """
    batches: Iterator[HostBatch] | None = None
    is_over = False
    while True:
        batch, failure = {}, None
        try:
            batches = iter(make_batches()) if batches is None else batches
            batch = next(batches)
        except StopIteration:
            is_over = True
        except Exception as error:
            failure = error
        if any(gather_from_all(int(failure is not None))):
            error = OptimusError(
                f"{what} cannot be made, "
                + (
                    "by another process"
                    if failure is None
                    else f"{type(failure).__name__}: {failure}"
                )
            )
            error.raised_by_all_processes = True
            raise error from failure
        if is_over:
            return
        yield batch
