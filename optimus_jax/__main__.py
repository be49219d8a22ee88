"""`python -m optimus_jax train ...` is `optimus train ...`."""

import sys

from optimus_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
