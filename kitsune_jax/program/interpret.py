"""The NumPy interpreter of tile programs: what every target's result is compared with.

Comes in: a ``TileProgram`` and its input arrays. Goes out: its output arrays. Tiles travel through *bounded* queues, and stages
fire in a random order drawn from a seed, so a program that can deadlock does, as ``Deadlock`` with who waits for which queue.
Invariants that it checks on the way: every value has the shape and dtype its type says, and stages push and pop exactly the queues
that name them.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" and the 8-bit floats NumPy dtypes)
import numpy as np

from kitsune_jax.graph import Scalar
from kitsune_jax.ops.table import OPS, resolve_rows
from kitsune_jax.program.ir import ArrayType, Instr, Program, TileProgram, TileType
from kitsune_jax.streams.space import dim_strides

Array = np.ndarray[Any, np.dtype[Any]]

_FOLD: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


class Deadlock(RuntimeError):
    """No stage can fire although tiles are left. The message says which stage waits for which queue."""


def interpret(
    program: Program | TileProgram,
    arrays: Sequence[Any],
    *,
    schedule_seed: int | None = None,
    widen: bool = False,
    lookahead: int = 0,
) -> list[Array]:
    """Run ``program`` on ``arrays`` (one per operand, of exactly its shape and dtype) and return its results.

    ``schedule_seed``: the order in which ready stages fire; None fires the last ready one, the order of least memory. ``widen``:
    compute and return floats as float64, for comparison with JAX in float64. ``lookahead``: tiles beyond its own that a stage waits
    for before it fires, as one that prefetches does. Sinks of floats accumulate in float64.

    Raises ``Deadlock``, ``ValueError`` for arrays that do not fit the program, ``TypeError`` for a program that breaks its own
    types.

    Example (``program`` doubles its one input): ``interpret(program, [x])[0]`` equals ``2 * x``.
    """
    call = Program.of(program) if isinstance(program, TileProgram) else program
    if len(arrays) != call.operands:
        raise ValueError(f"the program takes {call.operands} arrays, not {len(arrays)}")
    known = dict(enumerate(arrays))
    for part in call.parts:
        run = _Run(part.program, [known[k] for k in part.reads], widen)
        outs = run.run(Schedule(part.program, lookahead=lookahead), schedule_seed)
        known.update(zip(part.writes, outs, strict=True))
    return [known[call.operands + k] for k in range(call.results)]


def check_deadlock_free(program: TileProgram, *, lookahead: int = 1) -> str | None:
    """None if the program's queues let every tile through, else who waits for which queue.

    Moves tokens, not data, for no more tiles than are needed to fill every queue. One order of firing is enough: a stage that can
    fire stays able to until it does, so either every order ends or none does. ``lookahead`` as in ``interpret``; plans are made for
    1.
    """
    tiles = min(program.tiles, sum(q.depth for q in program.queues) + (lookahead + 1) * len(program.stages) + 2)
    schedule = Schedule(program, tiles, lookahead)
    try:
        while ready := schedule.ready():
            schedule.fire(ready[-1])
        schedule.check_done()
    except Deadlock as stuck:
        return str(stuck)
    return None


class Schedule:
    """The firing rule: stage s may run its next tile when all its input entries are full and all its output entries are free.

    State: ``done[s]``, the tiles stage s has finished. A stage fires atomically, so that is also how many it has popped and pushed.
    """

    def __init__(self, program: TileProgram, tiles: int | None = None, lookahead: int = 0):
        self.program, self.lookahead = program, lookahead
        self.tiles = program.tiles if tiles is None else tiles
        self.done = [0] * len(program.stages)
        self.pops, self.pushes = _queues_of(program)

    def ready(self) -> list[int]:
        return [s for s, done in enumerate(self.done) if done < self.tiles and not self.waits(s)]

    def waits(self, s: int) -> list[str]:
        """Why stage ``s`` can't fire, in words; empty when it can."""
        tile, why = self.done[s], []
        for q in self.pops[s]:
            queue = self.program.queues[q]
            need = min(tile + 1 + self.lookahead, self.tiles)
            if self.done[queue.producer] < need:
                why.append(f"tile {need - 1} in queue {q}, which {self.name(queue.producer)} fills")
        for q in self.pushes[s]:
            queue = self.program.queues[q]
            slowest = min(queue.consumers, key=lambda c: self.done[c])
            if tile - self.done[slowest] >= queue.depth:
                why.append(f"a free slot in queue {q} (depth {queue.depth}), which {self.name(slowest)} empties")
        return why

    def fire(self, s: int) -> None:
        self.done[s] += 1

    def check_done(self) -> None:
        """Raise ``Deadlock`` where a stage has tiles left."""
        stuck = [s for s, done in enumerate(self.done) if done < self.tiles]
        if stuck:
            lines = [f"{self.name(s)}, at tile {self.done[s]}, waits for {' and for '.join(self.waits(s))}" for s in stuck]
            raise Deadlock("; ".join(lines))

    def name(self, s: int) -> str:
        return f"stage {s} ({self.program.stages[s].name})"


