"""The Plan as data: phases, stages, queues, workers, tile size, and what the model says it will cost."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Ops (graph op indices, topological) that one group of workers runs on a tile. ``resource``: "tensor" or "simt"."""

    name: str
    ops: tuple[int, ...]
    phase: int
    resource: str
    workers: int
    tile_seconds: float  # modelled time of one tile on one worker
    stationary_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Queue:
    """One value handed from ``producer`` to ``consumers`` (stage indices). ``depth`` entries of ``entry_bytes``.

    ``place``: "l1"/"l2"/"l3" on a CPU, "smem"/"cluster"/"l2" on a GPU.
    """

    value: int
    producer: int
    consumers: tuple[int, ...]
    depth: int
    entry_bytes: int
    place: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """``arrangement``: "vertical" (one worker group runs the whole chain) or "spatial" (stages on different workers)."""

    platform: str
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
    flops: int
    bound: str  # what limits it: a stage's name, "dram" or "l2"
