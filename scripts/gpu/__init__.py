"""``scripts/gpu_check.sh``: a driver, and the steps that it runs, each a program that writes a JSON file.

The driver needs Python and nothing else: ``check`` runs the ``steps`` under ``supervise`` (with ``tied``), keeps ``results`` and
their ``archive``, and writes the ``summary``; ``prepare`` makes elsewhere what ``prepared`` puts into place; ``plant`` plants
faults in a dry run. Of the steps, ``programs`` makes what is run, ``precompile`` compiles all of it beforehand, ``environment``,
``smoke``, ``correctness``, ``training``, ``benchmarks``, ``micro``, ``soak`` and ``traffic`` run it, each with a ``record``;
``build`` builds the extension and ``tables`` tells of times.
"""
