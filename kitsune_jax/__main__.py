"""``python -m kitsune_jax``: see ``kitsune_jax.cli.main``."""

import sys

from kitsune_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
