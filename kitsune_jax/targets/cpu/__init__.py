"""The CPU target: planning (``planning``), measured times (``profile``), and code: ``lower`` turns tile programs into CPU programs.

``bytecode`` defines the format of CPU programs, ``call`` runs them as custom calls, and C++ in ``cpu/`` executes them.
"""
