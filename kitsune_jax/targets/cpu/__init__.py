"""The CPU target: tile program -> CPU program (``lower``), its format (``bytecode``, ``words``), its custom call (``emit``).

What runs it is C++ in ``cpu/``. ``supports`` says, op by op, what there is code for.
"""
