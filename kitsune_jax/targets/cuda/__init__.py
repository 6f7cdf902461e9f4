"""The CUDA target: tile program -> CUDA C++ -> cubin, and its custom call; and the same kernels for the emulator.

``planning`` plans regions. ``lower`` makes the kernel of a plan: each stage becomes nodes of the device IR (``ir``, ``stage_ir``,
``frame_ir``), which have their C++, fitted into registers and shared memory (``stage``); all stages are laid out (``layout``,
``call_layout``) and printed (``print_kernel``). ``compile`` makes a cubin with NVRTC, or a shared library for the emulator with
the host's compiler, through a cache on disk. ``packing`` makes the table by which one more kernel packs the stationary operands
(``pack``). ``lower.call`` binds the custom call, which C++ in ``cuda/src`` executes. ``target`` is all of this as an object.
"""
