"""How the examples of an evaluation are dealt out, always the same ones.

Which they are depends on the run alone (`Config.eval_examples`, `Config.eval_seq_len`), so that
losses are comparable under all its plans and in all its phases. A *row* is a place in the batch, as
in data/loader.py.
"""

from optimus_jax.config import Config
from optimus_jax.plan import Plan


def eval_rows(config: Config, plan: Plan) -> int:
    """Rows of a batch of an evaluation, over all devices.

    A number that the plan can deal out, of no more tokens than a training batch has and no more
    rows than there are examples, where that is possible.

    Args:
      config: in one phase, that `plan` is for.
    """
    least = plan.batch_ways() * (1 if plan.pipeline is None else plan.microbatches)
    by_tokens = config.data.global_batch * config.seq_len // (config.eval_seq_len * least)
    return least * max(1, min(by_tokens, -(-config.eval_examples // least)))
