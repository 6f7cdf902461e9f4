"""Measurements: ``python -m benchmarks run --all`` and ``python -m benchmarks table``.

``apps`` says what is measured and ``references`` what is right, ``columns`` in which ways it is run, ``training`` the same for
whole training steps, ``timing`` how (interleaved, never one after the other), ``memory`` what a call takes; ``measure`` makes one
case of it, ``store`` keeps cases as JSON, ``table`` makes the tables of the docs from what is stored.
``grid`` (with ``grid_...``) asks of many ordinary functions whether the planner's choice is slower than ``jax.jit``.
"""
