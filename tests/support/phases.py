"""Calls of several phases written by hand: what one phase makes, the next one reads, in every way that a kernel can."""

from __future__ import annotations

import numpy as np

from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.build import assemble
from tests.support.programs import Array, Case
from tests.support.tiles import Tiles

ROW = ((0,), ())


def _normal(rng: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> Array:
    return np.asarray(rng.standard_normal(shape) * scale).astype(np_dtype(dtype))


def message_passing(edges: int = 301, nodes: int = 45, width: int = 32, dtype: str = "float32") -> Case:
    """A step of a graph network: edges read their senders and are summed by their receivers, in whose order they lie; nodes read
    the sums. Edges and nodes each pass a layer. Some senders are out of range and are clipped; some receivers are, and drop out."""
    t = Tiles((edges,), 64)
    e, table = t.load((edges, width), dtype, ROW), t.load((nodes, width), dtype)
    senders, receivers = (t.load((edges,), "int32", ((0,),)) for _ in range(2))
    h = t.op("add", t.matmul(e, t.load((width, width), dtype)), t.gather(table, senders))
    h = t.op("tanh", h)
    t.store(h, (edges, width), ROW)
    t.sink_at(h, receivers, "sum", nodes, "float32", ids_sorted=True)
    u = Tiles((nodes,), 64)
    x, summed = u.load((nodes, width), dtype, ROW), u.load((nodes, width), dtype, ROW)
    u.store(u.op("tanh", u.op("add", x, u.matmul(summed, u.load((width, width), dtype)))), (nodes, width), ROW)
    # operands: e, nodes, senders, receivers, w_edge, w_node; results: new edges, new nodes; between: the sums
    program = assemble([(0, t.program(), (0, 1, 2, 3, 4), (6, 8)), (1, u.program(), (1, 8, 5), (7,))], range(6), (6, 7))

    def operands(rng: np.random.Generator) -> list[Array]:
        senders, receivers = rng.integers(-2, nodes + 2, edges), np.sort(rng.integers(-2, nodes + 2, edges))
        receivers[receivers == 3] = 4  # a node without edges
        scale = width**-0.5
        arrays = [_normal(rng, dtype, edges, width), _normal(rng, dtype, nodes, width)]
        weights = [_normal(rng, dtype, width, width, scale=scale) for _ in range(2)]
        return [*arrays, senders.astype(np.int32), receivers.astype(np.int32), *weights]

    def reference(e: Array, x: Array, senders: Array, receivers: Array, w_edge: Array, w_node: Array) -> list[Array]:
        h = np.tanh(e @ w_edge + x[np.clip(senders, 0, nodes - 1)])
        summed, inside = np.zeros_like(x), (receivers >= 0) & (receivers < nodes)
        np.add.at(summed, receivers[inside], h[inside])
        return [h, np.tanh(x + summed @ w_node)]

    return Case(program, operands, reference)


def clipped(rows: int = 77, width: int = 27, dtype: str = "float32", copies: int = 3) -> Case:
    """Several arrays, each of which a phase makes, of which the next one takes the norm, and which the last one divides by it: the
    shape of an optimiser that clips by the global norm. Between: rows of a narrow pitch, which come in bulk, and numbers."""
    parts = []
    results, first = range(copies, 2 * copies), 2 * copies  # behind the operands; the arrays between come last
    for k in range(copies):
        t = Tiles((rows,), 64)
        t.store(t.op("tanh", t.load((rows, width), dtype, ROW)), (rows, width), ROW)
        parts.append((0, t.program(), (k,), (first + k,)))
    for k in reversed(range(copies)):  # so that other CTAs read an array than have written it
        u = Tiles((rows,), 64)
        x = u.load((rows, width), dtype, ROW)
        u.sink(u.op("mul", x, x), "sum", (0, 1))
        parts.append((1, u.program(), (first + k,), (first + copies + k,)))
    v = Tiles((), 1)
    norms = [v.load((), dtype, ()) for _ in range(copies)]
    total = norms[0]
    for x in norms[1:]:
        total = v.op("add", total, x)
    v.store(v.op("sqrt", total), (), ())
    parts.append((2, v.program(), tuple(first + copies + k for k in range(copies)), (first + 2 * copies,)))
    for k in range(copies):
        w = Tiles((rows, width), 64)
        x = w.load((rows, width), dtype, ((0,), (1,)))
        w.store(w.op("div", x, w.load((), dtype)), (rows, width), ((0,), (1,)))
        parts.append((3, w.program(), (first + k, first + 2 * copies), (results[k],)))
    program = assemble(parts, range(copies), results)

    def operands(rng: np.random.Generator) -> list[Array]:
        return [_normal(rng, dtype, rows, width) for _ in range(copies)]

    def reference(*xs: Array) -> list[Array]:
        made = [np.tanh(x) for x in xs]
        norm = np.sqrt(sum(float(np.sum(x * x)) for x in made))
        return [x / norm for x in made]

    return Case(program, operands, reference)


def recurrence(
    rows: int = 131, steps: int = 3, width: int = 32, dtype: str = "float32", reverse: bool = False, features: int = 9
) -> Case:
    """A loop in the middle: its inputs are projected by the phase before, which also says how much they count; the phases behind it
    read what it makes step by step, and update a weight by what it adds up."""
    streams, every = ((), (0,), ()), ((0,), (1,), ())
    t = Tiles((steps, rows), 64)
    z = t.matmul(t.load((steps, rows, features), dtype, every), t.load((features, width), dtype))
    t.store(z, (steps, rows, width), every)
    t.sink(z, "max", (0, 1))
    u = Tiles((rows,), 64)
    zs, path = u.input((steps, rows, width), dtype, streams), u.output((steps, rows, width), dtype, streams)
    most, w, first = u.load((), dtype), u.load((width, width), dtype), u.load((rows, width), dtype, ROW)
    with u.loop(steps, first, reverse=reverse) as loop:
        x = u.reshape(u.load_slice(zs, (loop.index, 0, 1, 1)), (width,))
        x = u.op("div", x, u.broadcast(most, (width,), ()))
        h = u.op("tanh", u.op("add", u.matmul(loop.carries[0], w), x))
        u.store_slice(u.reshape(h, (1, width)), path, (loop.index, 0, 1, 1))
        u.matmul_sink(x, h)
        loop.next(h)
    u.store(loop.results[0], (rows, width), ROW)
    v = Tiles((steps, rows), 64)
    v.store(v.matmul(v.load((steps, rows, width), dtype, every), v.load((width, 16), dtype)), (steps, rows, 16), every)
    s = Tiles((width, width), 64)
    both = ((0,), (1,))
    old, change = (s.load((width, width), kind, both) for kind in (dtype, "float32"))
    change = change if dtype == "float32" else s.op("convert_element_type", change, dtype=dtype, new_dtype=dtype)
    s.store(s.op("add", old, change), (width, width), both)
    # operands: xs, w_in, w, first, w_out; results: last, read out, updated; between: zs, most, path, the sum
    parts = [
        (0, t.program(), (0, 1), (8, 9)),
        (1, u.program(), (8, 9, 2, 3), (10, 11, 5)),
        (2, v.program(), (10, 4), (6,)),
        (2, s.program(), (2, 11), (7,)),
    ]
    program = assemble(parts, range(5), (5, 6, 7))

    def operands(rng: np.random.Generator) -> list[Array]:
        weights = [
            _normal(rng, dtype, *shape, scale=shape[0] ** -0.5) for shape in ((features, width), (width, width), (width, 16))
        ]
        xs, first = _normal(rng, dtype, steps, rows, features), _normal(rng, dtype, rows, width)
        return [xs, weights[0], weights[1], first, weights[2]]

    def reference(xs: Array, w_in: Array, w: Array, h: Array, w_out: Array) -> list[Array]:
        zs = xs @ w_in
        zs, path, total = zs / zs.max(), np.zeros((steps, rows, width)), np.zeros((width, width))
        for k in reversed(range(steps)) if reverse else range(steps):
            h = path[k] = np.tanh(h @ w + zs[k])
            total += zs[k].T @ h
        return [h, path @ w_out, w + total]

    return Case(program, operands, reference)
