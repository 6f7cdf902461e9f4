"""The steps of ``scripts/gpu_check.sh``: each is a program, ``python -m scripts.gpu.<step>``, that writes one JSON file.

``programs`` makes what is run, ``precompile`` compiles all of it beforehand, ``correctness``, ``training``, ``soak`` and
``traffic`` run it, ``record`` says what every JSON file begins with, ``summary`` makes one page of them.
"""
