"""``scripts/gpu_check.sh``: a driver, and workers that each write a JSON file.

``check`` is the driver: it starts a ``worker`` for each family of kernels and each timed case, under ``supervise`` (with ``tied``),
and keeps ``results``. It needs Python and nothing else. A worker runs the ``programs`` of a family (``correctness``), one of the
``cases`` (``timing``), PyTorch (``peer``) or ``queues``. ``stalls`` reads Nsight Compute's tables. ``prepare`` compiles everything
on a machine without a GPU; ``prepared`` puts it into place.
"""
