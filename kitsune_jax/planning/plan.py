"""The ``Plan`` of a region as data (stages, queues, workers, tile size, modelled time), and ``Machine``, the model of a device.

Units: bytes, seconds, bytes per second, and operations per second (a fused multiply-add counts two). Rates are per worker: a worker
is a core on a CPU and a streaming multiprocessor (one resident CTA) on a GPU.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.config import PlannerOptions
from kitsune_jax.planning.streams import Region

# --- Plans ------------------------------------------------------------------------------------------------------------------------


class Infeasible(ValueError):
    """This machine has no plan for the region. The message is the reason, for the report."""


# Without a matrix product memory and page faults bind both sides, and the model is worth less: softmax alone was modelled at 1.25x
# and 1.4x and ran at 0.84x on two cores; one modelled at 1.5x ran at 1.7x.
VECTOR_MARGIN = 1.45


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Ops (graph op indices, topological) that one group of workers runs on a tile. ``resource``: "tensor" or "simt".

    On a GPU ``workers`` are the stage's CTAs in one pipeline instance. ``split``: CTAs that share a tile, each with some of the
    result's columns. ``resident``: weights stay in shared memory; otherwise they pass through it for every round of tiles.
    """

    name: str
    ops: tuple[int, ...]
    resource: str
    workers: int
    tile_seconds: float  # modelled time of one tile on one worker
    split: int = 1
    resident: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Queue:
    """One value handed from ``producer`` to ``consumers`` (stage indices). ``depth`` entries of ``entry_bytes``.

    ``place``: "l1"/"l2"/"l3" on a CPU; on a GPU "cluster" (shared memory of its one consumer) or "l2", a ring for each lane.
    """

    value: int
    producer: int
    consumers: tuple[int, ...]
    depth: int
    entry_bytes: int
    place: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The fields of the plans of every target.

    ``arrangement``: "vertical" (one worker group runs the whole chain) or "spatial" (stages on different workers). ``replicas``:
    pipeline instances. ``order``: the graph value, an index of a scatter, by whose order the rows stream. ``blocks``: (graph value,
    dimension, elements) of a long dimension that is computed in blocks; ``edge``: the elements of those of which a mask hides some,
    0 for as many. ``unordered``: ops that may fold by index in any order of rows. ``margin``: the speed-up over XLA that the model
    must show for a plan without matrix products to be taken.
    """

    machine: str
    arrangement: str
    tile_rows: int
    tiles: int
    stages: tuple[Stage, ...]
    queues: tuple[Queue, ...]
    replicas: int
    seconds: float  # modelled time of the whole region
    baseline_seconds: float  # modelled time of the same ops, bulk-synchronously
    bytes_moved: int  # off-chip, as a pipeline
    baseline_bytes: int  # off-chip, bulk-synchronously
    bound: str  # the limit: a stage's name, "dram" or "l2"
    order: int | None = None
    blocks: tuple[int, int, int] | None = None
    edge: int = 0
    unordered: tuple[int, ...] = ()
    margin: float = VECTOR_MARGIN

    @property
    def workers(self) -> int:
        """Workers of all replicas."""
        return self.replicas * sum(stage.workers for stage in self.stages)

    @property
    def traits(self) -> tuple[str, ...]:
        """The facts of a GPU's plan that a report names behind its arrangement; none of a CPU's."""
        return ()


@dataclasses.dataclass(frozen=True, slots=True)
class CpuPlan(Plan):
    """``products``: how bfloat16 operands are multiplied, times weights and in gradients (``targets.cpu.bytecode.PRODUCTS``)."""

    products: tuple[str, str] = ("best", "best")


@dataclasses.dataclass(frozen=True, slots=True)
class GpuPlan(Plan):
    """``cluster``: CTAs of a thread-block cluster. ``lanes``: consumer warpgroups of a CTA, each with a tile of its own.
    ``l2_bytes``: modelled bytes through the L2, including the off-chip bytes."""

    cluster: int = 1
    lanes: int = 0
    l2_bytes: int = 0

    @property
    def traits(self) -> tuple[str, ...]:
        clusters = (f"clusters of {self.cluster}",) if self.cluster > 1 else ()
        return (*clusters, "1 lane" if self.lanes == 1 else f"{self.lanes} lanes")


@dataclasses.dataclass(frozen=True)
class Phase:
    """A region that runs in phase ``number`` of a call."""

    number: int
    region: Region
    plan: Plan


# --- Machines ---------------------------------------------------------------------------------------------------------------------

KIB, MIB = 1024, 1024 * 1024
Rates = tuple[tuple[str, float], ...]


def size_text(n: float) -> str:
    """``n`` bytes in words.

    >>> size_text(227 * KIB), size_text(1.5 * MIB)
    ('227 KiB', '1.5 MiB')
    """
    return f"{n / MIB:.1f} MiB" if n >= MIB else f"{n / KIB:.0f} KiB"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A place for the entries of a queue: hand-off latency, and bandwidth per worker."""

    name: str
    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device as the cost model sees it; each target derives its own.

    ``tensor_rates``: peak operations per second of one worker in matmuls, by dtype; ``"other"`` stands for all other dtypes.
    ``local_bytes``: on-chip memory of one worker (L2 of a core; shared memory of a CTA); ``shared_bytes``: the cache that all
    workers share. ``sources``: where each group of numbers is from. ``gain_band``: what the measured gain of most programs is at
    least and at most, as a part of the modelled one; ``None`` where they were not compared.
    """

    name: str
    platform: str
    workers: int
    tensor_rates: Rates
    local_bytes: int
    shared_bytes: int
    shared_bandwidth: float  # all workers together
    dram_bandwidth: float  # all workers together, reads + writes
    places: tuple[Place, ...]  # nearest first
    call_seconds: float  # one pipeline call
    kernel_seconds: float  # gap between two kernels of the bulk-synchronous program
    sources: tuple[tuple[str, str], ...]
    gain_band: tuple[float, float] | None = None

    def rate(self, rates: Rates, dtype: str) -> float:
        """The entry of ``rates`` for ``dtype``, or for "other"."""
        table = dict(rates)
        return table.get(dtype, table["other"])

    def place(self, name: str) -> Place:
        """The queue place called ``name``. Raises ``KeyError`` for a place that the machine does not have."""
        return next(p for p in self.places if p.name == name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramContext:
    """Facts about the program around a region that its plan depends on.

    ``options``: of the user, whole. ``fresh_seconds``: seconds per byte of an array between two calls, if it is fresh pages at
    every run, unlike within one call.
    """

    options: PlannerOptions = PlannerOptions()
    fresh_seconds: float = 0.0


NO_CONTEXT = ProgramContext()
