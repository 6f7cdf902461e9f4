"""The Plan as data (stages, queues, workers, tile size, modelled time), and what a machine model is."""

from __future__ import annotations

import dataclasses

# ----------------------------------------------------------------------------------------------------------------------------------
# The Plan as data: stages, queues, workers, tile size, and what the model says it will cost.
# ----------------------------------------------------------------------------------------------------------------------------------


class Infeasible(ValueError):
    """No plan for this region on this machine. The message is the reason, for the report."""


# Without a matrix product both sides are bound by memory and page faults, where the model is worth less: softmax alone was modelled
# at 1.25x and 1.4x and ran at 0.84x on two cores, one modelled at 1.5x ran at 1.7x.
VECTOR_MARGIN = 1.45


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Ops (graph op indices, topological) that one group of workers runs on a tile. ``resource``: "tensor" or "simt".

    On a GPU ``workers`` are the CTAs of one pipeline instance that the stage has. ``split``: CTAs that share a tile, each with its
    slab of the result's columns. ``resident``: weights stay in shared memory; otherwise they pass through it for every round of
    tiles.
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

    ``place``: "l1"/"l2"/"l3" on a CPU; on a GPU "cluster" (shared memory of its one consumer) or "l2", with a ring of ``depth``
    entries for each lane.
    """

    value: int
    producer: int
    consumers: tuple[int, ...]
    depth: int
    entry_bytes: int
    place: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What plans of every target have.

    ``arrangement``: "vertical" (one worker group runs the whole chain) or "spatial" (stages on different workers). ``replicas``:
    pipeline instances. ``order``: the graph value, an index of a scatter, by whose order the rows stream. ``blocks``: (graph value,
    its dimension, elements) of a long dimension that is worked off in blocks. ``unordered``: ops that fold by indices in whatever
    order rows come, where that is allowed. ``margin``: how many times faster than XLA a plan without matrix products must be
    modelled to be taken.
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
    bound: str  # what limits it: a stage's name, "dram" or "l2"
    order: int | None = None
    blocks: tuple[int, int, int] | None = None
    unordered: tuple[int, ...] = ()
    margin: float = VECTOR_MARGIN

    @property
    def workers(self) -> int:
        """Workers of all replicas."""
        return self.replicas * sum(stage.workers for stage in self.stages)


@dataclasses.dataclass(frozen=True, slots=True)
class CpuPlan(Plan):
    """``products``: how bfloat16 operands are multiplied, times weights and in gradients (``targets.cpu.bytecode.PRODUCTS``)."""

    products: tuple[str, str] = ("best", "best")


@dataclasses.dataclass(frozen=True, slots=True)
class GpuPlan(Plan):
    """``cluster``: CTAs of a thread-block cluster. ``lanes``: consumer warpgroups of a CTA, each of which works on a tile of its
    own. ``l2_bytes``: modelled, through the L2, of which the off-chip bytes are a part."""

    cluster: int = 1
    lanes: int = 0
    l2_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """What a call asks the L2 for on behalf of a product behind it: parts of a weight, which the product then need not fetch.

    ``value``: the argument of the graph, of ``array_bytes``, that the weight lies in, ``weight_bytes`` from byte ``first`` on.
    ``fetched_bytes``: asked for, in pieces that are spread over all of the weight. ``op``: the product. ``workers``: CTAs of the
    machine, which share the pieces out. ``seconds``: what the model says that the product gains.
    """

    value: int
    array_bytes: int
    first: int
    weight_bytes: int
    fetched_bytes: int
    op: int
    workers: int
    seconds: float


# ----------------------------------------------------------------------------------------------------------------------------------
# What a machine model is: the numbers that the planner knows about a device.
#
# Comes in: nothing. Goes out: ``Machine``, of which each target makes its own.
#
# Units: bytes, seconds, bytes per second, and operations per second (a fused multiply-add counts two). Rates are per worker: a
# worker is a core on a CPU and a streaming multiprocessor (one resident CTA) on a GPU.
# ----------------------------------------------------------------------------------------------------------------------------------

KIB, MIB = 1024, 1024 * 1024
Rates = tuple[tuple[str, float], ...]


def size_text(n: float) -> str:
    """``n`` bytes, for a reader.

    >>> size_text(227 * KIB), size_text(1.5 * MIB)
    ('227 KiB', '1.5 MiB')
    """
    return f"{n / MIB:.1f} MiB" if n >= MIB else f"{n / KIB:.0f} KiB"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the entries of a queue can lie: hand-off latency, and bandwidth per worker."""

    name: str
    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device as the cost model sees it; each target's own machines know more.

    ``tensor_rates``: peak operations per second of one worker in matmuls, by dtype; ``"other"`` stands for dtypes that are not
    named. ``local_bytes`` is what one worker keeps on chip for itself (L2 of a core; shared memory of a CTA), ``shared_bytes`` the
    cache all workers share. ``sources`` says where each group of numbers is from.
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

    def rate(self, rates: Rates, dtype: str) -> float:
        """The entry of ``rates`` for ``dtype``, or for "other"."""
        table = dict(rates)
        return table.get(dtype, table["other"])

    def place(self, name: str) -> Place:
        """The queue place called ``name``. Raises ``KeyError`` for one that the machine does not have."""
        return next(p for p in self.places if p.name == name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramContext:
    """The program around a region, as the cost model of a target sees it: a plan depends on it, and the region alone does not tell.

    ``fresh_seconds``: what a byte of an array between two calls takes because the array is fresh pages at every run, where it could
    be an array within one call.
    """

    fresh_seconds: float = 0.0


NO_CONTEXT = ProgramContext()
