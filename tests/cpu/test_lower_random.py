"""Random tile programs: the code generator's program in the simulator and in the executor equals the tile program's interpreter."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from kitsune_jax import _cpu
from kitsune_jax.targets.cpu.bytecode import encode
from kitsune_jax.targets.cpu.lower import lower_program
from reference.interpret import interpret
from tests.support.bytecode_sim import simulate
from tests.support.lowered import plain
from tests.support.tiles import Tiles

UNARY = ("neg", "abs", "sin", "tanh", "floor", "logistic")
BINARY = ("add", "sub", "mul", "max", "min")


class Random:
    """Draws one program. Values stay of order 1, so that a tolerance means the same everywhere."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        axes = tuple(int(n) for n in self.rng.integers(1, 6, self.rng.integers(1, 4)))
        self.t = Tiles(axes, int(self.rng.integers(1, 9)))
        self.dtype = str(self.rng.choice(["float32", "float64", "bfloat16", "float32"]))
        self.live: list[int] = []
        self.arrays: list[np.ndarray] = []

    def pick(self, *options: object) -> object:
        return options[self.rng.integers(len(options))]

    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.rng.integers(1, 5, self.rng.integers(0, 4)))

    def fresh(self, shape: tuple[int, ...]) -> None:
        self.arrays.append(self.rng.uniform(-1, 1, shape).astype(np.float64))

    def streamed(self, row: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """An array of row shape ``row``: the stream axes as one dimension, or as one each, in any order and place."""
        k = len(self.t.axes)
        groups = [tuple(range(k))] if self.rng.random() < 0.5 else [(int(a),) for a in self.rng.permutation(k)]
        dims: list[tuple[int, tuple[int, ...]]] = [(n, ()) for n in row]
        for g in groups:
            at = int(self.rng.integers(0, len(dims) + 1)) if self.rng.random() < 0.5 else groups.index(g)
            dims.insert(min(at, len(dims)), (math.prod(self.t.axes[a] for a in g), g))
        return tuple(n for n, _ in dims), tuple(g for _, g in dims)

    def load(self) -> int:
        shape, streams = self.streamed(self.shape())
        self.fresh(shape)
        return self.t.load(shape, self.dtype, streams)

    def stationary(self, shape: tuple[int, ...]) -> int:
        self.fresh(shape)
        return self.t.load(shape, self.dtype)

    def step(self) -> None:
        x = int(self.rng.choice(self.live))
        rank = len(self.t.values[x].shape)
        kinds = ["unary", "binary", "binary", "broadcast", "reshape", "convert", "select"]
        kinds += ["transpose", "rev", "slice", "concat", "reduce", "matmul", "matmul", "pad", "scan"] if rank else []
        value = getattr(self, f"_{self.pick(*kinds)}")(x, self.t.values[x].shape)
        if value is not None:
            self.live.append(value)

    def like(self, x: int) -> int:
        same = [v for v in self.live if self.t.values[v] == self.t.values[x]]
        choice = self.rng.integers(3)
        if choice == 0:
            return int(self.rng.choice(same))
        if choice == 1:
            return self.t.literal(float(self.rng.choice([0.0, 0.5, -2.0])), self.dtype)
        shape = self.t.values[x].shape
        return self.t.broadcast(self.stationary(shape[-1:]), shape, (len(shape),) if shape else ())

    def _unary(self, x: int, shape: tuple[int, ...]) -> int:
        return self.t.op(str(self.pick(*UNARY)), x)

    def _binary(self, x: int, shape: tuple[int, ...]) -> int:
        pair = [x, self.like(x)]
        if self.rng.random() < 0.5:
            pair.reverse()
        return self.t.op(str(self.pick(*BINARY)), *pair, shape=shape, dtype=self.dtype)

    def _select(self, x: int, shape: tuple[int, ...]) -> int:
        positive = self.t.op("gt", x, self.t.literal(0.25, self.dtype), dtype="bool")
        return self.t.op("select_n", positive, x, self.like(x), shape=shape, dtype=self.dtype)

    def _convert(self, x: int, shape: tuple[int, ...]) -> int:
        other = {"float32": "bfloat16", "float64": "int32", "bfloat16": "float32"}[self.dtype]
        y = self.t.op("convert_element_type", x, dtype=other, new_dtype=other)
        if other == "float32":
            y = self.t.op("mul", y, self.t.literal(0.75))
        return self.t.op("convert_element_type", y, dtype=self.dtype, new_dtype=self.dtype)

    def _broadcast(self, x: int, shape: tuple[int, ...]) -> int | None:
        if len(shape) > 3:
            return None
        at = int(self.rng.integers(0, len(shape) + 1))
        out = (*shape[:at], int(self.rng.integers(1, 4)), *shape[at:])
        return self.t.broadcast(x, out, (0, *(d + 1 + (d >= at) for d in range(len(shape)))))

    def _reshape(self, x: int, shape: tuple[int, ...]) -> int:
        new = {0: (1,), 1: (1, *shape)}.get(len(shape), (shape[0] * shape[1], *shape[2:]) if len(shape) > 1 else ())
        return self.t.reshape(x, new)

    def _transpose(self, x: int, shape: tuple[int, ...]) -> int:
        return self.t.transpose(x, (0, *(int(p) + 1 for p in self.rng.permutation(len(shape)))))

    def _rev(self, x: int, shape: tuple[int, ...]) -> int:
        return self.t.op("rev", x, dimensions=(int(self.rng.integers(len(shape))) + 1,))

    def _slice(self, x: int, shape: tuple[int, ...]) -> int:
        start = [int(self.rng.integers(n)) for n in shape]
        limit = [int(self.rng.integers(s + 1, n + 1)) for s, n in zip(start, shape, strict=True)]
        step = [int(self.rng.integers(1, 3)) for _ in shape]
        out = tuple(-(-(b - a) // s) for a, b, s in zip(start, limit, step, strict=True))
        return self.t.op("slice", x, shape=out, start=(0, *start), limit=(-1, *limit), strides=(1, *step))

    def _concat(self, x: int, shape: tuple[int, ...]) -> int:
        d = int(self.rng.integers(len(shape))) + 1
        fresh = self.t.op("sin", x) if self.rng.random() < 0.5 else x
        return self.t.concat(fresh, self._binary(x, shape), x, dimension=d)

    def _reduce(self, x: int, shape: tuple[int, ...]) -> int:
        axes = tuple(d + 1 for d in range(len(shape)) if self.rng.random() < 0.6) or (1,)
        return self.t.reduce(str(self.pick("max", "min")), x, axes)

    def _scan(self, x: int, shape: tuple[int, ...]) -> int:
        axis, reverse = int(self.rng.integers(len(shape))) + 1, bool(self.rng.integers(2))
        return self.t.op(str(self.pick("cummax", "cummin")), x, axis=axis, reverse=reverse)

    def _pad(self, x: int, shape: tuple[int, ...]) -> int:
        low, high, interior = ([int(n) for n in self.rng.integers(lo, 3, len(shape))] for lo in (-1, 0, 0))
        out = tuple(max(1, (n - 1) * (g + 1) + 1 + a + b) for n, a, b, g in zip(shape, low, high, interior, strict=True))
        high = [m - (n - 1) * (g + 1) - 1 - a for m, n, a, g in zip(out, shape, low, interior, strict=True)]
        fill = self.t.literal(0.5, self.dtype)
        return self.t.op("pad", x, fill, shape=out, low=(0, *low), high=(0, *high), interior=(0, *interior))

    def _matmul(self, x: int, shape: tuple[int, ...]) -> int:
        order = [int(d) + 1 for d in self.rng.permutation(len(shape))]
        contract = order[: int(self.rng.integers(1, len(shape) + 1))]
        batch = order[len(contract) :][: int(self.rng.integers(0, 2))]
        columns = tuple(int(n) for n in self.rng.integers(1, 5, self.rng.integers(0, 3)))
        sizes = [*((d, shape[d - 1]) for d in contract), *((d, shape[d - 1]) for d in batch), *((0, n) for n in columns)]
        places = [int(p) for p in self.rng.permutation(len(sizes))]
        w = self.stationary(tuple(sizes[p][1] for p in places))
        dims = (
            (tuple(contract), tuple(places.index(k) for k in range(len(contract)))),
            (tuple(batch), tuple(places.index(len(contract) + k) for k in range(len(batch)))),
        )
        rank = 1 + len(shape) - len(contract) + len(columns)
        rest = [k for k in range(rank) if k != len(batch)]
        perm = (len(batch), *(rest[int(p)] for p in self.rng.permutation(len(rest))))
        y = self.t.matmul(x, w, dims, perm=perm)
        y = self.t.op("mul", y, self.t.literal(0.25, self.dtype)) if self.rng.random() < 0.5 else y
        out = self.t.values[y].shape
        if out and self.rng.random() < 0.6:
            at = int(self.rng.integers(len(out)))
            y = self.t.op("add", y, self.t.broadcast(self.stationary((out[at],)), out, (at + 1,)))
        return self.t.op("max", y, self.t.literal(0.0, self.dtype)) if self.rng.random() < 0.5 else y

    def program(self) -> Tiles:
        self.live = [self.load() for _ in range(self.rng.integers(1, 3))]
        stages = int(self.rng.integers(1, 4))
        waiting: list[tuple[int, int]] = []  # (queue, stage that pops it)
        for s in range(stages):
            self.live += [self.t.pop(q) for q, stage in waiting if stage == s]
            for _ in range(int(self.rng.integers(2, 9))):
                self.step()
            for x in self.rng.choice(self.live, 3):
                if self.rng.random() < 0.7:
                    self.t.store(int(x), *self.streamed(self.t.values[int(x)].shape))
                if self.rng.random() < 0.3:
                    axes = tuple(d for d in range(1 + len(self.t.values[int(x)].shape)) if d == 0 or self.rng.random() < 0.5)
                    self.t.sink(int(x), str(self.pick("max", "min")), axes)
            if s + 1 < stages:
                for x in self.rng.choice(self.live, 2):
                    to = int(self.rng.integers(s + 1, stages))
                    waiting.append((self.t.queue(int(x), (to,)), to))
                self.t.stage()
                self.live = [self.load()]
        self.t.store(self.live[-1], *self.streamed(self.t.values[self.live[-1]].shape))
        return self.t


@pytest.mark.parametrize("seed", [*range(100), 808])
def test_random_program(seed: int) -> None:
    drawn = Random(seed)
    program = drawn.program().program()
    kind = np.dtype(ml_dtypes.bfloat16 if drawn.dtype == "bfloat16" else drawn.dtype)
    arrays = [a.astype(kind) for a in drawn.arrays]
    want = interpret(program, arrays)
    code = lower_program(program, "random")
    words = encode(code)
    assert _cpu.validate(words) == ""
    ran = [np.empty_like(w) for w in want]
    _cpu.run(words, [plain(a) for a in arrays], [plain(a) for a in ran], 2)
    # floor and int32 conversions turn a rounding difference into a whole step: a few elements may differ by one.
    for results in (simulate(code, arrays, [w.shape for w in want]), ran):
        for got, w in zip(results, want, strict=True):
            tolerance = {"float64": 1e-9, "float32": 1e-2}.get(str(w.dtype), 0.1)
            assert got.dtype == w.dtype
            wrong = ~np.isclose(got.astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance)
            assert wrong.mean() <= (0 if drawn.dtype == "float64" else 0.05), f"\n{program}"
