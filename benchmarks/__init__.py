"""Measurements: ``python -m benchmarks run --all`` and ``python -m benchmarks table``.

``apps`` says what is measured, ``columns`` in which ways it is run, ``timing`` how (interleaved, never one after the other),
``measure`` makes one case of it, ``store`` keeps cases as JSON, ``table`` makes the README's table from what is stored.
"""
