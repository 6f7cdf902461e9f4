"""The NumPy interpreter of tile programs: the results of every target are compared with its results.

Comes in: a ``Program`` and its operands. Goes out: its results, or ``Deadlock`` with the queue that each stage waits for. Tiles
travel through *bounded* queues, and stages fire in a random order drawn from a seed, so a program that can deadlock does. The
interpreter checks that every value has the shape and dtype of its type, and that stages push and pop exactly the queues that name
them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" and the 8-bit floats NumPy dtypes)
import numpy as np

from kitsune_jax.ops.graph import Scalar
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import resolve_rows
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import ArrayType, Instr, LoopBody, Program, SinkType, TileProgram, TileType
from kitsune_jax.program.loop_bounds import tile_iterations
from reference.check import Schedule
from reference.operators import FOLDS, MEANINGS

# --- instructions -----------------------------------------------------------------------------------------------------------------
Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass
class Tile:
    """One tile in flight in one stage: its number, the elements of its rows, and the values computed so far."""

    number: int
    rows: Array
    env: dict[int, Array] = dataclasses.field(default_factory=dict)


class State:
    """The arrays, queue rings and accumulators of a call, which outlive a tile. ``widen``: floats are computed as float64."""

    def __init__(self, program: TileProgram, arrays: Sequence[Any], widen: bool):
        self.program, self.widen = program, widen
        self.inputs = [self._input(k, t, a) for k, (t, a) in enumerate(zip(program.inputs, arrays, strict=True))]
        self.outputs = [np.zeros(t.shape, self.dtype(t.dtype)) for t in program.outputs]
        self.rings: list[dict[int, Array]] = [{} for _ in program.queues]
        self.sums = [self._identity(s) for s in program.sinks]
        self.last = [-1] * len(program.sinks)  # of sinks with sorted indices: the last index folded in
        self.tops: dict[int, Array] = {}  # of scaled sinks: the largest scores that their sums are scaled by; -inf without rows
        self.spoiled: dict[int, Array] = {}  # of scaled sinks: sums that are NaN, because their largest score is not finite
        self.literals: dict[int, Scalar] = dict(program.literals)
        self.order = None if program.order is None else self.inputs[program.order]
        if self.order is not None and not np.array_equal(np.sort(self.order), np.arange(program.rows)):
            raise ValueError("the order of the stream is no permutation of its rows")

    def _identity(self, s: SinkType) -> Array:
        """The initial accumulators of a sink; one for each batch if it has several."""
        wide = _wide(np.dtype(s.dtype))
        batches = (self.program.batches,) if self.program.outputs[s.array].row_strides else ()
        return np.full((*batches, *s.shape), identity(s.how, wide), wide)

    def finish(self) -> None:
        """Write the accumulators to the outputs."""
        for k, spoiled in self.spoiled.items():
            self.sums[k][spoiled] = math.nan
        for sink, total in zip(self.program.sinks, self.sums, strict=True):
            t, out = self.program.outputs[sink.array], self.outputs[sink.array]
            if not t.row_strides:
                out[...] = total.astype(out.dtype)
                continue
            rows = self.program.rows // max(1, self.program.batches)
            for b, part in enumerate(total):
                out.reshape(-1)[self.offsets(t, Tile(0, np.asarray([b * rows])), {})] = part.astype(out.dtype)

    def rows_of(self, tile: int) -> Array:
        """The elements of streamed arrays that are the rows of tile number ``tile``."""
        rows = self.program.rows_of(tile)
        return np.asarray(rows) if self.order is None else self.order[rows.start : rows.stop].astype(np.int64)

    def _input(self, k: int, t: ArrayType, array: Any) -> Array:
        a = np.asarray(array)
        wrong = a.dtype != np.dtype(t.dtype) and not (self.widen and _is_float(a.dtype) and _is_float(np.dtype(t.dtype)))
        if a.shape != t.shape or wrong:
            raise ValueError(f"input {k} is {a.dtype}{list(a.shape)}; the program takes {t.dtype}{list(t.shape)}")
        return np.ascontiguousarray(a, self.dtype(t.dtype)).reshape(t.shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype to compute ``name`` in."""
        return _wide(np.dtype(name)) if self.widen else np.dtype(name)

    def run(self, body: Sequence[Instr], tile: Tile, where: str) -> None:
        """Run every instruction of ``body`` on ``tile``. Raises ``TypeError`` if a value does not have its declared type."""
        for instr in body:
            inputs = [self.value(tile, v) for v in instr.inputs]
            results = _EXECUTE.get(instr.kind, _table_op)(self, instr, tile, inputs)
            results = () if results is None else results if isinstance(results, tuple) else (results,)
            if len(results) != len(instr.outputs):
                raise TypeError(f"{instr.kind} in {where} gives {len(results)} values for {len(instr.outputs)} names")
            for v, result in zip(instr.outputs, results, strict=True):
                self.check(result, self.program.values[v], tile, f"{instr.kind} in {where}")
                tile.env[v] = result

    def value(self, tile: Tile, v: int) -> Array:
        if v in tile.env:
            return tile.env[v]
        if v in self.literals:
            return np.asarray(self.literals[v], self.dtype(self.program.values[v].dtype))
        raise TypeError(f"value %{v} is read before it is defined")

    def check(self, array: Array, t: TileType, tile: Tile, who: str) -> None:
        shape, dtype = (len(tile.rows), *t.shape) if t.tile else t.shape, self.dtype(t.dtype)
        if array.shape != shape or array.dtype != dtype:
            raise TypeError(f"{who} gives {array.dtype}{list(array.shape)} where the program declares {dtype}{list(shape)}")

    def made(self, instr: Instr) -> np.dtype[Any]:
        """The dtype of the instruction's result."""
        return self.dtype(self.program.values[instr.outputs[0]].dtype)

    def offsets(self, t: ArrayType, tile: Tile, cuts: Mapping[int, range]) -> Array:
        """The places of the tile's elements in the flat array, of dimension d only ``cuts[d]``; in the value's shape."""
        offsets = np.zeros((), np.int64)
        if t.row_strides:
            rows = tile.rows if t.streamed else tile.rows[0]
            offsets = sum((d * s for d, s in zip(np.unravel_index(rows, self.program.axes), t.row_strides, strict=True)), 0 * rows)
        elif t.streamed:  # a stream of one row
            offsets = 0 * tile.rows
        strides = dim_strides(t.shape)
        for d in t.kept:
            cut = cuts.get(d, range(t.shape[d]))
            if cut and not (cut[0] >= 0 and cut[-1] < t.shape[d]):
                raise TypeError(f"elements {cut[0]} to {cut[-1]} of dimension {d} of {t.dtype}{list(t.shape)} do not exist")
            offsets = np.asarray(offsets)[..., None] + np.asarray(cut, np.int64) * strides[d]
        return np.asarray(offsets)


