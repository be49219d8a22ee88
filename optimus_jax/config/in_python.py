"""What a program gives to `train` as an object: its setting has the value IN_PYTHON instead."""

from optimus_jax.errors import ConfigError, explain

IN_PYTHON = "<python>"
"""Neither the usual name of a file nor that of a row."""


def not_given(setting: str, argument: str) -> ConfigError:
    """The error of a run that needs an object, which only a program can give.

    Args:
      argument: of `optimus_jax.train`.
    """
    return ConfigError(
        explain(
            f"{setting} is an object of the program that began the run, and it is not here",
            given=f"{setting}={IN_PYTHON}",
            do="go on in Python, and give it again: optimus_jax.train(run_dir=..., resume=True,"
            f" {argument}=...)",
        )
    )
