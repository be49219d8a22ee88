"""The held-out loss and metrics, and how the examples of an evaluation are split into batches.

The examples depend on the run alone (`Config.eval_examples`, `Config.eval_seq_len`), so that losses
are comparable under all its plans and in all its phases. A *row* is a position in the batch, as in
data/loader.py.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from optimus_jax.cluster.distributed import gather_from_all
from optimus_jax.config import Config
from optimus_jax.data.batch import HostBatch
from optimus_jax.errors import OptimusError
from optimus_jax.plan import Plan
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import EvalSums, Program


def eval_rows(config: Config, plan: Plan) -> int:
    """Rows of an evaluation batch, over all devices.

    A multiple of the number of parts that the plan divides a batch into, with at most as many
    tokens as a training batch and at most one row per example, if possible.

    Args:
      config: config of the phase that `plan` is for.
    """
    least = plan.batch_ways() * (1 if plan.pipeline is None else plan.microbatches)
    by_tokens = config.data.global_batch * config.seq_len // (config.eval_seq_len * least)
    return least * max(1, min(by_tokens, -(-config.eval_examples // least)))


class HeldOutSums(NamedTuple):
    """`EvalSums` of all held-out batches."""

    loss: float
    tokens: int
    metrics: dict[str, float]


def held_out_sums(
    program: Program,
    state: TrainState,
    make_batches: Callable[[], Iterable[HostBatch]],
    *,
    stops: Callable[[], bool],
) -> HeldOutSums | None:
    """Sums over the held-out batches; None if `stops` answered True before a batch."""
    num_rows = eval_rows(program.config, program.plan)
    sums: list[EvalSums] = []
    for batch in _all_batches(make_batches):
        if stops():
            return None
        on_devices = program.put_batch(batch, num_rows)
        sums.append(program.eval_step(state.params, on_devices))
        # one batch runs while the next is prepared; a requested stop waits for few batches
        jax.block_until_ready(sums[-2:-1])
    sums = jax.device_get(sums)
    return HeldOutSums(
        loss=float(sum(float(each.loss) for each in sums)),
        tokens=sum(int(each.tokens) for each in sums),
        metrics={
            name: float(sum(float(each.metrics[name]) for each in sums))
            for name in (sums[0].metrics if sums else ())
        },
    )


def _all_batches(make_batches: Callable[[], Iterable[HostBatch]]) -> list[HostBatch]:
    """All batches of an evaluation, built before the first is used: if one process fails, no other
    starts a step that would wait for it.
    """
    batches, failure = [], None
    try:
        batches = list(make_batches())
    except Exception as error:
        failure = error
    if any(gather_from_all(int(failure is not None))):
        error = OptimusError(
            "held-out batches cannot be made, "
            + ("by another process" if failure is None else f"{type(failure).__name__}: {failure}")
        )
        error.raised_by_all_processes = True
        raise error from failure
    return batches
