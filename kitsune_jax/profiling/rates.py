"""The peak rates of a machine model, for the bound of a call.

Comes in: a ``Machine`` of a target. Goes out: ``PeakRates``. On a CPU all numbers are measured on this machine (its profile); on a
GPU they are those of the machine model.
"""

from __future__ import annotations

from kitsune_jax.planning.plan import Machine
from kitsune_jax.profiling.metrics import PeakRates
from kitsune_jax.targets.cpu.planning.machines import CpuMachine
from kitsune_jax.targets.cuda.planning.machines import GpuMachine

_MOVED = 12  # bytes that an element of the measured loop "move" reads and writes in float32
_SIMPLE_OF_TANH = 1 / 28  # an addition or multiplication, over a tanh
_SPECIAL = 1 / 8  # lanes of a multiprocessor that compute elementary functions, over all (16 of 128, Hopper and Ampere)


def rates_of(machine: Machine) -> PeakRates:
    """The rates of all workers of ``machine`` together. Raises ``TypeError`` for a machine of a target without such numbers."""
    dots = tuple((dtype, rate * machine.workers) for dtype, rate in machine.tensor_rates)
    if isinstance(machine, CpuMachine):
        seconds = machine.profile.seconds
        move, tanh = seconds("xla/loop/move/float32"), seconds("xla/loop/tanh/float32")
        one = max(tanh - move, 0.1 * move) / 2  # the loop "tanh" has two of them
        simple, transcendental = 1 / (one * _SIMPLE_OF_TANH), 1 / one
        near = _MOVED / move
    elif isinstance(machine, GpuMachine):
        simple = machine.rate(machine.simt_rates, "float32") * machine.workers
        transcendental = simple * _SPECIAL
        near = max(machine.shared_bandwidth, machine.dram_bandwidth)
    else:
        raise TypeError(f"no peak rates are known of the machine {machine.name}")
    return PeakRates(
        machine.name,
        dots,
        simple,
        transcendental,
        near,
        machine.dram_bandwidth,
        machine.shared_bytes,
        machine.kernel_seconds,
    )
