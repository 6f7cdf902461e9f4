"""The command ``python -m kitsune_jax``: looks at this installation, at the caches, and at what a function becomes."""
