"""`optimus predict`, started from a checkout."""

import os
import sys

# Python puts this folder first on the path, where tokenize.py and profile.py would hide the modules
# of the same names in the standard library.
if (folder := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(folder)

from optimus_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main("predict"))
