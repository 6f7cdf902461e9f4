"""The operands of a custom call, and the table by which one launch of our own packs them.

Comes in: the recipes of each part of a call (``pack``), and the pointers that its kernel reads. Goes out: ``CustomCall``: which
arrays of the user the call gets as they are, which values XLA computes first, the launch words, and the table (``Packed`` in
``cuda/include/kitsune/pack.h``) that says where every element of an image comes from. Invariants: a value that only moves elements
of an array (a reshape, transpose, slice, broadcast or cast of floats) is no operation of XLA where strides can say it; images lie
at the end of the workspace, which the packing kernel writes before the other kernel starts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.targets.cuda.pack import GatheredColumns, ScatteredColumns, VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.runtime import LAUNCH_VERSION
from kitsune_jax.targets.cuda.stage.split import slab_by_slab
from kitsune_jax.targets.cuda.tiles import ROW_BYTES, WeightShape, aligned, block, is_half, padded

# --- The pointers of a kernel, and the operands of its call -----------------------------------------------------------------------

ALIGNMENT = 256  # of images and of the arrays of a call in the workspace, the same as that of XLA's arrays


@dataclasses.dataclass(frozen=True, slots=True)
class MadeByXla:
    """An operand that XLA computes: value ``value`` of part ``part``, or the ``words`` columns that it says as an index
    (``how``)."""

    part: int
    value: int
    how: GatheredColumns | ScatteredColumns | None = None
    words: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Recipes:
    """The operand that holds the table."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedImage:
    """Operand ``number`` of part ``part`` that is packed: its weights of each dtype, then its vectors."""

    part: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class CallResult:
    """Result ``number`` of the custom call. Where there is a ``fill``, it holds the identity of that fold of elements of ``dtype``
    before the kernel starts."""

    number: int
    fill: str = ""
    dtype: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CallWorkspace:
    """The last result."""


Pointee = int | MadeByXla | PackedImage | CallResult | CallWorkspace  # a number is an operand of the call