def _queues_of(program: TileProgram) -> tuple[list[list[int]], list[list[int]]]:
    """(queues popped, queues pushed) by each stage. Raises ``TypeError`` where bodies and queues disagree."""
    pops = [[i["queue"] for i in stage.body if i.kind == "pop"] for stage in program.stages]
    pushes = [[i["queue"] for i in stage.body if i.kind == "push"] for stage in program.stages]
    for q, queue in enumerate(program.queues):
        if not queue.consumers:
            raise TypeError(f"queue {q} has no consumer")
        for s, stage in enumerate(program.stages):
            for what, found, named in (("pop", pops[s], s in queue.consumers), ("push", pushes[s], s == queue.producer)):
                if found.count(q) != named:
                    raise TypeError(
                        f"stage {s} ({stage.name}) has {found.count(q)} {what} of queue {q}; the queue says {int(named)}"
                    )
    for s, used in enumerate(zip(pops, pushes, strict=True)):
        for q in (*used[0], *used[1]):
            if not 0 <= q < len(program.queues):
                raise TypeError(f"stage {s} uses queue {q}; the program has {len(program.queues)}")
    return pops, pushes


@dataclasses.dataclass
class _Tile:
    """One tile in flight in one stage: global row numbers, and the values computed so far."""

    number: int
    rows: Array
    env: dict[int, Array]


