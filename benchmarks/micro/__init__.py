"""Microbenchmarks of the CUDA target's parts: ``python -m benchmarks.micro --backend cuda --output micro.json``.

``kernels`` says how the kernels of ``cuda/bench`` are launched and what they must compute, ``backends`` where they run (a device,
or the emulator, which checks the kernels and times nothing), ``driver`` is the CUDA driver through ctypes, ``suite`` what is
measured.
"""