def _cuts(instr: Instr, numbers: Sequence[Array]) -> dict[int, range]:
    starts = [int(i) * step for i, step in zip(numbers, instr["steps"], strict=True)]
    return {d: range(start, start + size) for d, start, size in zip(instr["dims"], starts, instr["sizes"], strict=True)}


def _load(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    t = state.program.inputs[instr["array"]]
    cuts = _cuts(instr, inputs) if instr.kind == "load_slice" else {}
    return state.inputs[instr["array"]].reshape(-1)[state.offsets(t, tile, cuts)]


def _store(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> None:
    k = instr["array"]
    t = state.program.outputs[k]
    offsets = state.offsets(t, tile, _cuts(instr, inputs[1:]) if instr.kind == "store_slice" else {})
    if inputs[0].shape != offsets.shape or inputs[0].dtype != state.outputs[k].dtype:
        kind, got = state.outputs[k].dtype, inputs[0]
        raise TypeError(f"output {k} takes a tile {kind}{list(offsets.shape)}, not {got.dtype}{list(got.shape)}")
    state.outputs[k].reshape(-1)[offsets] = inputs[0]


def _row_index(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    shape = state.program.values[instr.outputs[0]].shape
    digits = np.unravel_index(tile.rows, state.program.axes)
    index = np.zeros_like(tile.rows)
    for axis in instr["axes"]:
        index = index * state.program.axes[axis] + digits[axis]
    return np.broadcast_to(index.reshape(-1, *(1,) * len(shape)), (len(tile.rows), *shape)).astype(state.made(instr))


def _matmul(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    x, w, *bias = (a.astype(state.dtype(instr["accumulate"])) for a in inputs)
    perm = instr["out_perm"]
    result = dot_general(x, w, instr["x_contract"], instr["w_contract"], instr["x_batch"], instr["w_batch"]).transpose(perm)
    if bias:
        columns = bias[0].ndim
        result = result + bias[0].reshape([n if p >= len(perm) - columns else 1 for n, p in zip(result.shape, perm, strict=True)])
    name, parameters = instr.get("activation", "none"), instr.get("parameters", ())
    with np.errstate(all="ignore"):
        return np.asarray(_ACTIVATIONS[name](result, *parameters)).astype(state.made(instr))


def _dot(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    x, y = (a.astype(state.dtype(instr["accumulate"])) for a in inputs)
    batch = (0, *instr["x_batch"]), (0, *instr["y_batch"])
    return dot_general(x, y, instr["x_contract"], instr["y_contract"], *batch).astype(state.made(instr))


def _take(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    """``take`` selects along the axis ``axis`` of every row, ``gather`` rows of a table."""
    (x, index), axis = inputs, instr.get("axis", 0)
    n = x.shape[axis]
    if instr["mode"] == "promise_in_bounds" and index.size and not (index.min() >= 0 and index.max() < n):
        raise ValueError(f"{instr.kind} was promised indices below {n}, not {index.min()} to {index.max()}")
    params = {"axis": axis, "mode": instr["mode"], "fill": instr.get("fill")}
    return np.asarray(MEANINGS["take"].numpy(params, x, index, out_dtype=state.made(instr).name))


def _put(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    params = {"axis": instr["axis"], "n": instr["n"]}
    return np.asarray(MEANINGS["scatter_sum"].numpy(params, *inputs, out_dtype=state.made(instr).name))


def _loop(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> tuple[Array, ...]:
    block, carries = instr.block, tuple(inputs)
    assert isinstance(block, LoopBody)
    numbers = tile_iterations(state.program, instr, tile.rows, lambda k: int(state.inputs[k].item()))
    for i in reversed(numbers) if instr.get("reverse") else numbers:
        tile.env |= {block.index: np.asarray(i, np.int32), **dict(zip(block.carries, carries, strict=True))}
        state.run(block.body, tile, "a loop")
        carries = tuple(state.value(tile, v) for v in block.results)
    return carries


def _cut(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    x, number = inputs
    return np.asarray(x[_part(state, instr, number)])


def _paste(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    x, part, number = inputs
    found = x.copy()
    found[_part(state, instr, number)] = part
    return found


def _part(state: State, instr: Instr, number: Array) -> tuple[slice | int, ...]:
    return (slice(None), int(number)) if state.program.values[instr.inputs[0]].tile else (int(number),)


def _empty(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    """Numbers that spoil every value computed from them."""
    t = state.program.values[instr.outputs[0]]
    shape, dtype = (len(tile.rows), *t.shape) if t.tile else t.shape, state.made(instr)
    return np.full(shape, np.nan if _is_float(dtype) else True, dtype)


def _sink(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> None:
    fold, x = FOLDS[state.program.sinks[instr["sink"]].how], _widened(inputs[0])
    _fold(state, instr, tile, inputs[1:], np.asarray(fold.reduce(x, axis=tuple(instr["axes"]), dtype=x.dtype)))


def _matmul_sink(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> None:
    x, y = (a.astype(state.sums[instr["sink"]].dtype) for a in inputs[:2])
    dims = instr["x_contract"], instr["y_contract"], instr["x_batch"], instr["y_batch"]
    _fold(state, instr, tile, inputs[2:], dot_general(x, y, *dims))


def _fold(state: State, instr: Instr, tile: Tile, numbers: Sequence[Array], part: Array) -> None:
    """Fold ``part`` into the accumulator of the tile's batch, or into the slice of it that ``numbers`` select."""
    k = instr["sink"]
    total, sink = state.sums[k], state.program.sinks[k]
    if state.program.outputs[sink.array].row_strides:
        total = total[int(tile.rows[0]) * state.program.batches // state.program.rows, ...]
    if numbers:
        cuts = _cuts(instr, numbers)
        total = total[tuple(slice(cuts[d].start, cuts[d].stop) if d in cuts else slice(None) for d in range(total.ndim))]
    if part.shape != total.shape:
        raise TypeError(f"sink {k} takes {list(total.shape)}, not {list(part.shape)}")
    FOLDS[sink.how](total, part.astype(total.dtype), out=total)


def _sink_at(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> None:
    total = state.sums[instr["sink"]]
    index = inputs[1].astype(np.int64).reshape(-1)
    rows = _widened(inputs[0]).reshape(len(index), *total.shape[1:]).astype(total.dtype)
    inside = (index >= 0) & (index < len(total))
    if instr["sorted"]:
        seen = [state.last[instr["sink"]], *index[inside].tolist()]
        if any(a > b for a, b in itertools.pairwise(seen)):
            raise ValueError(f"sink {instr['sink']} was promised indices that never decrease")
        state.last[instr["sink"]] = seen[-1]
    if len(inputs) > 2:
        _add_scaled(state, instr, index[inside], rows[inside], _widened(inputs[2])[inside])
        return
    FOLDS[state.program.sinks[instr["sink"]].how].at(total, index[inside], rows[inside])


def _add_scaled(state: State, instr: Instr, index: Array, rows: Array, tops: Array) -> None:
    """Add rows that were scaled by e^-top, one top for each index of their first dimensions, to the sums of their indices."""
    k = instr["sink"]
    total = state.sums[k]
    known = state.tops.setdefault(k, np.full((len(total), *tops.shape[1:]), -np.inf))
    spoiled = state.spoiled.setdefault(k, np.zeros(known.shape, bool))
    behind = (1,) * (total.ndim - known.ndim)
    with np.errstate(all="ignore"):
        for i in np.unique(index):
            mine = index == i
            top = tops[mine][0]
            if not np.array_equal(tops[mine], np.broadcast_to(top, tops[mine].shape), equal_nan=True):
                raise ValueError(f"sink {k}: the rows of a run were scaled by several tops")
            to = np.maximum(known[i], top)

            def scaled(part: Array, at: Array, to: Array = to) -> Array:
                same = (at == to) | (at == -np.inf) | np.isnan(to)
                by = np.where(same, 1.0, np.exp(np.where(np.isfinite(at), at, 0) - np.where(np.isfinite(to), to, 0)))
                return part * by.reshape((*by.shape, *behind))

            total[i] = scaled(total[i], known[i]) + scaled(rows[mine].sum(0), top)
            known[i] = to
            spoiled[i] = ~np.isfinite(to) & (not instr["finite"])


def _run_max(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    x, index = inputs[0], inputs[1].astype(np.int64)
    starts = np.flatnonzero(np.r_[True, index[1:] != index[:-1]])
    largest = np.maximum.reduceat(_widened(x), starts, axis=0)
    return np.repeat(largest, np.diff(np.r_[starts, len(index)]), axis=0).astype(x.dtype)


def _push(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> None:
    q = instr["queue"]
    state.check(inputs[0], state.program.queues[q].tile, tile, f"push to queue {q}")
    state.rings[q][tile.number] = inputs[0]


def _pop(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array:
    q = instr["queue"]
    state.check(state.rings[q][tile.number], state.program.queues[q].tile, tile, f"pop from queue {q}")
    return state.rings[q][tile.number]


def _table_op(state: State, instr: Instr, tile: Tile, inputs: list[Array]) -> Array | tuple[Array, ...]:
    params: Mapping[str, Any] = resolve_rows(dict(instr.params), len(tile.rows))
    with np.errstate(all="ignore"):
        result = MEANINGS[instr.kind].numpy(params, *inputs, out_dtype=state.made(instr).name)
    return result if isinstance(result, tuple) else np.asarray(result)


_EXECUTE: dict[str, Callable[[State, Instr, Tile, list[Array]], Any]] = {
    "load": _load,
    "load_slice": _load,
    "store": _store,
    "store_slice": _store,
    "row_index": _row_index,
    "matmul": _matmul,
    "dot": _dot,
    "gather": _take,
    "take": _take,
    "put": _put,
    "run_max": _run_max,
    "loop": _loop,
    "cut": _cut,
    "paste": _paste,
    "empty": _empty,
    "sink": _sink,
    "matmul_sink": _matmul_sink,
    "sink_at": _sink_at,
    "push": _push,
    "pop": _pop,
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


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


_ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x, a: np.where(x > 0, x, a * x),
    "elu": lambda x, a: np.where(x > 0, x, a * np.expm1(x)),
    "logistic": _logistic,
    "tanh": np.tanh,
    "silu": lambda x, a: x * _logistic(a * x),
    "gelu_tanh": lambda x, a, b: x * _logistic(a * x + b * x**3),
    "gelu_erf": lambda x, a: 0.5 * x * (1 + MEANINGS["erf"].numpy({}, a * x, out_dtype=x.dtype.name)),
    "scale": lambda x, a: a * x,
}


def _widened(a: Array) -> Array:
    return a.astype(_wide(a.dtype))


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64) if _is_float(dtype) else dtype


def _is_float(dtype: np.dtype[Any]) -> bool:
    """bfloat16 and the 8-bit floats have NumPy kind "V"; the only other dtypes here are numbers and booleans."""
    return dtype.kind in "fV"


# --- the interpreter --------------------------------------------------------------------------------------------------------------


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
    for before it fires, like a stage that prefetches. Sinks of floats accumulate in float64.

    Raises ``Deadlock``, ``ValueError`` for arrays that do not fit the program, ``TypeError`` for a program that breaks its own
    types.

    Example (``program`` doubles its one input): ``interpret(program, [x])[0]`` equals ``2 * x``.
    """
    call = Program.of(program) if isinstance(program, TileProgram) else program
    if len(arrays) != call.operands:
        raise ValueError(f"the program takes {call.operands} arrays, not {len(arrays)}")
    known = dict(enumerate(arrays))
    for part in call.parts:
        state = State(part.program, [known[k] for k in part.reads], widen)
        _run(state, Schedule(part.program, lookahead=lookahead), schedule_seed)
        known.update(zip(part.writes, state.outputs, strict=True))
    return [known[call.operands + k] for k in range(call.results)]


def _run(state: State, schedule: Schedule, seed: int | None) -> None:
    program, rng = state.program, None if seed is None else random.Random(seed)
    while ready := schedule.ready():
        stage = ready[-1] if rng is None else rng.choice(ready)
        number = schedule.done[stage]
        state.run(program.stages[stage].body, Tile(number, state.rows_of(number)), schedule.name(stage))
        schedule.fire(stage)
        _drop_read(state, schedule)
    schedule.check_done()
    state.finish()


def _drop_read(state: State, schedule: Schedule) -> None:
    """Drop entries that every consumer has read, so that reading one twice is an error here as it is on a device."""
    for queue, ring in zip(state.program.queues, state.rings, strict=True):
        read = min(schedule.done[c] for c in queue.consumers)
        for number in [n for n in ring if n < read]:
            del ring[number]
        if len(ring) > queue.depth:
            raise TypeError(f"a ring of depth {queue.depth} holds {len(ring)} tiles")