class _Run:
    """One call: inputs, outputs, rings and accumulators. ``run`` drives it."""

    def __init__(self, program: TileProgram, arrays: Sequence[Any], widen: bool):
        self.program, self.widen = program, widen
        self.arrays = [self._input(k, t, a) for k, (t, a) in enumerate(zip(program.inputs, arrays, strict=True))]
        self.outputs = [np.zeros(t.shape, self._dtype(t.dtype)) for t in program.outputs]
        self.rings: list[dict[int, Array]] = [{} for _ in program.queues]
        self.sums: list[Array | None] = [None] * len(program.sinks)
        self.literals: dict[int, Scalar] = dict(program.literals)

    def run(self, schedule: Schedule, seed: int | None) -> list[Array]:
        rng = None if seed is None else random.Random(seed)
        while ready := schedule.ready():
            stage = ready[-1] if rng is None else rng.choice(ready)
            self._run_tile(stage, schedule.done[stage])
            schedule.fire(stage)
            self._drop_read(schedule)
        schedule.check_done()
        self._write_sinks()
        return self.outputs

    def _dtype(self, name: str) -> np.dtype[Any]:
        """The dtype to compute ``name`` in."""
        dtype = np.dtype(name)
        return np.dtype(np.float64) if self.widen and _is_float(dtype) else dtype

    def _input(self, k: int, t: ArrayType, array: Any) -> Array:
        a = np.asarray(array)
        wrong = a.dtype != np.dtype(t.dtype) and not (self.widen and _is_float(a.dtype) and _is_float(np.dtype(t.dtype)))
        if a.shape != t.shape or wrong:
            raise ValueError(f"input {k} is {a.dtype}{list(a.shape)}; the program takes {t.dtype}{list(t.shape)}")
        return np.ascontiguousarray(a, self._dtype(t.dtype)).reshape(t.shape)

    def _run_tile(self, s: int, number: int) -> None:
        program = self.program
        tile = _Tile(number, np.asarray(program.rows_of(number)), {})
        for instr in program.stages[s].body:
            inputs = [self._value(tile, v) for v in instr.inputs]
            results = _EXECUTE.get(instr.kind, _Run._op)(self, instr, tile, inputs)
            results = () if results is None else results if isinstance(results, tuple) else (results,)
            if len(results) != len(instr.outputs):
                raise TypeError(f"{instr.kind} in stage {s} gives {len(results)} values for {len(instr.outputs)} names")
            for v, result in zip(instr.outputs, results, strict=True):
                self._check(result, program.values[v], tile, f"{instr.kind} in stage {s} ({program.stages[s].name})")
                tile.env[v] = result

    def _value(self, tile: _Tile, v: int) -> Array:
        if v in tile.env:
            return tile.env[v]
        if v in self.literals:
            return np.asarray(self.literals[v], self._dtype(self.program.values[v].dtype))
        raise TypeError(f"value %{v} is read before it is defined")

    def _check(self, array: Array, t: TileType, tile: _Tile, who: str) -> None:
        shape = (len(tile.rows), *t.shape) if t.tile else t.shape
        if array.shape != shape or array.dtype != self._dtype(t.dtype):
            raise TypeError(
                f"{who} gives {array.dtype}{list(array.shape)} where the program says {self._dtype(t.dtype)}{list(shape)}"
            )

    def _offsets(self, t: ArrayType, tile: _Tile) -> Array:
        """Element offsets of the tile's elements in the flat array, shape (rows, *row shape)."""
        digits = np.unravel_index(tile.rows, self.program.axes) if self.program.axes else ()
        offsets = sum((d * s for d, s in zip(digits, t.row_strides, strict=True)), np.zeros_like(tile.rows))
        strides = dim_strides(t.shape)
        for d in t.dims:
            offsets = offsets[..., None] + np.arange(t.shape[d]) * strides[d]
        return offsets

    # -- instructions

    def _load(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> Array:
        k = instr["array"]
        t = self.program.inputs[k]
        return self.arrays[k].reshape(-1)[self._offsets(t, tile)] if t.streamed else self.arrays[k]

    def _store(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> None:
        k = instr["array"]
        t = self.program.outputs[k]
        if not t.streamed:
            self.outputs[k][...] = inputs[0]
            return
        shape = (len(tile.rows), *(t.shape[d] for d in t.dims))
        if inputs[0].shape != shape or inputs[0].dtype != self.outputs[k].dtype:
            raise TypeError(
                f"output {k} takes a tile {self.outputs[k].dtype}{list(shape)}, not {inputs[0].dtype}{list(inputs[0].shape)}"
            )
        self.outputs[k].reshape(-1)[self._offsets(t, tile)] = inputs[0]

    def _literal(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> Array:
        return np.asarray(instr["value"], self._dtype(self.program.values[instr.outputs[0]].dtype))

    def _row_index(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> Array:
        t = self.program.values[instr.outputs[0]]
        digits = np.unravel_index(tile.rows, self.program.axes)
        index = np.zeros_like(tile.rows)
        for axis in instr["axes"]:
            index = index * self.program.axes[axis] + digits[axis]
        index = index.reshape(-1, *(1,) * len(t.shape))
        return np.broadcast_to(index, (len(tile.rows), *t.shape)).astype(self._dtype(t.dtype))

    def _matmul(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> Array:
        x, w = (a.astype(self._dtype(instr["accumulate"])) for a in inputs)
        result = dot_general(x, w, instr["x_contract"], instr["w_contract"], instr["x_batch"], instr["w_batch"])
        return result.transpose(instr["out_perm"]).astype(self._dtype(self.program.values[instr.outputs[0]].dtype))

    def _sink(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> None:
        x = _wide(inputs[0])
        fold = _FOLD[instr.get("how", self.program.sinks[instr["sink"]].how)]
        part = np.asarray(fold.reduce(x, axis=tuple(instr["axes"]), dtype=x.dtype))  # type: ignore[attr-defined]
        self._fold(instr["sink"], fold, part)

    def _matmul_sink(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> None:
        x, y = (_wide(a) for a in inputs)
        part = dot_general(x, y, instr["x_contract"], instr["y_contract"], instr["x_batch"], instr["y_batch"])
        self._fold(instr["sink"], np.add, part)

    def _fold(self, k: int, fold: Callable[..., Array], part: Array) -> None:
        sink = self.program.sinks[k]
        if part.shape != sink.shape:
            raise TypeError(f"sink {k} takes {list(sink.shape)}, not {list(part.shape)}")
        before = self.sums[k]
        self.sums[k] = part if before is None else np.asarray(fold(before, part, dtype=part.dtype))

    def _push(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> None:
        q = instr["queue"]
        self._check(inputs[0], self.program.queues[q].tile, tile, f"push to queue {q}")
        self.rings[q][tile.number] = inputs[0]

    def _pop(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> Array:
        q = instr["queue"]
        self._check(self.rings[q][tile.number], self.program.queues[q].tile, tile, f"pop from queue {q}")
        return self.rings[q][tile.number]

    def _op(self, instr: Instr, tile: _Tile, inputs: list[Array]) -> Array | tuple[Array, ...]:
        params: Mapping[str, Any] = resolve_rows(dict(instr.params), len(tile.rows))
        dtype = self._dtype(self.program.values[instr.outputs[0]].dtype).name
        with np.errstate(all="ignore"):
            result = OPS[instr.kind].numpy(params, *inputs, out_dtype=dtype)
        return result if isinstance(result, tuple) else np.asarray(result)

    # -- rings and sinks

    def _drop_read(self, schedule: Schedule) -> None:
        """Entries that every consumer has read are gone, so that reading one twice is an error here as it is on a device."""
        for queue, ring in zip(self.program.queues, self.rings, strict=True):
            read = min(schedule.done[c] for c in queue.consumers)
            for number in [n for n in ring if n < read]:
                del ring[number]
            if len(ring) > queue.depth:
                raise TypeError(f"a ring of depth {queue.depth} holds {len(ring)} tiles")

    def _write_sinks(self) -> None:
        for sink, total in zip(self.program.sinks, self.sums, strict=True):
            if total is not None:
                out = self.outputs[sink.array]
                out[...] = total.astype(out.dtype)


_EXECUTE: dict[str, Callable[..., Any]] = {
    "load": _Run._load,
    "store": _Run._store,
    "literal": _Run._literal,
    "row_index": _Run._row_index,
    "matmul": _Run._matmul,
    "sink": _Run._sink,
    "matmul_sink": _Run._matmul_sink,
    "push": _Run._push,
    "pop": _Run._pop,
}


def dot_general(
    x: Array, w: Array, x_contract: Sequence[int], w_contract: Sequence[int], x_batch: Sequence[int], w_batch: Sequence[int]
) -> Array:
    """``lax.dot_general`` on NumPy arrays: dimensions of the result are batch, x's free, w's free. The dtype is the operands'.

    >>> dot_general(np.ones((2, 3)), np.ones((4, 3)), (1,), (1,), (), ()).shape
    (2, 4)
    """
    x_free = [d for d in range(x.ndim) if d not in x_contract and d not in x_batch]
    w_free = [d for d in range(w.ndim) if d not in w_contract and d not in w_batch]
    batch, contracted = [x.shape[d] for d in x_batch], math.prod(x.shape[d] for d in x_contract)
    m, n = [x.shape[d] for d in x_free], [w.shape[d] for d in w_free]
    left = x.transpose(*x_batch, *x_free, *x_contract).reshape(math.prod(batch), math.prod(m), contracted)
    right = w.transpose(*w_batch, *w_contract, *w_free).reshape(math.prod(batch), contracted, math.prod(n))
    product: Array = np.matmul(left, right)
    return product.reshape(*batch, *m, *n)


def _wide(a: Array) -> Array:
    return a.astype(np.float64) if _is_float(a.dtype) else a


def _is_float(dtype: np.dtype[Any]) -> bool:
    """bfloat16 and its like have NumPy kind "V"; the only other dtypes here are numbers and booleans."""
    return dtype.kind in "fV"
