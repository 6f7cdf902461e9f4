"""The CUDA target: tile program -> CUDA C++ -> cubin, and its custom call; and the same kernels for the emulator.

The route: ``kernel`` has every stage of a tile program lowered to the device IR and fitted (``fitting``), laid out (``layout``,
``frames``), compared with the others (``sharing``) and printed (``print_kernel``); ``compile`` makes a cubin of it with NVRTC, or a
shared library for the emulator with the host's compiler, through a cache on disk; ``emit`` packs the stationary operands (``pack``)
and binds the custom call that C++ in ``cuda/src`` executes. ``supports`` says, op by op, what there is code for; ``target`` is all
of this as an object, with its planner (``planning``).
"""
