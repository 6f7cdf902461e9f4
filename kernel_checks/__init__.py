"""What ptxas made of a generated kernel, and what a kernel does with memory in the emulator: tools of tests, scripts and documents.

Comes in: cubins, launches of the emulator. Goes out: instructions (``sass``), the registers that roles ask for (``register_pool``),
hazards of matrix products (``lint``), counts of accesses (``counters``). Invariant: nothing that runs a user's program imports
this package.
"""
