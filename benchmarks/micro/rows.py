"""python -m benchmarks.micro.rows: rows gathered, folded and multiplied on the CPU by hand-written tile programs, against jax.jit.

Every case is timed interleaved with ``jax.jit`` of the same function in one process; the table has medians and the paired speedup.
The order of a stream is computed inside of the timed call.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import interleaved, paired_speedup, summary
from kitsune_jax.program.ir import ArrayType, Instr, Program, SinkType, StageProgram, TileProgram, TileType
from kitsune_jax.targets.cpu import call as cpu_call
from kitsune_jax.targets.cpu import lower as cpu_lower
from kitsune_jax.targets.cpu.target import CPU
from reference.check import verify

Case = tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]  # name, of jax.jit, ours, arguments
TILE = 512


class Rows:
    """A tile program of one stage over ``rows`` rows, instruction by instruction."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.order: int | None = None
        self.inputs: list[ArrayType] = []
        self.outputs: list[ArrayType] = []
        self.values: list[TileType] = []
        self.body: list[Instr] = []
        self.sinks: list[SinkType] = []

    def _add(self, kind: str, inputs: Sequence[int], made: TileType | None, **params: Any) -> int:
        outputs = () if made is None else (len(self.values),)
        self.values += [] if made is None else [made]
        self.body.append(Instr(kind, tuple(inputs), outputs, tuple(params.items())))
        return len(self.values) - 1

    def array(self, shape: tuple[int, ...], dtype: str, streams: bool) -> ArrayType:
        if not streams:
            return ArrayType(shape, dtype, False)
        return ArrayType(shape, dtype, True, (int(np.prod(shape[1:])),), tuple(range(1, len(shape))))

    def load(self, shape: tuple[int, ...], dtype: str = "float32", *, streams: bool = True) -> int:
        self.inputs.append(self.array(shape, dtype, streams))
        return self._add("load", (), self.inputs[-1].loaded, array=len(self.inputs) - 1)

    def in_order(self) -> None:
        self.inputs.append(self.array((self.rows,), "int32", False))
        self.order = len(self.inputs) - 1

    def store(self, x: int) -> None:
        t = self.values[x]
        self.outputs.append(self.array((self.rows, *t.shape), t.dtype, True))
        self._add("store", (x,), None, array=len(self.outputs) - 1)

    def segments(self, x: int, ids: int, n: int, *, promised: bool) -> None:
        t = self.values[x]
        self.outputs.append(ArrayType((n, *t.shape), t.dtype, False))
        self.sinks.append(SinkType("sum", (n, *t.shape), t.dtype, len(self.outputs) - 1))
        self._add("sink_at", (x, ids), None, sink=len(self.sinks) - 1, sorted=promised)

    def gather(self, table: int, ids: int) -> int:
        t = self.values[table]
        return self._add("gather", (table, ids), TileType(True, t.shape[1:], t.dtype), mode="clip", fill=0)

    def concat(self, *xs: int) -> int:
        width = sum(self.values[x].shape[0] for x in xs)
        return self._add("concatenate", xs, TileType(True, (width,), "float32"), dimension=1)

    def dense(self, x: int, n: int) -> int:
        k = self.values[x].shape[0]
        w = self.load((k, n), streams=False)
        sides = {"x_contract": (1,), "x_batch": (), "w_contract": (0,), "w_batch": (), "out_perm": (0, 1)}
        return self._add("matmul", (x, w), TileType(True, (n,), "float32"), **sides, accumulate="float32")

    def apply(self, kind: str, x: int) -> int:
        return self._add(kind, (x,), self.values[x])

    def itself(self, x: int) -> int:
        m, _ = self.values[x].shape
        sides = {"x_contract": (2,), "y_contract": (2,), "x_batch": (), "y_batch": ()}
        return self._add("dot", (x, x), TileType(True, (m, m), "float32"), **sides, accumulate="float32")

    def call(self) -> Callable[..., list[Any]]:
        """The custom call of the program, a function of its inputs."""
        stage = StageProgram("rows", tuple(self.body))
        arrays = tuple(self.inputs), tuple(self.outputs), tuple(self.values), ()
        workers = os.cpu_count() or 1
        made = TileProgram((self.rows,), TILE, *arrays, (stage,), (), tuple(self.sinks), workers=workers, order=self.order)
        verify(made)
        words = cpu_lower.generate(Program.of(made), "rows")
        avals = [jax.ShapeDtypeStruct(a.shape, np.dtype(a.dtype)) for a in self.outputs]
        return lambda *args: cpu_call.call(words, args, avals)


