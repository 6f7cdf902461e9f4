"""JAX's own tests of sharded programs, run with pipelines under ``jax.jit`` and without.

``compare.py`` runs the files and compares the outcomes; ``worker.py`` is the process that runs one file; ``known.toml`` has the
differences that are explained. JAX's tests are no part of its wheel, nor of this repository.
"""
