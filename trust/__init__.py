"""Random programs against NumPy: a budgeted search for wrong answers, exceptions, hangs and fallbacks of ``kitsune_jax``.

``program.py`` describes a program as plain data; ``generate.py`` draws one; ``build.py`` makes the JAX function of it, with the
operators of ``operators.py``, ``moves.py`` and ``graphs.py`` and the transformations of ``transforms.py`` and ``loops.py``;
``reference.py`` evaluates that function's jaxpr with NumPy, in float64; ``check.py`` compares; ``worker.py`` does so in a process
of its own, which ``runner.py`` watches; ``shrink.py`` makes a failing program small. ``python -m trust --help``: how to run it.
"""
