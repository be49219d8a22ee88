"""How the examples of an evaluation are split into batches.

The examples depend on the run alone (`Config.eval_examples`, `Config.eval_seq_len`), so that losses
are comparable under all its plans and in all its phases. A *row* is a position in the batch, as in
data/loader.py.
"""

from optimus_jax.config import Config
from optimus_jax.plan import Plan


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
