"""What ops cost on a GPU when stages are formed: the ratio of matmuls and vector work on one SM.

Comes in: a Graph, a Region and the machine model of a GPU. Goes out: ``GpuCost``. How long a tile of a stage takes, with its issue
slots and its shared memory, is in ``times``.
"""

from __future__ import annotations

from collections.abc import Iterable

from kitsune_jax.planning.cost import RegionCost, round_up
from kitsune_jax.targets.cuda.planning.machines import GpuMachine

# A matmul spends about four steps of K on loading and storing its accumulators; from K = 64 on that is in the efficiency.
_FULL_K, _K_OVERHEAD = 64, 16
_ROWS, _COLUMNS = 64, 8  # of a product of the tensor cores
# The part of the lanes' rate that elementwise loops reach, ours and XLA's. A design value.
LOOP_EFFICIENCY = 0.5


class GpuCost(RegionCost):
    machine: GpuMachine

    def tile_seconds(self, i: int, rows: int) -> float:
        machine, work = self.machine, self.work(i)
        if self.absorbed(i):
            return 0.0
        if work.dot is None:
            return rows * work.simt / (machine.rate(machine.simt_rates, work.dtype) * LOOP_EFFICIENCY)
        dot = work.dot
        rate = machine.rate(machine.tensor_rates, dot.dtype) * machine.rate(machine.spatial_efficiency, dot.dtype)
        # A sink contracts the rows: they are its K, and the output's dimensions are what is padded to the tensor cores' shape.
        m, k = (dot.m, rows * dot.k) if i in self.sinks else (rows * dot.m, dot.k)
        padded_k = k + max(0.0, (_FULL_K - k) / _K_OVERHEAD)
        return 2.0 * dot.batch * round_up(m, _ROWS) * round_up(dot.n, _COLUMNS) * padded_k / rate

    def sink_bytes(self, ops: Iterable[int]) -> int:
        """Bytes of the accumulators of the sinks among ``ops``: 32 bits each."""
        return 4 * sum(self.graph.values[v].size for i in ops if i in self.sinks for v in self.graph.ops[i].outputs)
