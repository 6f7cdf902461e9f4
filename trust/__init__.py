"""Random programs against NumPy: a budgeted search for wrong answers, exceptions, hangs and fallbacks of ``kitsune_jax``.

``program.py`` describes a program as plain data; ``generate.py`` draws one; ``build.py`` makes its JAX function, from the operators
of ``operators.py``, ``moves.py`` and ``graphs.py`` and the transformations of ``transforms.py`` and ``loops.py``; ``reference.py``
evaluates the function's jaxpr with NumPy, in float64; ``check.py`` compares; ``worker.py`` runs it in a process of its own, watched
by ``runner.py``; ``shrink.py`` reduces failing programs. ``python -m trust --help``: how to run it.

The folder ``jax_tests`` runs JAX's own tests of sharded programs with pipelines.
"""
