"""Checks of a whole config, which need neither its data nor devices: the same in `train` and
`plan`.
"""

from collections.abc import Collection

from optimus_jax.config import Config
from optimus_jax.models.families import check_family
from optimus_jax.models.tuning_checks import check_freeze
from optimus_jax.training.rate_factors import check_rate_factors
from optimus_jax.training.tasks import check_task


def check_config(config: Config, named: Collection[str] = (), *, is_new: bool = True) -> None:
    """Raise ConfigError unless the model, what is trained of it, the task and the optimizer fit
    together.

    Args:
      named: dotted names of the settings that the user gave, as for `check_task`.
      is_new: whether the run is new. What a resumed run trains was checked at its start.
    """
    check_family(config.model)
    if is_new:
        check_freeze(config.model)
    check_task(config, named)
    check_rate_factors(config)
