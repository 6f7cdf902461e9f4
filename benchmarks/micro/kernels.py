"""The kernels of ``cuda/bench``: their defines and launches, and in NumPy what they must have computed.

Comes in: sizes. Goes out: ``Measured``: cycles and seconds of a launch whose checksums were right. Raises ``WrongResult`` where
they were not: a number from a queue that lost data means nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.micro.backends import Backend, Geometry

SOURCES = Path(__file__).parents[2] / "cuda" / "bench"
GROUP = 128  # threads of a warpgroup
VECTOR = 16 * GROUP  # bytes of an entry for each vector of a thread
BATCH_FLOPS = 16 * 2 * 64 * 128 * 16  # of queue.cu's multipliers
_COUNTER = 128
_ALONE = 116 * 1024  # more than half of any multiprocessor's shared memory: one CTA on each, as pipelines have
_KINDS = {"smem": 0, "cluster": 1, "l2": 2}
Kind = Literal["smem", "cluster", "l2"]


class WrongResult(RuntimeError):
    pass


@dataclasses.dataclass(frozen=True)
class Measured:
    """``cycles``: of each warpgroup that was timed; ``multiplier_cycles``: of those that multiplied beside it. ``seconds``: of each
    launch, without times in the emulator."""

    cycles: np.ndarray
    multiplier_cycles: np.ndarray
    seconds: list[float]


@dataclasses.dataclass(frozen=True)
class QueueRing:
    """``rings`` rings of ``members`` warpgroups. An entry is ``vectors`` x 2 KiB, a ring has ``depth`` of them for each member."""

    kind: Kind
    vectors: int
    depth: int
    members: int
    multipliers: int = 0

    @property
    def payload(self) -> int:
        return self.vectors * VECTOR

    @functools.cached_property
    def source(self) -> str:
        return _source(
            "queue",
            KIND=_KINDS[self.kind],
            VECTORS=self.vectors,
            DEPTH=self.depth,
            MEMBERS=self.members,
            MULTIPLIERS=self.multipliers,
        )

    @property
    def groups(self) -> int:
        """Warpgroups of a CTA."""
        return (self.members if self.kind == "smem" else 1) + self.multipliers

    @property
    def shared_bytes(self) -> int:
        here = self.members if self.kind == "smem" else 1
        slots = 0 if self.kind == "l2" else here * self.depth * self.payload
        b_end = _round_up(16 * self.depth * here, 1024) + (16384 if self.multipliers else 16)
        return max(_ALONE, _round_up(_round_up(b_end, 128) + max(slots, 16), 1024))

    def geometry(self, rings: int) -> Geometry:
        ctas = rings * (1 if self.kind == "smem" else self.members)
        cluster = self.members if self.kind == "cluster" else 1
        zeroed = ctas * 2 * self.depth * _COUNTER if self.kind == "l2" else 0
        return Geometry(ctas, self.groups * GROUP, cluster, self.shared_bytes, self.kind == "l2", zeroed)

    def run(
        self, backend: Backend, *, rings: int, entries: int, token: bool = False, batches: int = 0, repeats: int = 1
    ) -> Measured:
        geometry = self.geometry(rings)
        warpgroups = geometry.grid * self.groups
        settings = np.array([entries, token, batches, 0], np.uint32)
        checksums, cycles = np.zeros((warpgroups, GROUP), np.uint32), np.zeros(warpgroups, np.uint64)
        l2 = geometry.grid if self.kind == "l2" else 1
        slots = np.zeros((l2, self.depth * self.payload if self.kind == "l2" else 16), np.uint8)
        counters = np.zeros((l2, 2 * self.depth * _COUNTER), np.uint8)
        seconds = backend.run(self.source, geometry, [settings], [checksums, cycles, slots, counters], repeats)
        group = np.arange(warpgroups) % self.groups
        moves = group < self.groups - self.multipliers
        member = (
            np.arange(warpgroups) % self.members if self.kind == "smem" else np.arange(warpgroups) // self.groups % self.members
        )
        wanted = np.where(moves[:, None], self._ring_checksums(member, entries, token), _product_checksums(batches))
        _require(checksums, wanted, f"{self}")
        return Measured(cycles[moves], cycles[~moves], [s for s in seconds if s is not None])

    def _ring_checksums(self, member: np.ndarray, entries: int, token: bool) -> np.ndarray:
        """What queue.cu's ``add`` leaves: a polynomial in 31 over the words that a member has read, modulo 2^32."""
        count = entries * self.vectors
        powers = np.full(count, 31, np.uint32)
        powers[-1:] = 1
        powers = np.cumprod(powers[::-1], dtype=np.uint32)[::-1]
        steps = (np.arange(count, dtype=np.uint32) * np.uint32(2654435761) * powers).sum(dtype=np.uint32)
        left = ((member - 1) % self.members).astype(np.uint32)
        constant = left if token else left * np.uint32(40503)  # a token counts its hops, and comes from member 0
        return steps + (constant[:, None] + np.arange(GROUP, dtype=np.uint32)) * powers.sum(dtype=np.uint32)