@dataclasses.dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer of the kernel's ``Params`` and its bytes."""

    name: str
    of: Pointee
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map of the kernel's ``Params``, of the array at ``pointer``: ``rows`` of ``columns`` 16-bit elements each, in boxes
    of 64 by 64."""

    name: str
    pointer: str
    columns: int
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stationary:
    """The packed operands of a part. ``reads``: the call's operand that each input of ``program`` is."""

    program: TileProgram
    weights: tuple[tuple[tuple[WeightRecipe, int], ...], ...]
    vectors: tuple[VectorRecipe, ...]
    reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CustomCall:
    """``operands``: of the custom call, in their order; ``recipes``: the table; ``launch``: the words with which ``cuda/src``
    launches the kernel and the packing kernel in front of it; ``names`` and ``places``: of the kernel's pointers, which point to
    (buffer, byte)."""

    operands: tuple[int | MadeByXla | Recipes, ...]
    recipes: bytes
    launch: tuple[int, ...]
    workspace_bytes: int
    names: tuple[str, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def packs(self) -> bool:
        return bool(self.recipes)


_MOST_BLOCKS = 5 * 132  # of the packing kernel: a multiprocessor holds five of 256 threads with 47 registers
_WARPS = 8  # of its blocks


def custom_call(
    pointers: Sequence[Pointer],
    parts: Sequence[Stationary],
    geometry: Sequence[int],
    zero_bytes: int,
    maps: Sequence[TensorMap] = (),
) -> CustomCall:
    """The custom call of a kernel with these ``pointers``. ``geometry``: its launch words behind the version, up to the blocks of
    an instance. Raises ``CannotLower`` where an array is too large for the table."""
    (space,) = (p for p in pointers if isinstance(p.of, CallWorkspace))
    table, images, end = _packed(parts, aligned(space.bytes, ALIGNMENT))
    for result, size in {p.of: p.bytes for p in pointers if isinstance(p.of, CallResult) and p.of.fill}.items():
        table.add(_fill(result, size))
    # What the kernel reads as it is, what is packed, what XLA makes: each once. Then the table.
    arrays: dict[Any, int] = {p.of: p.bytes for p in pointers if isinstance(p.of, int)}
    arrays |= table.sources()
    arrays |= {p.of: p.bytes for p in pointers if isinstance(p.of, MadeByXla)}
    arrays |= {Recipes(): table.size} if table.entries else {}
    results = {p.of.number: p.bytes for p in pointers if isinstance(p.of, CallResult) and not p.of.fill}
    buffers = [*arrays, *(CallResult(number) for number in sorted(results)), CallWorkspace()]
    where = {of: number for number, of in enumerate(buffers)}

    def place(p: Pointer) -> tuple[int, int]:
        match p.of:
            case PackedImage():
                return where[CallWorkspace()], images[p.of]
            case CallResult(number):
                return where[CallResult(number)], 0
        return where[p.of], 0

    sizes = [*arrays.values(), *(results[number] for number in sorted(results)), end]
    launch = [LAUNCH_VERSION, *geometry, len(arrays), len(results) + 1, zero_bytes, *sizes]
    places = tuple(map(place, pointers))
    if table.entries:
        launch += [min(-(-table.jobs // _WARPS), _MOST_BLOCKS), where[Recipes()]]
        launch += [word for p, at in zip(pointers, places, strict=True) for word in (*at, p.bytes)]
    else:
        assert [*places] == [(number, 0) for number in range(len(buffers))], "the kernel's pointers are the buffers"
    numbers = {p.name: number for number, p in enumerate(pointers)}
    launch += [word for m in maps for word in (numbers[m.pointer], m.columns, m.rows)]
    recipes = table.encoded(where) if table.entries else b""
    return CustomCall(tuple(arrays), recipes, tuple(launch), end, tuple(p.name for p in pointers), places)


def _packed(parts: Sequence[Stationary], end: int) -> tuple[_RecipeTable, dict[PackedImage, int], int]:
    """(the table, the bytes of the workspace at which the images begin, where they end), the first from byte ``end`` on."""
    table, images = _RecipeTable(), dict[PackedImage, int]()
    for k, part in enumerate(parts):
        found = _values(part, k)
        packed = [_weight_entries(weights, found) for weights in part.weights]
        packed += [_vector_entries(part.vectors, k, found)] if part.vectors else []
        for number, (entries, size) in enumerate(packed):
            images[PackedImage(k, number)] = end
            for entry in entries:
                table.add(dataclasses.replace(entry, at=entry.at + end))
            end = aligned(end + size, ALIGNMENT)
    return table, images, end


# --- Where the elements of a stationary value lie ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class StridedView:
    """Element (i, j, ...) of a value is element ``first`` + i strides[0] + j strides[1] + ... of an array."""

    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int]) -> StridedView:
        """All of an array, in the order of memory."""
        strides = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
        return StridedView(0, tuple(shape), tuple(reversed([*strides][: len(shape)])))

    def transposed(self, order: Sequence[int]) -> StridedView:
        return StridedView(self.first, tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order))

    def sliced(self, start: Sequence[int], limit: Sequence[int], by: Sequence[int]) -> StridedView:
        first = self.first + sum(a * s for a, s in zip(start, self.strides, strict=True))
        shape = tuple(max(0, -(-(b - a) // c)) for a, b, c in zip(start, limit, by, strict=True))
        return StridedView(first, shape, tuple(c * s for c, s in zip(by, self.strides, strict=True)))

    def broadcast(self, shape: Sequence[int], dims: Sequence[int]) -> StridedView:
        strides = [0] * len(shape)
        for d, n, s in zip(dims, self.shape, self.strides, strict=True):
            strides[d] = s if n == shape[d] else 0
        return StridedView(self.first, tuple(shape), tuple(strides))

    def reshaped(self, shape: Sequence[int]) -> StridedView | None:
        """The view with another shape of the same elements; None where no strides give it."""
        if 0 in shape:
            return StridedView(self.first, tuple(shape), (0,) * len(shape))
        runs = list[tuple[int, int]]()  # (elements, stride of the last) of dimensions that lie together
        for n, s in zip(self.shape, self.strides, strict=True):
            if n != 1:
                if runs and runs[-1][1] == n * s:
                    runs[-1] = runs[-1][0] * n, s
                else:
                    runs.append((n, s))
        strides = list[int]()
        for n in reversed(shape):  # the innermost first
            left, s = runs[-1] if runs else (1, 0)
            if n != 1 and left % n:
                return None
            strides.append(s if n != 1 else 0)
            if n != 1:
                runs[-1:] = [(left // n, s * n)] if left > n else []
        return StridedView(self.first, tuple(shape), tuple(reversed(strides)))

    def offsets(self, dims: Sequence[int] | None = None) -> np.ndarray:
        """The distances from ``first`` of the elements along ``dims`` (all dimensions if None), as one dimension."""
        steps = [np.arange(self.shape[d]) * self.strides[d] for d in (range(len(self.shape)) if dims is None else dims)]
        return functools.reduce(lambda found, along: np.add.outer(found, along).reshape(-1), steps or [np.zeros(1, np.int64)])


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A value in an array: ``source`` is an operand of the call, a value that XLA makes, or bytes of the table. ``type``: of the
    array's elements; ``made``: what they are rounded to; ``dtype``: of the value, which is as wide as ``made`` or wider."""

    source: int | MadeByXla | bytes
    bytes: int
    view: StridedView
    type: str
    made: str
    dtype: str


_FLOATS = ("float32", "bfloat16", "float16")


_Values = Callable[[int], tuple[Stored, Stored]]


def _values(part: Stationary, number: int) -> _Values:
    """The function that gives each stationary value of a part: where it lies, and where it lies if XLA makes it."""
    program = part.program
    literals = dict(program.literals)
    makers = {v: i for s in program.stages for i in walk(s.body) for v in i.outputs if not program.values[v].tile}

    def made(v: int) -> Stored:
        maker = makers.get(v)
        array = program.inputs[maker["array"]] if maker is not None and maker.kind in ("load", "load_slice") else None
        shape, dtype = (program.values[v].shape, program.values[v].dtype) if array is None else (array.shape, array.dtype)
        return _stored(MadeByXla(number, v), shape, _in_32_bits(dtype))

    @functools.cache
    def stored(v: int) -> Stored:
        if v in literals:
            dtype = _in_32_bits(program.values[v].dtype)
            value = np.asarray(literals[v], np_dtype(program.values[v].dtype)).astype(np_dtype(dtype))
            return _stored(value.tobytes(), value.shape, dtype)
        instr = makers[v]
        if instr.kind in ("load", "load_slice"):  # the recipe of a slice cuts it out of the array
            array = program.inputs[instr["array"]]
            narrow = np_dtype(array.dtype).itemsize <= 4
            return _stored(part.reads[instr["array"]], array.shape, array.dtype) if narrow else made(v)
        if len(instr.inputs) == 1 and instr.block is None:
            x = instr.inputs[0]
            if (x in literals or x in makers) and (found := _moved(instr, stored(x), program.values[v].dtype)) is not None:
                return found
        return made(v)

    return lambda v: (stored(v), made(v))


def _stored(source: int | MadeByXla | bytes, shape: tuple[int, ...], dtype: str) -> Stored:
    return Stored(source, math.prod(shape) * np_dtype(dtype).itemsize, StridedView.of(shape), dtype, dtype, dtype)


def _in_32_bits(dtype: str) -> str:
    """Of a value as the table can have it: XLA converts those of 64 bits."""
    t = np_dtype(dtype)
    return dtype if t.itemsize <= 4 else "float32" if t.kind == "f" else "uint32" if t.kind == "u" else "int32"


def _moved(instr: Instr, x: Stored, dtype: str) -> Stored | None:
    """The result of an operator that only moves the elements of ``x``, or rounds them once; else None."""
    view: StridedView | None = None
    match instr.kind:
        case "reshape":
            view = x.view.reshaped(instr["new_sizes"])
        case "transpose":
            view = x.view.transposed(instr["permutation"])
        case "broadcast_in_dim":
            view = x.view.broadcast(instr["shape"], instr["dims"])
        case "slice":
            view = x.view.sliced(instr["start"], instr["limit"], instr["strides"] or (1,) * len(x.view.shape))
        case "convert_element_type":
            if dtype not in _FLOATS or x.dtype not in _FLOATS:
                return None
            if dtype in ("float32", x.made):
                return dataclasses.replace(x, dtype=dtype)
            return dataclasses.replace(x, made=dtype, dtype=dtype) if x.made == x.type else None
    return None if view is None else dataclasses.replace(x, view=view)


# --- Entries of the table ---------------------------------------------------------------------------------------------------------

# The numbers of pack.h.
_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3, "uint32": 3, "bool": 4, "int8": 5, "uint8": 6}
_TYPES |= {"int16": 7, "uint16": 8}
_SIZES = (4, 2, 2, 4, 1, 1, 1, 2, 2)  # bytes of an element of each type
_WEIGHTS, _VECTOR, _FILL = 0, 1, 2
_VECTOR_JOB, _FILL_JOB, _COLUMNS_JOB = 128, 4096, 32
_ENTRY_WORDS, _TABLE_HEAD = 28, 4


@dataclasses.dataclass(frozen=True, slots=True)
class _Descriptor:
    """A descriptor: the fields of ``Packed``, whose tables are arrays here. ``size``: bytes of the source."""

    kind: int
    jobs: int
    source: int | MadeByXla | bytes | None
    size: int
    to: CallWorkspace | CallResult
    at: int
    type: int = 0
    made: int = 0
    first: int = 0
    batches: np.ndarray | None = None
    count: int = 1
    steps: tuple[int, int, int] = (0, 0, 0)  # elements of an iteration; bytes of a batch and of an iteration
    k: np.ndarray | None = None
    n: np.ndarray | None = None
    k_chunks: int = 0
    columns: int = 0
    across: bool = False
    pattern: int = 0
    bytes: int = 0


class _RecipeTable:
    """The table under construction: a head, descriptors, tables of offsets and constants, each of them once."""

    def __init__(self) -> None:
        self.entries: list[_Descriptor] = []
        self.data: dict[bytes, int] = {}  # to the byte behind the descriptors
        self.length = 0

    def add(self, entry: _Descriptor) -> None:
        self.entries.append(entry)
        for array in (entry.batches, entry.k, entry.n):
            if array is not None:
                self._place(array.tobytes())
        if isinstance(entry.source, bytes):
            self._place(entry.source)

    def _place(self, data: bytes) -> None:
        if data not in self.data:
            self.data[data] = self.length
            self.length = aligned(self.length + len(data), 16)

    def sources(self) -> dict[int | MadeByXla, int]:
        """The arrays that are packed, and their bytes."""
        return {e.source: e.size for e in self.entries if isinstance(e.source, (int, MadeByXla))}

    @property
    def jobs(self) -> int:
        return sum(e.jobs for e in self.entries)

    @property
    def _begin(self) -> int:
        return 4 * (_TABLE_HEAD + _ENTRY_WORDS * len(self.entries))

    @property
    def size(self) -> int:
        """Its bytes."""
        return self._begin + self.length

    def encoded(self, where: dict[Any, int]) -> bytes:
        """The bytes of the table, where ``where`` gives the number of each buffer."""
        if self.jobs >= 1 << 31:
            raise CannotLower("the weights are too large for the table by which they are packed")
        words = [len(self.entries), self.jobs, 0, 0]
        first = 0
        for e in self.entries:
            words += self._words(e, first, where)
            first += e.jobs
        rest = bytearray(self.length)
        for data, at in self.data.items():
            rest[at : at + len(data)] = data
        return np.array(words, np.int64).astype(np.uint32).tobytes() + bytes(rest)

    def _words(self, e: _Descriptor, first: int, where: dict[Any, int]) -> list[int]:
        def place(array: np.ndarray | None) -> int:
            return 0 if array is None else (self._begin + self.data[array.tobytes()]) // 4

        source, element = 0 if e.source is None else where[Recipes() if isinstance(e.source, bytes) else e.source], e.first
        if isinstance(e.source, bytes):
            element += (self._begin + self.data[e.source]) // _SIZES[e.type]
        step, batch_bytes, step_bytes = e.steps
        words = [e.kind, first, source, where[e.to], e.type, e.made, *_wide(e.at), *_wide(element), place(e.batches), e.count]
        words += [*_wide(step), *_wide(batch_bytes), *_wide(step_bytes), place(e.k), place(e.n), e.k_chunks, e.columns]
        words += [int(e.across), e.pattern, *_wide(e.bytes)]
        return words + [0] * (_ENTRY_WORDS - len(words))


def _wide(n: int) -> tuple[int, int]:
    """A 64-bit number as two words."""
    return n & 0xFFFFFFFF, n >> 32 & 0xFFFFFFFF


def _fill(result: CallResult, size: int) -> _Descriptor:
    dtype = np_dtype(result.dtype)
    one = np.asarray(identity(result.fill, dtype), dtype).tobytes()
    if len(one) > 4:
        raise CannotLower(f"sums of {result.dtype} by indices have no code on the GPU")
    pattern = int.from_bytes(one * (4 // len(one)), "little")
    jobs = -(-size // _FILL_JOB)
    return _Descriptor(_FILL, jobs, None, 0, CallResult(result.number), 0, pattern=pattern, bytes=size)


def _weight_entries(parts: Sequence[tuple[WeightRecipe, int]], values: _Values) -> tuple[list[_Descriptor], int]:
    """The entries of an image of several weight matrices, and its bytes: ``parts``, one after the other. A part is (recipe, column
    chunk), or (recipe, -1) for a whole matrix, slab by slab.

    Sliced weights lie batch by batch; in each the weights of every loop, iteration by iteration, and of no loop.
    """
    runs = [[*run] for _, run in itertools.groupby(parts, key=lambda part: part[0].loop if part[0].slices is not None else None)]
    each = [sum(recipe.shape.part_bytes(chunk) for recipe, chunk in run) for run in runs]
    counts = [1 if run[0][0].slices is None else run[0][0].slices.count for run in runs]
    of_batch = sum(n * count for n, count in zip(each, counts, strict=True))
    entries, begin = list[_Descriptor](), 0
    for run, size, count in zip(runs, each, counts, strict=True):
        at, places = begin, dict[int, _MatrixPlace]()  # by the recipe, which has a part for each chunk of columns
        for recipe, chunk in run:
            if id(recipe) not in places:
                places[id(recipe)] = _matrix(recipe, values)
            entries += _chunks(recipe, chunk, places[id(recipe)], at, (of_batch, size))
            at += recipe.shape.part_bytes(chunk)
        begin += size * count
    recipe = parts[0][0]
    return entries, of_batch * (1 if recipe.slices is None else recipe.slices.batches)


@dataclasses.dataclass(frozen=True, slots=True)
class _MatrixPlace:
    """Where the elements of a matrix, or of one for each batch and iteration, lie in ``array``."""

    array: Stored
    first: int
    batches: np.ndarray
    step: int
    k: np.ndarray
    n: np.ndarray


def _matrix(recipe: WeightRecipe, values: _Values) -> _MatrixPlace:
    array, made = values(recipe.value)
    # An image has the elements of its array, rounded once at most, to its own type.
    if array.made not in (array.type, recipe.shape.dtype):
        array = made
    view, first, step, batches = array.view, array.view.first, 0, np.zeros(1, np.int64)
    if (cut := recipe.slices) is not None:
        batches = view.offsets(cut.batch_dims)
        shape = list(view.shape)
        if cut.dim >= 0:
            shape[cut.dim], stride = cut.size, view.strides[cut.dim]
            first, step = first + cut.first * stride, cut.step * stride
            if cut.reverse:
                first, step = first + step * (cut.count - 1), -step
        rest = [d for d in range(len(shape)) if d not in cut.batch_dims]
        view = StridedView(first, tuple(shape), view.strides).transposed(rest)
    k, n = (view.offsets(d) for d in (recipe.permutation[: recipe.contracted], recipe.permutation[recipe.contracted :]))
    if k.size and n.size and int(k[-1]) + int(n[-1]) >= 1 << 31:
        raise CannotLower("a weight is too large for the table by which it is packed")
    return _MatrixPlace(array, first, batches, step, k, n)


def _chunks(recipe: WeightRecipe, chunk: int, matrix: _MatrixPlace, at: int, steps: tuple[int, int]) -> list[_Descriptor]:
    """The entries of one column chunk of a matrix, or of all of them slab by slab, from byte ``at`` on."""
    shape, found, array = recipe.shape, list[_Descriptor](), matrix.array
    count = 1 if recipe.slices is None else recipe.slices.count
    wanted = [(s, c) for s in range(shape.split) for c in range(len(shape.chunks))]
    starts = [*itertools.accumulate(shape.chunks, initial=0)]
    for s, c in wanted if chunk < 0 else [wanted[chunk]]:
        k, n = k_offsets(recipe, s, matrix.k), n_offsets(recipe, s, matrix.n)
        columns = shape.chunks[c]
        jobs = matrix.batches.size * count * shape.k_chunks * -(-columns // _COLUMNS_JOB)
        neighbours = [int(x[1] - x[0]) if x.size > 1 else 1 << 31 for x in (matrix.k, matrix.n)]
        entry = _Descriptor(
            _WEIGHTS,
            jobs,
            array.source,
            array.bytes,
            CallWorkspace(),
            at,
            type=_TYPES[array.type],
            made=_TYPES[shape.dtype],
            first=matrix.first,
            batches=matrix.batches,
            count=count,
            steps=(matrix.step, *steps),
            k=k.astype(np.int32),
            n=n[starts[c] : starts[c + 1]].astype(np.int32),
            k_chunks=shape.k_chunks,
            columns=columns,
            across=columns % _COLUMNS_JOB == 0 and neighbours[1] < neighbours[0],
        )
        found += [entry] if jobs else []
        at += shape.part_bytes(s * len(shape.chunks) + c)
    return found


def k_offsets(recipe: WeightRecipe, slab: int, offsets: np.ndarray) -> np.ndarray:
    """``offsets`` of the rows of a matrix in the order in which instructions read a slab's chunks of K; -1 is padding.

    The rows of a piece lie block by block, in the order of the fragments (``cuda/include/kitsune/layout.h``), or as they are where
    the piece is read in place. A block is 32 rows.
    """
    shape = recipe.shape
    half = is_half(shape.dtype)
    if recipe.runs:  # of each, the rows of the CTA's slab
        runs = zip(itertools.accumulate(recipe.runs, initial=0), recipe.runs, strict=False)
        each = [(start + slab * (run // shape.split), run // shape.split) for start, run in runs]
        offsets = np.concatenate([offsets[start : start + size] for start, size in each])
    starts = itertools.accumulate(shape.pieces, initial=0)
    pieces = [offsets[start : start + piece] for start, piece in zip(starts, shape.pieces, strict=False)]
    blocks = [piece if k in recipe.in_place else _blocks_of_k(piece, half) for k, piece in enumerate(pieces)]
    return _padded(np.concatenate(blocks), shape.k_chunks * (ROW_BYTES // (2 if half else 4)))


def _blocks_of_k(offsets: np.ndarray, half: bool) -> np.ndarray:
    width = padded(offsets.size)
    b = block(width)
    rows = _padded(offsets, width).reshape(width // b, 4, b // 8, 2)  # [block, q, j, e]
    found = rows.transpose((0, 2, 1, 3) if half else (0, 2, 3, 1)).reshape(width // b, b)
    return np.pad(found, ((0, 0), (0, 32 - b)), constant_values=-1).reshape(-1)


def n_offsets(recipe: WeightRecipe, slab: int, offsets: np.ndarray) -> np.ndarray:
    """``offsets`` of the columns of a matrix in the order of a slab's image; -1 is padding."""
    shape = recipe.shape
    mine = slab_by_slab(offsets, recipe.groups, shape.split)
    if not recipe.runs:  # of which every CTA has all columns
        per = -(-shape.n // shape.split)
        mine = mine[slab * per : (slab + 1) * per]
    return _columns_of(mine, shape)


def _columns_of(offsets: np.ndarray, shape: WeightShape) -> np.ndarray:
    b = block(shape.slab)
    return _padded(offsets, shape.slab).reshape(-1, 4, b // 8, 2).transpose(0, 2, 1, 3).reshape(-1)  # [block, j, q, e]


def _padded(offsets: np.ndarray, size: int) -> np.ndarray:
    return np.pad(offsets, (0, size - offsets.size), constant_values=-1)


def _vector_entries(recipes: Sequence[VectorRecipe], part: int, values: _Values) -> tuple[list[_Descriptor], int]:
    """The entries of all vectors, one after the other, and their bytes."""
    entries, at = list[_Descriptor](), 0
    for recipe in recipes:
        entries.append(_vector(recipe, part, values, at))
        at += 4 * recipe.words
    return entries, at


def _vector(recipe: VectorRecipe, part: int, values: _Values, at: int) -> _Descriptor:
    if recipe.value is None:
        data = np.asarray(recipe.table, np.int32)
        array = _stored(data.tobytes(), data.shape, "int32")
        view = array.view
    elif recipe.how is not None:
        array = _stored(MadeByXla(part, recipe.value, recipe.how, recipe.row_shape[0]), recipe.row_shape, "int32")
        view = array.view
    else:
        array, made = values(recipe.value)
        shaped = array.view.reshaped(recipe.shape)
        if shaped is None:
            array, shaped = made, made.view.reshaped(recipe.shape)
        assert shaped is not None, "an array in the order of memory has every shape"
        view = shaped.broadcast(recipe.row_shape, recipe.dims)
    offsets = slab_by_slab(view.offsets(), recipe.groups, recipe.split)
    if offsets.size and int(offsets.max()) >= 1 << 31:
        raise CannotLower("a vector is too large for the table by which it is packed")
    there = offsets.size
    if recipe.split > 1:
        per = -(-there // recipe.split)
        offsets = _padded(offsets, recipe.split * per).reshape(recipe.split, per)
        offsets = np.pad(offsets, ((0, 0), (0, recipe.width - per)), constant_values=-1).reshape(-1)
    offsets = _padded(offsets, recipe.words)
    step = int(offsets[1]) if there > 1 else 0
    affine = (offsets[:there] == step * np.arange(there)).all() and (offsets[there:] == -1).all()
    return _Descriptor(
        _VECTOR,
        -(-recipe.words // _VECTOR_JOB),
        array.source,
        array.bytes,
        CallWorkspace(),
        at,
        type=_TYPES[array.type],
        made=_TYPES[array.made],
        first=view.first,
        n=None if affine else offsets.astype(np.int32),
        k_chunks=there,
        columns=recipe.words,
        pattern=step if affine else 0,
    )


# --- Values that XLA makes --------------------------------------------------------------------------------------------------------


def as_operand(made: MadeByXla, value: Any) -> Any:
    """The value of ``made``, as the packing kernel reads it."""
    value = jnp.asarray(value)
    if made.how is not None:
        columns = made.how.of(value).astype(jnp.int32).reshape(-1)
        return columns if columns.size == made.words else jnp.zeros(made.words, jnp.int32)  # a list of nothing has one word
    return value.astype(jnp.dtype(_in_32_bits(value.dtype.name)))