def segment_sums(rng: np.random.Generator, scale: float) -> Iterator[Case]:
    rows, n = int(1e6 * scale), int(1e5 * scale)
    for width in (64, 8):
        for promised in (False, True):
            ids = rng.integers(0, n, rows, dtype=np.int32)
            t = Rows(rows)
            t.segments(t.load((rows, width)), t.load((rows,), "int32"), n, promised=True)
            if not promised:
                t.in_order()
            call = t.call()

            def ours(x: Any, ids: Any, call: Any = call, promised: bool = promised) -> Any:
                return call(x, ids)[0] if promised else call(x, ids, CPU.order(ids, n))[0]

            def theirs(x: Any, ids: Any, promised: bool = promised) -> Any:
                return jax.ops.segment_sum(x, ids, n, indices_are_sorted=promised)

            name = f"segment_sum {rows} x {width} into {n}, {'sorted' if promised else 'in an order'}"
            yield name, theirs, ours, (rng.random((rows, width), np.float32), np.sort(ids) if promised else ids)
        t = Rows(rows)
        t.segments(t.load((rows, width)), t.load((rows,), "int32"), n, promised=False)
        call = t.call()
        args = rng.random((rows, width), np.float32), rng.integers(0, n, rows, dtype=np.int32)
        name = f"segment_sum {rows} x {width} into {n}, tables of strands"
        yield name, lambda x, i: jax.ops.segment_sum(x, i, n), lambda x, i, call=call: call(x, i)[0], args


def gathers(rng: np.random.Generator, scale: float) -> Iterator[Case]:
    n = int(1e5 * scale)
    for width in (1, 2, 4, 8, 16, 64, 128, 512):
        rows = int((1e6 if width <= 64 else 2e5) * scale)
        t = Rows(rows)
        t.store(t.gather(t.load((n, width), streams=False), t.load((rows,), "int32")))
        call = t.call()
        args = rng.random((n, width), np.float32), rng.integers(0, n, rows, dtype=np.int32)
        name = f"gather {rows} rows of {width} from {n}"
        yield name, lambda x, i: jnp.take(x, i, axis=0, mode="clip"), lambda x, i, call=call: call(x, i)[0], args


def interaction(rng: np.random.Generator, scale: float) -> Iterator[Case]:
    rows = int(8192 * scale)
    t = Rows(rows)
    t.store(t.itself(t.load((rows, 27, 128))))
    call = t.call()
    args = (rng.random((rows, 27, 128), np.float32),)
    yield f"bif,bjf->bij of {rows} x 27 x 128", lambda x: jnp.einsum("bif,bjf->bij", x, x), lambda x: call(x)[0], args


def edges(rng: np.random.Generator, scale: float) -> Iterator[Case]:
    """A message-passing step of MeshGraphNets as far as its edges go: a new feature for each, and their sums by receiver."""
    nodes, rows, width = int(2e4 * scale), int(1.2e5 * scale), 128
    t = Rows(rows)
    e, senders, receivers = t.load((rows, width)), t.load((rows,), "int32"), t.load((rows,), "int32")
    table = t.load((nodes, width), streams=False)
    hidden = t.apply("tanh", t.dense(t.concat(e, t.gather(table, senders), t.gather(table, receivers)), width))
    made = t.dense(hidden, width)
    t.store(made)
    t.segments(made, receivers, nodes, promised=True)
    t.in_order()
    call = t.call()

    def theirs(e: Any, s: Any, r: Any, v: Any, w: Any, u: Any) -> Any:
        made = jnp.tanh(jnp.concatenate([e, v[s], v[r]], 1) @ w) @ u
        return [made, jax.ops.segment_sum(made, r, nodes)]

    def ours(e: Any, s: Any, r: Any, v: Any, w: Any, u: Any) -> Any:
        return call(e, s, r, v, w, u, CPU.order(r, nodes))

    ids = [rng.integers(0, nodes, rows, dtype=np.int32) for _ in range(2)]
    shapes = (nodes, width), (3 * width, width), (width, width)
    dense = [rng.standard_normal(shape, np.float32) / 16 for shape in shapes]
    yield f"edges of MeshGraphNets, {rows} x {width}", theirs, ours, (rng.random((rows, width), np.float32), *ids, *dense)


def measured(name: str, theirs: Callable[..., Any], ours: Callable[..., Any], arrays: Sequence[Any], rounds: int) -> str:
    """A line of the table."""
    a, b = jax.jit(theirs), jax.jit(ours)
    want, got = (jax.tree.leaves(f(*arrays)) for f in (a, b))
    error = max(float(jnp.abs(x - y).max() / jnp.abs(x).max()) for x, y in zip(want, got, strict=True))
    times = interleaved({"jit": lambda: a(*arrays), "ours": lambda: b(*arrays)}, rounds=rounds, seconds=20)
    jit, mine = summary(times["jit"]), summary(times["ours"])
    speedup = paired_speedup(times["jit"], times["ours"])["median"]
    medians = f"{1e3 * jit['median']:.2f} | {1e3 * mine['median']:.2f} | {1e3 * jit['min']:.2f}, {1e3 * mine['min']:.2f}"
    return f"| {name} | {medians} | {speedup:.2f} | {error:.1e} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.rows", description="Rows by index on the CPU.")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes; below 1 it is a test that it runs")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args(argv)
    if not cpu_call.available():
        print(cpu_call.why_not())
        return 2
    rng = np.random.default_rng(0)
    print("| case | `jax.jit` ms | ours ms | fastest, both | speedup | difference |\n|---|---|---|---|---|---|")
    for make in (segment_sums, gathers, interaction, edges):
        for name, theirs, ours, operands in make(rng, args.scale):
            print(measured(name, theirs, ours, [jnp.asarray(a) for a in operands], args.rounds), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
