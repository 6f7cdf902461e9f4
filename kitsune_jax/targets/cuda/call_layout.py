"""What lies where in a kernel of several phases: its parts beside each other, and the arrays that one part hands to a later one.

Comes in: a ``Program`` and an ``Arrangement`` for each of its parts. Goes out: ``CallLayout``. Every part is laid out as a kernel
of its own (``layout``), in the same shared memory as the others but for its barriers. The workspace: a counter at which all CTAs
meet, the counters of all parts, which are zero when the kernel starts, then what the parts and the arrays between them need.
"""

from __future__ import annotations

import dataclasses
import math

from kitsune_jax.program.ir import Array, Part, Program
from kitsune_jax.targets.cuda import call_parts, layout, pointwise, tiles
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.cuda.fetches import Fetch
from kitsune_jax.targets.cuda.layout import Layout
from kitsune_jax.targets.cuda.runtime import LAUNCH_VERSION
from kitsune_jax.targets.errors import CannotLower

_COUNTER_BYTES = 128  # of the barrier between phases: a cache line
_ARRAY_BYTES = 256  # at whose multiples an array of the workspace starts, as XLA's arrays do


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a pointer of a part points to: ``byte`` bytes behind buffer ``buffer`` of the kernel. ``made``: an earlier phase writes
    what is there."""

    buffer: int
    byte: int = 0
    made: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LaidOut:
    """A part: its CTAs are the ``ctas`` from number ``first`` on. ``sources``: of its ``Params``, in their order."""

    phase: int
    layout: Layout
    first: int
    ctas: int
    sources: tuple[Source, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CallLayout:
    """``direct``: the operands of the call that the kernel reads as they lie. ``buffers``: the declaration of a pointer to each
    buffer of the kernel, and ``sizes``, its bytes; ``operands`` of them are operands. ``filled``: (result, fold) of the results
    that hold the identity of a fold before the kernel starts. ``kept``: arrays between phases that are results of the custom call,
    because XLA fills them. ``fetch``: what the kernel asks the L2 for, the last of the operands."""

    name: str
    parts: tuple[LaidOut, ...]
    grid: int
    direct: tuple[int, ...]
    buffers: tuple[str, ...]
    sizes: tuple[int, ...]
    operands: int
    filled: tuple[tuple[int, str], ...]
    kept: tuple[Array, ...]
    zero_bytes: int
    workspace_bytes: int
    fetch: Fetch | None = None

    @property
    def launch(self) -> tuple[int, ...]:
        """The words that ``cuda/src`` launches the kernel with."""
        a = self.parts[0].layout.a
        shared = max(p.layout.shared_bytes for p in self.parts)
        most = max(p.layout.a.ctas for p in self.parts)
        results = len(self.buffers) - self.operands
        geometry = a.sm, self.grid, a.threads, 1, shared, 1, most
        return LAUNCH_VERSION, *geometry, self.operands, results, self.zero_bytes, 0 if self.fetch is None else 1, *self.sizes


def of_call(call: Program, arrangements: tuple[Arrangement, ...], name: str, fetch: Fetch | None = None) -> CallLayout:
    """Raises ``CannotLower`` where the kernel does not fit, or where the parts cannot be parts of one."""
    first = arrangements[0]
    if any(a.cluster > 1 or "cluster" in a.places for a in arrangements):
        raise CannotLower("a call of several phases runs without clusters: its CTAs meet as a grid")
    if any((a.sm, a.lanes) != (first.sm, first.lanes) for a in arrangements):
        raise CannotLower("the parts of a call run in the same warpgroups, so they have equally many lanes")
    programs = call_parts.of_call(call)
    barriers = [layout.barrier_bytes(p, a) for p, a in zip(programs, arrangements, strict=True)]
    found = [layout.of_kernel(p, a, name, sum(barriers) - own) for p, a, own in zip(programs, arrangements, barriers, strict=True)]
    if len({at.header_bytes for at in found}) > 1:  # one of them did without staging
        most = max(at.header_bytes for at in found)
        found = [layout.of_kernel(p, a, name, most - own) for p, a, own in zip(programs, arrangements, barriers, strict=True)]
    return _assemble(call, found, name, fetch)


def _assemble(call: Program, found: list[Layout], name: str, fetch: Fetch | None) -> CallLayout:
    filled = {part.writes[k]: how for part, at in zip(call.parts, found, strict=True) for k, how in at.filled}
    results = range(call.operands, call.operands + call.results)
    kept = [n for n in filled if n not in results]
    buffers = _Buffers(call, found, [*results, *kept], filled, fetch)
    workspace = _Workspace(call, found, [n for n in range(results.stop, len(call.arrays)) if n not in kept])
    grid, shares = _shares(call, found)
    grid = grid if fetch is None else fetch.grid(grid, max(at.a.ctas for at in found))
    where = {n: Source(b) for n, b in buffers.of_array.items()}
    where |= {n: Source(buffers.workspace, byte) for n, byte in workspace.arrays.items()}
    parts = []
    for k, (part, at) in enumerate(zip(call.parts, found, strict=True)):
        made = {n: dataclasses.replace(source, made=n >= call.operands) for n, source in where.items()}
        sources = [made[part.reads[i]] for i in at.operands.inputs]
        sources += [Source(b) for b in buffers.packed[k]]
        sources += [_table(call, part, at, v, made, buffers.tables[k]) for v in at.operands.tables]
        sources += [where[n] for n in part.writes]
        sources += [Source(buffers.workspace, workspace.rest[k]), Source(buffers.workspace, workspace.heads[k])]
        parts.append(LaidOut(part.phase, at, *shares[k], tuple(sources)))
    sizes = (*buffers.sizes, workspace.bytes)
    return CallLayout(
        name,
        tuple(parts),
        grid,
        tuple(buffers.direct),
        (*buffers.declared, "u8* workspace"),
        sizes,
        buffers.operands,
        tuple((buffers.of_array[n] - buffers.operands, how) for n, how in filled.items()),
        tuple(call.arrays[n] for n in kept),
        workspace.zero_bytes,
        workspace.bytes,
        fetch,
    )


def table_input(at: Layout, v: int) -> int | None:
    """The input that the table ``v`` is, where it is one as it lies."""
    for stage in at.program.stages:
        for i in stage.body:
            if i.kind == "load" and v in i.outputs:
                return int(str(i["array"]))
    return None


def _table(call: Program, part: Part, at: Layout, v: int, where: dict[int, Source], packed: dict[int, int]) -> Source:
    return Source(packed[v]) if v in packed else where[part.reads[table_input(at, v) or 0]]


class _Buffers:
    """The buffers of the custom call. ``of_array``: array of the call -> buffer; ``packed`` and ``tables``: what XLA makes for each
    part."""

    def __init__(self, call: Program, found: list[Layout], results: list[int], filled: dict[int, str], fetch: Fetch | None):
        self.declared: list[str] = []
        self.sizes: list[int] = []
        self.of_array: dict[int, int] = {}
        self.packed: list[list[int]] = []
        self.tables: list[dict[int, int]] = []
        read = {part.reads[i] for part, at in zip(call.parts, found, strict=True) for i in _direct(at)}
        self.direct = sorted(n for n in read if n < call.operands)
        for n in self.direct:
            self.of_array[n] = self._add(f"const void* operand{n}", _bytes(call.arrays[n]))
        for k, at in enumerate(found):
            o = at.operands
            groups = zip(o.groups, o.order, strict=True)
            weights = [sum(o.of_group(d)[w].shape.part_bytes(chunk) for w, chunk in order) for d, order in groups]
            own = [self._add(f"const u8* part{k}_weights{g}", size) for g, size in enumerate(weights)]
            if o.vectors:
                own.append(self._add(f"const float* part{k}_vectors", 4 * sum(r.words for r in o.vectors)))
            self.packed.append(own)
            types = {v: at.program.values[v] for v in o.tables if table_input(at, v) is None}
            sizes = {v: math.prod(t.shape) * pointwise.ITEM_SIZE[t.dtype] for v, t in types.items()}
            self.tables.append({v: self._add(f"const void* part{k}_table{v}", size) for v, size in sizes.items()})
        for n in filled:
            self._add(f"const void* filled{n}", _bytes(call.arrays[n]))
        if fetch is not None:
            self._add(fetch.declared, fetch.array_bytes)
        self.operands = len(self.sizes)
        for n in results:
            self.of_array[n] = self._add(f"void* result{n}", _bytes(call.arrays[n]))
        self.workspace = len(self.sizes)

    def _add(self, declared: str, size: int) -> int:
        self.declared.append(declared)
        self.sizes.append(size)
        return len(self.sizes) - 1


def _direct(at: Layout) -> list[int]:
    """The inputs of a part that it reads as they lie."""
    tables = [table_input(at, v) for v in at.operands.tables]
    return [*at.operands.inputs, *(k for k in tables if k is not None)]


def _bytes(array: Array) -> int:
    return math.prod(array.shape) * pointwise.ITEM_SIZE[array.dtype]


class _Workspace:
    """Bytes at which the counters of each part start (``heads``), what else it has (``rest``: less what its counters take, because
    its offsets count from them), and the ``arrays`` between parts."""

    def __init__(self, call: Program, found: list[Layout], inner: list[int]):
        at = _COUNTER_BYTES
        self.heads, self.rest = list[int](), list[int]()
        for part in found:
            self.heads.append(at)
            at += tiles.aligned(part.workspace.zero_bytes, 128)
        self.zero_bytes = at
        for part in found:
            used = part.workspace.zero_bytes
            self.rest.append(at - used)
            at += tiles.aligned(part.workspace.bytes - used, _ARRAY_BYTES)
        at = tiles.aligned(at, _ARRAY_BYTES)
        self.arrays: dict[int, int] = {}
        for n in inner:
            self.arrays[n] = at
            at += tiles.aligned(_bytes(call.arrays[n]), _ARRAY_BYTES)
        self.bytes = at


def _shares(call: Program, found: list[Layout]) -> tuple[int, list[tuple[int, int]]]:
    """The CTAs of the kernel, and of each part its first one and their number. Parts of one phase start where the one before ends,
    so that those with few tiles run beside each other."""
    most = max(at.a.replicas * at.a.ctas for at in found)
    needs = [at.a.instances(at.program) * at.a.ctas for at in found]
    shares: list[tuple[int, int]] = []
    ends: dict[int, int] = {}
    for part, need in zip(call.parts, needs, strict=True):
        first = ends.get(part.phase, 0)
        shares.append((first, need))
        ends[part.phase] = first + need
    ctas = max(at.a.ctas for at in found)
    grid = min(max(ends.values()), max(most, max(needs)))
    return tiles.aligned(grid, ctas), shares
