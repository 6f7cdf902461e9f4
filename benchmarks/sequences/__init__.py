"""Attention, transformer layers and loops over time: simulators and recurrent networks.

``python -m benchmarks run --app attention`` measures one; the functions are those of ``examples/``."""