def _product_checksums(batches: int) -> np.ndarray:
    """Sums of each thread's accumulators, whose places are those of wgmma's D (kitsune/arch/wgmma.h)."""

    def operand(rows: int) -> np.ndarray:
        row, k = np.arange(rows)[:, None], np.arange(64)
        return (row * 7 + k * 13 + row * k) % 5 - 2

    d = 4 * batches * operand(64) @ operand(128).T  # the four k-steps of 64 values, four times a batch
    d = d.reshape(4, 2, 8, 16, 4, 2).sum((1, 3, 5))  # [warp, i, g, j, t, e] -> [warp, g, t]
    return d.reshape(GROUP).astype(np.uint32)


@dataclasses.dataclass(frozen=True)
class Multicast:
    """Weights streamed to every CTA, in chunks of ``bytes``; each cluster reads a chunk once from the L2."""

    bytes: int
    depth: int
    cluster: int

    @functools.cached_property
    def source(self) -> str:
        return _source("multicast", BYTES=self.bytes, DEPTH=self.depth, CLUSTER_SIZE=self.cluster)

    @property
    def shared_bytes(self) -> int:
        return 1024 * (1 + 16 * self.depth // 1024) + self.depth * self.bytes

    def run(self, backend: Backend, *, clusters: int, chunks: int, rounds: int, repeats: int = 1) -> Measured:
        ctas = clusters * self.cluster
        geometry = Geometry(ctas, 3 * GROUP, self.cluster, self.shared_bytes)
        weights = np.random.default_rng(0).integers(0, 2**32, (chunks, self.bytes // VECTOR, GROUP, 4), np.uint32)
        checksums, cycles = np.zeros((ctas, 2, GROUP), np.uint32), np.zeros(ctas, np.uint64)
        operands = [np.array([rounds, chunks, 0, 0], np.uint32), weights]
        seconds = backend.run(self.source, geometry, operands, [checksums, cycles], repeats)
        words = weights.sum(-1, dtype=np.uint32)
        wanted = np.zeros(GROUP, np.uint32)
        for n in range(rounds * chunks):
            wanted = wanted * np.uint32(31) + words[n % chunks, (n // chunks + n) % words.shape[1]]
        _require(checksums, np.broadcast_to(wanted, checksums.shape), f"{self}")
        return Measured(cycles, cycles[:0], [s for s in seconds if s is not None])


def atomics_source() -> str:
    return _source("atomics")


def run_atomics(backend: Backend, *, additions: int, fetch: bool, repeats: int = 1) -> Measured:
    """One thread of each CTA, one CTA a multiprocessor. ``fetch``: each addition waits for the old value."""
    ctas = backend.multiprocessors
    cycles, counters = np.zeros(ctas, np.uint64), np.zeros((ctas, _COUNTER // 4), np.uint32)
    geometry = Geometry(ctas, 32, shared_bytes=_ALONE, zeroed=counters.nbytes)
    seconds = backend.run(atomics_source(), geometry, [np.array([additions, fetch, 0, 0], np.uint32)], [cycles, counters], repeats)
    _require(counters[:, 0], np.full(ctas, additions, np.uint32), "atomics")
    return Measured(cycles, cycles[:0], [s for s in seconds if s is not None])


def _source(name: str, **defines: int) -> str:
    head = "".join(f"#define KITSUNE_BENCH_{key} {value}\n" for key, value in defines.items())
    return head + (SOURCES / f"{name}.cu").read_text()


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _require(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    wrong = np.argwhere(got != wanted)
    if len(wrong):
        raise WrongResult(f"{what}: {len(wrong)} of {got.size} checksums are wrong, the first at {wrong[0].tolist()}")
