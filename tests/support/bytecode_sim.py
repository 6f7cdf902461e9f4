"""A slow, exact simulator of the CPU program format: NumPy, tile by tile, every access checked.

Comes in: a ``bytecode.CpuProgram`` and the input arrays. Goes out: the output arrays. It follows the comments of
``kitsune_jax/targets/cpu/bytecode.py``, for programs without loops, batches and products of two tiles (those are held against the
interpreter of tile programs in ``tests/cpu/test_structured.py``). It shares no code with the code generator or the C++ executor, so
that either can be held against it. Scratch and queue slots hold a poison pattern (0xFF bytes: NaN as floats, -1 as integers) until
they are written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.ops.table import OPS
from kitsune_jax.targets.cpu import bytecode as bc
from reference.operators import FOLDS, MEANINGS
from tests.support.online_sim import OnlineSums

POISON = 0xFF


def dtype_of(code: int) -> np.dtype:
    name = bc.DTYPES[code]
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class Fault(IndexError):
    """An access outside its memory, or of memory the stage may not touch."""


def simulate(program: bc.CpuProgram, inputs: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Run ``program``; outputs have ``shapes``."""
    return _Machine(program, inputs).run(shapes)


class _Machine(OnlineSums):
    def __init__(self, program: bc.CpuProgram, inputs: Sequence[np.ndarray]):
        self.p = program
        self.rows = math.prod(program.axes)
        self.inputs = []
        for array, spec in zip(inputs, program.inputs, strict=True):
            flat = np.ascontiguousarray(array).reshape(-1)
            assert flat.dtype == dtype_of(spec.dtype) and flat.size == spec.elements, (flat.dtype, flat.size, spec)
            self.inputs.append(flat)
        self.outputs = [self._poisoned(a.elements, dtype_of(a.dtype)) for a in program.outputs]
        self.written = [np.zeros(a.elements, bool) for a in program.outputs]
        self.slots = [[np.full(q.entry_bytes, POISON, np.uint8) for _ in range(q.depth)] for q in program.queues]
        self.preps = [self._prepare(prep) for prep in program.preps]
        self.sinks: list[np.ndarray | None] = [None] * len(program.sinks)
        self.last: dict[int, int] = {}  # the last index that a sink was fed with
        self.tops = {}

    @staticmethod
    def _poisoned(n: int, dtype: np.dtype) -> np.ndarray:
        return np.full(n * dtype.itemsize, POISON, np.uint8).view(dtype)

    def run(self, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        for tile in range(-(-self.rows // self.p.tile_rows)):
            for s in self._topological():
                self._stage(s, tile)
        for k, sink in enumerate(self.p.sinks):
            value = self.sinks[k]
            assert value is not None, "a sink that nothing was folded into"
            if k in self.tops:
                value.reshape(*self.tops[k][1].shape, -1)[self.tops[k][1]] = np.nan
            self.outputs[sink.out][:] = value.astype(dtype_of(self.p.outputs[sink.out].dtype))
            self.written[sink.out][:] = True
        for k, done in enumerate(self.written):
            assert done.all(), f"output {k}: {np.count_nonzero(~done)} elements were never written"
        return [out.reshape(shape) for out, shape in zip(self.outputs, shapes, strict=True)]

    def _topological(self) -> list[int]:
        order: list[int] = []
        todo = set(range(len(self.p.stages)))
        while todo:
            free = [s for s in todo if all(q.producer not in todo for q in self.p.queues if s in q.consumers)]
            assert free, "the queues form a cycle"
            order += sorted(free)
            todo -= set(free)
        return order

    def _prepare(self, prep: bc.Prep) -> np.ndarray:
        assert prep.source.space == bc.IN
        groups = [(prep.b_extents, prep.b_strides), (prep.k_extents, prep.k_strides), (prep.n_extents, prep.n_strides)]
        index = prep.source.offset + _grid(sum((e for e, _ in groups), ()), sum((s for _, s in groups), ()))
        flat = _take(self.inputs[prep.source.index], index, "prep")
        b, k, n = (math.prod(e) for e, _ in groups)
        if prep.kind == bc.DENSE:
            assert not prep.b_extents and not prep.k_extents
            return flat.reshape(n).astype(dtype_of(prep.dtype))
        return flat.reshape(b, k, n).astype(dtype_of(prep.dtype))

    # One stage on one tile.

    def _stage(self, s: int, tile: int) -> None:
        stage = self.p.stages[s]
        self.s, self.tile, self.row0 = s, tile, tile * self.p.tile_rows
        self.n = min(self.p.tile_rows, self.rows - self.row0)
        self.scratch = np.full(stage.scratch_bytes, POISON, np.uint8)
        self._body(stage.body)

    def _body(self, body: Sequence[bc.Instruction]) -> None:
        for instruction in body:
            name = type(instruction).__name__.removeprefix("Cpu").lower()
            getattr(self, f"_{name}")(instruction)

    def _stationary(self, x: bc.CpuStationary) -> None:
        rows, self.n = self.n, 1
        self._body(x.body)
        self.n = rows

    def _memory(self, ref: bc.CpuRef, write: bool) -> np.ndarray:
        dtype = dtype_of(ref.dtype)
        if ref.space in (bc.IN, bc.PREP) and write:
            raise Fault("a write to read-only memory")
        if ref.space == bc.QUEUE:
            ring = self.p.queues[ref.index]
            if ring.producer != self.s and (write or self.s not in ring.consumers):
                raise Fault(f"stage {self.s} touches queue {ref.index}")
        flat = {
            bc.IN: lambda: self.inputs[ref.index],
            bc.OUT: lambda: self.outputs[ref.index],
            bc.SCRATCH: lambda: self.scratch[: self.scratch.size // dtype.itemsize * dtype.itemsize].view(dtype),
            bc.QUEUE: lambda: self.slots[ref.index][self.tile % self.p.queues[ref.index].depth].view(dtype),
            bc.PREP: lambda: self.preps[ref.index],
        }[ref.space]()
        assert flat.dtype == dtype, f"memory of {flat.dtype} taken as {dtype}"
        return flat

    def _index(self, x: bc.CpuOperand, extents: tuple[int, ...], multiple: int = 1) -> np.ndarray:
        first = self.row0 * multiple if x.ref.space in (bc.IN, bc.OUT) else 0
        return x.ref.offset + first * x.row_stride + _grid((self.n * multiple, *extents), (x.row_stride, *x.strides))

    def _read(self, x: bc.CpuOperand, extents: tuple[int, ...], multiple: int = 1) -> np.ndarray:
        index = self._index(x, extents, multiple)
        if x.ref.space == bc.OUT and not self.written[x.ref.index][index].all():
            raise Fault("an output is read before it is written")
        return _take(self._memory(x.ref, False), index, f"space {x.ref.space}")

    def _write(self, x: bc.CpuOperand, extents: tuple[int, ...], value: np.ndarray, multiple: int = 1) -> None:
        self._set(x.ref, self._index(x, extents, multiple), value)

    def _set(self, ref: bc.CpuRef, index: np.ndarray, value: np.ndarray) -> None:
        memory = self._memory(ref, True)
        if index.min() < 0 or index.max() >= memory.size:
            raise Fault(f"write of {index.min()}..{index.max()} in memory of {memory.size}")
        if len(np.unique(index)) != index.size:
            raise Fault("an instruction writes an element twice")
        with np.errstate(all="ignore"):
            memory[index] = value.astype(memory.dtype)
        if ref.space == bc.OUT:
            self.written[ref.index][index] = True

    def _elements(self) -> np.ndarray:
        """The elements of streamed arrays that the rows of the tile are."""
        rows = np.arange(self.row0, self.row0 + self.n)
        return rows if self.p.order < 0 else self.inputs[self.p.order][rows].astype(np.int64)

    def _border(self, x: bc.StridedLoad | bc.StridedStore) -> np.ndarray:
        row = self._elements()
        at = np.zeros_like(row)
        for size, stride in zip(reversed(self.p.axes), reversed(x.axis_strides), strict=True):
            at += row % size * stride
            row //= size
        return x.array.offset + at.reshape(-1, *[1] * len(x.extents)) + _grid(x.extents, x.array_strides)

    def _stridedload(self, x: bc.StridedLoad) -> None:
        self._write(x.tile, x.extents, _take(self.inputs[x.array.index], self._border(x), "strided load"))

    def _stridedstore(self, x: bc.StridedStore) -> None:
        assert x.array.space == bc.OUT
        self._set(x.array, self._border(x), self._read(x.tile, x.extents))

    def _matmul(self, x: bc.Matmul) -> None:
        w = self.preps[x.weight]
        assert w.ndim == 3 and w.shape[0] == x.batch
        wide = np.float64 if w.dtype == np.float64 else np.float32
        rows = bc.CpuOperand(x.x.ref, x.x.row_stride, (*x.x.strides, 1))
        a = self._read(rows, (x.batch, w.shape[1]), x.row_multiple).astype(wide)
        assert np.all(np.isin([x.x.ref.dtype, x.out.ref.dtype], [9, 10, 11, 12]))
        y = np.einsum("mbk,bkn->mbn", a, w.astype(wide))
        narrow = dtype_of(x.rounds)
        if narrow != np.float32:
            assert wide == np.float32 and not x.adds
            y = y.astype(narrow).astype(wide)
        if x.bias >= 0:
            bias = self.preps[x.bias]
            assert bias.shape == (w.shape[2],) and bias.dtype == wide
            y = y + bias if narrow == np.float32 else (y + bias).astype(narrow).astype(wide)
        out = bc.CpuOperand(x.out.ref, x.out.row_stride, (*x.out.strides, 1))
        if x.adds:
            y = y + self._read(out, (x.batch, w.shape[2]), x.row_multiple)
        assert len(x.parameters) == bc.ACTIVATION_PARAMETERS[x.activation]
        y = activated(bc.ACTIVATIONS[x.activation], x.parameters, y, narrow)
        self._write(out, (x.batch, w.shape[2]), y, x.row_multiple)

    def _vector(self, x: bc.CpuVector) -> None:
        if x.collapse_rows:
            assert all(o.row_stride == x.extents[0] * o.strides[0] for o in (*x.loads, *x.stores))
        registers: dict[int, np.ndarray] = {}
        stores = []
        for m in x.code:
            assert m.dst < bc.MAX_REGISTERS
            name = bc.OPCODES[m.op]
            if name == "store":
                stores.append((x.stores[m.a], registers[m.b]))
                continue
            registers[m.dst] = self._micro(x, name, m, registers)
        for operand, value in stores:
            self._write(operand, x.extents, value)

    def _micro(self, x: bc.CpuVector, name: str, m: bc.Micro, registers: dict[int, np.ndarray]) -> np.ndarray:
        kind = dtype_of(m.type)
        assert bc.DTYPES[m.type] not in ("float16", "bfloat16"), "a register of a storage type"
        shape = (self.n, *x.extents)
        if name == "load":
            return self._read(x.loads[m.a], x.extents).astype(kind)
        if name == "const":
            value = m.imm[0] if len(m.imm) == 1 else (int(m.imm[0]) << 32) | int(m.imm[1])
            return np.full(shape, int(value) if kind.kind in "iu" else value, kind)
        if name == "index":
            assert not x.collapse_rows
            where = np.arange(shape[m.a]) + (self.row0 if m.a == 0 else 0)
            where = (where // m.b % m.c).astype(kind)
            return np.broadcast_to(where.reshape([-1 if d == m.a else 1 for d in range(len(shape))]), shape)
        if name == "convert":
            assert registers[m.a].dtype == dtype_of(m.from_type)
            with np.errstate(all="ignore"):
                return registers[m.a].astype(kind)
        args = [registers[r] for r in (m.a, m.b, m.c, m.d)[: _ENTRIES[name].arity]]
        first = {"select": np.dtype(bool), "bitcast": dtype_of(m.from_type)}.get(name, kind)
        expected = [first, kind, kind, kind]
        for arg, want in zip(args, expected, strict=False):
            assert arg.dtype == want, f"{name}: a register of {arg.dtype} taken as {want}"
        with np.errstate(all="ignore"):
            return _semantics(name, kind, args, m.imm)

    def _reduce(self, x: bc.Reduce) -> None:
        value = self._read(x.x, (*x.kept, *x.reduced))
        axes = tuple(range(1 + len(x.kept), value.ndim))
        self._write(x.out, x.kept, _fold(bc.REDUCTIONS[x.how], value, axes))

    def _exprows(self, x: bc.ExpRows) -> None:
        value = self._read(x.x, (*x.kept, x.n)).astype(np.float64) * x.factor
        with np.errstate(all="ignore"):
            e = np.exp(value - self._read(x.shift, x.kept).astype(np.float64)[..., None])
        self._write(x.out, (*x.kept, x.n), e)
        for sums in x.sums:
            self._write(sums, x.kept, e.sum(-1))

    def _scan(self, x: bc.Scan) -> None:
        value = self._read(x.x, x.extents)
        value = value[..., ::-1] if x.reverse else value
        wide = _wide(value)
        how = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "logsumexp": np.logaddexp}
        out = how[bc.CUMULATIVE[x.how]].accumulate(wide, axis=-1)
        self._write(x.out, x.extents, out[..., ::-1] if x.reverse else out)

    def _accumulate(self, x: bc.Accumulate) -> None:
        sink = self.p.sinks[x.sink]
        value = self._read(x.x, (*x.kept, *x.reduced))
        how = bc.REDUCTIONS[sink.how]
        part = _fold(how, value, (0, *range(1 + len(x.kept), value.ndim))).reshape(-1)
        assert part.size == sink.elements and x.x.ref.dtype == sink.dtype
        before = self.sinks[x.sink]
        self.sinks[x.sink] = part if before is None else _fold(how, np.stack([before, part]), (0,))

    def _gather(self, x: bc.Gather) -> None:
        index = self._read(x.index, x.index_extents).astype(np.int64)
        near = np.clip(index, 0, x.count - 1) * x.table.row_stride
        inner = x.table.ref.offset + _grid(x.extents, x.table.strides)
        found = _take(self._memory(x.table.ref, False), near.reshape(*near.shape, *[1] * inner.ndim) + inner, "gather")
        outside = (index < 0) | (index >= x.count)
        if x.mode == bc.FILL:
            found[outside] = x.fill[0]
        self._write(x.out, (*x.index_extents, *x.extents), found)

    def _accumulateat(self, x: bc.AccumulateAt) -> None:
        width = math.prod(x.extents)
        if x.ordered:
            at = x.x.ref.offset + self._elements()[:, None] * x.x.row_stride + np.arange(width)
            value = _take(self._memory(x.x.ref, False), at, "sink")
        else:
            value = self._read(x.x, (*x.index_extents, *x.extents))
        self._folded(x, value)

    def _folded(self, x: bc.AccumulateAt, value: np.ndarray) -> None:
        sink = self.p.sinks[x.sink]
        how, width = bc.REDUCTIONS[sink.how], math.prod(x.extents)
        index = self._read(x.index, x.index_extents).astype(np.int64).reshape(-1)
        assert sink.dtype in (x.x.ref.dtype, bc.DTYPE_CODE["float32"]) and x.count * width == sink.elements
        total = self.sinks[x.sink]
        if total is None:
            wide = _wide(np.zeros(1, dtype_of(sink.dtype))).dtype
            total = np.full((x.count, width), identity(how, wide), wide)
        inside = (index >= 0) & (index < x.count)
        kept = [self.last.get(x.sink, 0), *index[inside]]
        assert not x.sorted or kept == sorted(kept), "indices that are promised to be sorted are not"
        self.last[x.sink] = kept[-1]
        FOLDS[how].at(total.reshape(x.count, width), index[inside], value.reshape(-1, width)[inside].astype(total.dtype))
        self.sinks[x.sink] = total.reshape(-1)

    def _selected(self, x: bc.Take | bc.CpuPut) -> np.ndarray:
        assert x.index.row_stride == 0
        return self._read(x.index, (x.indices,))[0].astype(np.int64)

    def _take(self, x: bc.Take) -> None:
        index = self._selected(x)
        value = self._read(_dense(x.x), (*x.outer, x.count, x.inner))
        taken = value[..., np.clip(index, 0, x.count - 1), :]
        if x.mode == bc.FILL:
            taken[..., (index < 0) | (index >= x.count), :] = x.fill[0]
        self._write(_dense(x.out), (*x.outer, x.indices, x.inner), taken)

    def _put(self, x: bc.CpuPut) -> None:
        index = self._selected(x)
        value = _wide(self._read(_dense(x.x), (*x.outer, x.indices, x.inner)))
        total = np.zeros((*value.shape[:-2], x.count, x.inner), value.dtype)
        for i, k in enumerate(index):
            if 0 <= k < x.count:
                total[..., k, :] += value[..., i, :]
        self._write(_dense(x.out), (*x.outer, x.count, x.inner), total)

    def _accumulatematmul(self, x: bc.AccumulateMatmul) -> None:
        sink = self.p.sinks[x.sink]
        a = self._read(bc.CpuOperand(x.x.ref, x.x.row_stride, (*x.x.strides, 1)), (x.batch, x.m), x.row_multiple)
        b = self._read(bc.CpuOperand(x.y.ref, x.y.row_stride, (*x.y.strides, 1)), (x.batch, x.n), x.row_multiple)
        assert a.dtype == b.dtype and bc.REDUCTIONS[sink.how] == "sum"
        wide = dtype_of(sink.dtype)
        assert wide == (np.float64 if a.dtype == np.float64 else np.float32)
        part = np.einsum("rbm,rbn->bmn", a.astype(wide), b.astype(wide)).reshape(-1)
        assert part.size == sink.elements
        before = self.sinks[x.sink]
        self.sinks[x.sink] = part if before is None else before + part


_ENTRIES = {name: spec for spec in OPS.values() for name in spec.opcodes}


def _grid(extents: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    assert len(extents) == len(strides) and all(n >= 1 for n in extents), (extents, strides)
    out = np.zeros((1,) * len(extents), np.int64)
    for d, (n, s) in enumerate(zip(extents, strides, strict=True)):
        out = out + (np.arange(n) * s).reshape([-1 if k == d else 1 for k in range(len(extents))])
    return out


def _take(memory: np.ndarray, index: np.ndarray, what: str) -> np.ndarray:
    if index.min() < 0 or index.max() >= memory.size:
        raise Fault(f"{what}: read of {index.min()}..{index.max()} in memory of {memory.size}")
    return memory[index]


def _dense(x: bc.CpuOperand) -> bc.CpuOperand:
    """``x`` with a stride for elements that lie dense behind what its own strides say."""
    return dataclasses.replace(x, strides=(*x.strides, 1))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype.kind not in "iub" else x


def _fold(how: str, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    if how in ("argmax", "argmin"):
        (axis,) = axes
        return np.argmax(_wide(x), axis) if how == "argmax" else np.argmin(_wide(x), axis)
    ufuncs = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply,
              "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
    return ufuncs[how].reduce(_wide(x), axis=axes, dtype=x.dtype if x.dtype.kind in "iub" else None)


def _semantics(name: str, kind: np.dtype, args: list[np.ndarray], imm: tuple[float, ...]) -> np.ndarray:
    """As the op table says, whose NumPy rules are tested against JAX."""
    if name in ("to_float16", "to_bfloat16"):
        return args[0].astype(np_dtype(name.removeprefix("to_"))).astype(kind)
    spec = _ENTRIES[name]
    params = (
        {"method": name.removeprefix("round_")} if spec.kind == "round" else dict(zip(spec.immediates, map(int, imm), strict=True))
    )
    return MEANINGS[spec.kind].numpy(params, *args, out_dtype="bool" if spec.gives == "bool" else str(kind))


def _rounded_gelu(name: str, x: np.ndarray, a: float, b: float, rounded: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """jax.nn.gelu in 16 bits, whose every step is rounded."""
    if name == "gelu_erf":  # XLA converts a bfloat16 operand of erfc before it is rounded
        t = rounded(a * x) if rounded(np.asarray(1 + 2.0**-10)) != 1 else a * x
        return rounded(0.5 * x) * rounded(np.vectorize(math.erfc, otypes=[np.float64])(-t))
    cube = rounded(rounded(x * x) * x)
    inner = rounded(rounded(x + rounded(rounded(np.asarray(b / a)) * cube)) * (0.5 * a))
    return x * (0.5 * rounded(1 + rounded(np.tanh(inner))))


def activated(name: str, parameters: tuple[float, ...], y: np.ndarray, rounds: object = np.float32) -> np.ndarray:
    """An activation of a matrix product's sums by its definition, evaluated in float64. ``rounds``: of sums that are rounded."""
    x = y.astype(np.float64)
    a, b = (*parameters, 0.0, 0.0)[:2]
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "none":
            out = x
        elif name == "relu":
            out = np.maximum(x, 0)
        elif name == "leaky_relu":
            out = np.where(x >= 0, x, a * x)
        elif name == "scale":
            out = a * x
        elif name == "elu":
            out = np.where(x > 0, x, a * np.expm1(np.where(x > 0, 0, x)))
        elif name == "tanh":
            out = np.tanh(x)
        elif name.startswith("gelu") and rounds != np.float32:
            out = _rounded_gelu(name, x, a, b, lambda v: v.astype(np.float32).astype(rounds).astype(np.float64))
        elif name == "gelu_erf":
            out = x * np.vectorize(math.erfc, otypes=[np.float64])(-a * x) / 2
        else:
            sigmoid = 1 / (1 + np.exp(-(x if name == "logistic" else a * x + b * x**3)))
            if name == "silu" and rounds != np.float32:
                sigmoid = sigmoid.astype(np.float32).astype(rounds).astype(np.float64)
            out = sigmoid if name == "logistic" else x * sigmoid
    return out.astype(y.dtype)
