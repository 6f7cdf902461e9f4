"""XLA's side of a machine profile: how long its kernels take here, and where it rounds 16-bit results.

Comes in: JAX with a CPU backend. Goes out: ``Piece``s to be timed, and profile numbers from those timings, as ``profile`` lists
them; and ``rounding_at_hand``. Pieces are compiled ahead and run on arrays of the CPU, so no setting of the user's program (x64,
matmul precision, a mesh, another default device, ``disable_jit``) changes a measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import ml_dtypes
import numpy as np
from jax import lax

from kitsune_jax import _compat, config
from kitsune_jax.cache import Cache
from kitsune_jax.cache import key as cache_key
from kitsune_jax.ops.spec import NARROW, Rounding
from kitsune_jax.progress import in_own_thread
from kitsune_jax.targets.cpu import call
from kitsune_jax.targets.cpu.profile import kernels, profile
from kitsune_jax.targets.cpu.profile.kernels import TILE, Piece, fastest, fastest_long

# --- XLA's kernels ----------------------------------------------------------------------------------------------------------------

# (rows, K, N). Squares show how the rate grows with the width, 16 rows the time of weights, 8192 rows that of reading rows from
# memory; N of 1 and 4 run other code.
_DOTS = (
    *(
        (rows, n, n)
        for rows, n in ((16, 64), (16, 512), (1024, 16), (1024, 64), (1024, 256), (1024, 512), (1024, 1024), (8192, 512))
    ),
    *((2048, 256, n) for n in (4, 1)),
)
_VECTOR = (1024, 1024)  # a weight for one row, larger than any second level
_HALF_DOTS = ((1024, 64, 64), (1024, 256, 256))
_TRANSPOSED = ((1024, 256, 256),)
_GRADIENTS = ((2048, 16, 16), (2048, 64, 64), (2048, 256, 256), (1024, 1024, 1024))
_BATCHED = (512, 16, 64, 16)  # products of m x k and k x n, as in interactions of features
# Sizes that are no powers of two, which would align all arrays to the same offset in a page.
_LOOP = (2003, 128)
_REDUCED = (4099, 256)
# Shape and reduced dimensions; the library reduces all of them tile by tile, at different rates. A million elements, because it is
# slower with few rows: a sum of squared differences over 1 009 rows took 0.30 ns an element, over 16 411 0.13 (Xeon with AMX).
_REDUCTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "row": (_REDUCED, (1,)),
    "column": (_REDUCED, (0,)),
    "middle": ((17, 241, 256), (1,)),
    "all": (_REDUCED, (0, 1)),
}
# (indices, rows of the table, width). A table of 16 MB is in the last level.
_INDEXED = ((65521, 4096, 1), (16381, 1024, 64))
_FAR = (32749, 65536, 64)
# Bytes of a table in a core's second level, and in the last one; bytes of rows that a worker reads from it or folds into it.
_TABLES = {"l2": 256 << 10, "l3": 8 << 20}
_ACCESSED = 4 << 20
_MULTIPLIED = 512 << 10  # of small matrices, which lie in the L2 as a tile's do
_ORDERED = 1 << 17  # indices for each worker
_PICKED = (729, 351)  # elements of a row, and of those selected: the products of 27 features, each pair once
_RUN = 8  # consecutive rows with one index
CHAIN = 9
_STEPS = 1000
_SLICES = (64, 256, 64)  # an array that a loop stores slice by slice, as a recurrent layer does, larger than a second level
# Calls of a program that is handed to another thread: a tanh of an array that takes one thread 10 us, longer than threads spin.
_TURNS, _CALLS, _HANDED = 5, 40, (61, 96)
_HANDED_KEY, _HANDED_AGREE = "xla/call/handed", 1.3  # the time to wake a thread varies more

# After a rest threads get busy cores back at once, for some milliseconds: with four other programs a product of 1.7 ms took 1.9 in
# one call of ten after a rest, 3.4 without (1024 x 512 x 512, float32).
_LONG, _REST = 1e-3, 4e-3

Function = Callable[..., Any]
# Fused loops, elementwise. "move" is the loop itself: two elements read and one written. Other operations occur twice: a single one
# hides behind the memory, and in a loop of several each costs more than alone.
LOOPS: dict[str, Function] = {
    "move": lambda x, y: x + y,
    "exp": lambda x, y: lax.exp(lax.exp(x)) + y,
    "log": lambda x, y: lax.log(lax.log(x) + 2) + y,
    "tanh": lambda x, y: lax.tanh(lax.tanh(x)) + y,
    "logistic": lambda x, y: lax.logistic(lax.logistic(x)) + y,
    "erf": lambda x, y: lax.erf(lax.erf(x)) + y,
    "div": lambda x, y: lax.div(y, lax.div(y, x)) + y,
    "rsqrt": lambda x, y: lax.rsqrt(lax.rsqrt(x)) + y,
    "sin": lambda x, y: lax.sin(lax.sin(x)) + y,
    "pow": lambda x, y: lax.pow(lax.pow(x, y), y) + y,
    "arithmetic": lambda x, y: ((x * y + x) * x + y) * x + y,
}
_NARROW_LOOPS = ("move", "tanh", "arithmetic")


@dataclasses.dataclass(frozen=True)
class MeasuredProgram:
    key: str
    function: Function
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    elements: float = 1.0


def pieces(workers: int, go_on: Callable[[], None] = lambda: None, wanted: Callable[[str], bool] = lambda _: True) -> list[Piece]:
    """The pieces of XLA that are ``wanted`` by their keys, on the first CPU device, compiled. ``go_on`` is called before each step
    of this, and may raise. Raises JAX's error where there is no CPU backend.
    """
    chosen = [program for program in programs(workers) if wanted(program.key)]
    if not chosen:
        return []
    device = jax.local_devices(backend="cpu")[0]

    def compiled_of(lowered: Any) -> Any:
        go_on()
        return lowered.compile()

    lowered = []
    for program in chosen:
        go_on()
        lowered.append(_lowered(program, device))
    with ThreadPoolExecutor(2) as pool:  # compilation releases the interpreter's lock
        compiled = list(pool.map(compiled_of, lowered))
    array = functools.cache(functools.partial(_array, device))
    found = []
    for program, run in zip(chosen, compiled, strict=True):
        go_on()
        operands = list(map(array, program.shapes))
        if program.key == _HANDED_KEY:
            found.append(Piece(program.key, functools.partial(_hand_over_seconds, run, operands), agree=_HANDED_AGREE))
        else:
            found.append(Piece(program.key, functools.partial(_seconds, workers, run, operands), program.elements))
    return found


def numbers(pieces: Iterable[Piece], seconds: Mapping[str, float], empty: float) -> dict[str, float]:
    """The numbers of a profile, from the ``seconds`` of the pieces. ``empty``: seconds of a call without work."""
    found = {}
    for piece in pieces:
        taken = seconds[piece.key]
        if piece.key == _HANDED_KEY:
            taken = max(taken, 0.1 * empty)
        elif piece.key != "xla/call":
            # Without the call itself; a kernel that hides behind it counts a tenth.
            taken = max(taken - empty, 0.1 * taken)
        found[piece.key] = taken / piece.elements
    return found


def _lowered(program: MeasuredProgram, device: Any) -> Any:
    here = jax.sharding.SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(shape, _dtype(dtype), sharding=here) for shape, dtype in program.shapes]
    return jax.jit(program.function).lower(*specs)


def _dtype(name: str) -> str:
    """The dtype called ``name``; ``ids/n`` and ``sorted/n`` are indices below n."""
    return "int32" if "/" in name else name


def _array(device: Any, spec: tuple[tuple[int, ...], str]) -> Any:
    shape, dtype = spec
    rng = np.random.default_rng(0)
    kind, _, below = dtype.partition("/")
    values = rng.integers(0, int(below), shape) if below else rng.uniform(0.5, 1.0, shape)
    return jax.device_put((np.sort(values) if kind == "sorted" else values).astype(jnp.dtype(_dtype(dtype))), device)


def _seconds(workers: int, run: Any, operands: Sequence[Any]) -> float:
    """Undisturbed seconds of a call."""
    start = time.process_time()
    jax.block_until_ready(run(*operands))
    if time.process_time() - start > _LONG:  # the time of all threads, as a short call may wait for long
        time.sleep(_REST)
        return fastest_long(_long_calls(run, operands))
    return fastest(_calls(run, operands), workers)


def _calls(run: Any, operands: Sequence[Any]) -> Iterator[tuple[float, float]]:
    """Endless calls: seconds, and seconds of all threads together."""
    while True:
        ran, before = time.process_time(), time.perf_counter()
        jax.block_until_ready(run(*operands))
        yield time.perf_counter() - before, time.process_time() - ran


def _long_calls(run: Any, operands: Sequence[Any]) -> Iterator[tuple[float, float]]:
    """Endless calls: seconds, and seconds of the busiest thread; infinite where the system does not say."""
    while True:
        others = profile.other_threads_seconds()
        ran, before = time.thread_time(), time.perf_counter()
        jax.block_until_ready(run(*operands))
        passed, own = time.perf_counter() - before, time.thread_time() - ran
        behind = profile.other_threads_seconds()
        yield passed, max((own, *(s - others.get(i, 0.0) for i, s in behind.items()))) if behind else float("inf")


def _hand_over_seconds(run: Any, operands: Sequence[Any]) -> float:
    """Seconds of an ordinary call beyond the fastest one, in which all threads were awake: the mean of the middle half, since up to
    two threads have to wake up. Of several turns this is the median: in some, other programs keep threads waiting for long, in
    others they leave one core, on which no thread has to wake up."""
    jax.block_until_ready(run(*operands))
    turns = []
    for _ in range(_TURNS):
        found = []
        for _ in range(_CALLS):
            before = time.perf_counter()
            jax.block_until_ready(run(*operands))
            found.append(time.perf_counter() - before)
        turns.append(sorted(found))
    ordinary = statistics.median(statistics.fmean(found[_CALLS // 4 : -_CALLS // 4]) for found in turns)
    return ordinary - min(found[0] for found in turns)


def programs(workers: int) -> Iterator[MeasuredProgram]:
    """All that is measured of XLA, and of our calls in jitted functions."""
    f32 = "float32"
    yield MeasuredProgram("xla/call", lambda x: x + 1, (((8,), f32),))
    yield MeasuredProgram("xla/kernel", _chain, (((8, 16), f32), ((16, 16), f32)), CHAIN - 1)
    yield MeasuredProgram(_HANDED_KEY, LOOPS["tanh"], ((_HANDED, f32),) * 2)
    yield MeasuredProgram("xla/while", _loop, (((16,), f32),), _STEPS)
    yield MeasuredProgram("xla/while/stored", _store_slices, ((_SLICES[1:], f32),), 4 * math.prod(_SLICES))
    yield MeasuredProgram("xla/start", _chain, (((16, 64), f32), ((64, 64), f32)), CHAIN)
    for key, rows, width, depth in (("call/short", 1, 16, 1), ("call/layer", 1, 16, CHAIN), ("call", workers * TILE, 64, 1)):
        weights = (((width, width), f32),) * depth
        yield MeasuredProgram(key, kernels.layers(rows, width, depth), (((rows, width), f32), *weights))
    yield from _indexed(workers)
    count, m, k, n = _BATCHED
    for dtype in (f32, "bfloat16"):
        batched = (((count, m, k), dtype), ((count, k, n), dtype))
        yield MeasuredProgram(f"xla/batched/{dtype}", _product(2, 1, batch=(0,)), batched, math.prod(_BATCHED))
    for dtype in (f32, "bfloat16"):
        vector = (((1, _VECTOR[0]), dtype), (_VECTOR, dtype))
        yield MeasuredProgram(f"xla/vector/{dtype}", _dot, vector, math.prod(_VECTOR))
        for rows, k, n in _TRANSPOSED:
            yield MeasuredProgram(f"xla/dot_t/{dtype}/{rows}x{k}x{n}", _product(1, 1), (((rows, k), dtype), ((n, k), dtype)))
        for rows, k, n in _GRADIENTS:
            yield MeasuredProgram(f"xla/outer/{dtype}/{rows}x{k}x{n}", _product(0, 0), (((rows, k), dtype), ((rows, n), dtype)))
    for dtype, dots in {f32: _DOTS, "bfloat16": _DOTS, "float16": _HALF_DOTS}.items():
        for rows, k, n in dots:
            yield MeasuredProgram(f"xla/dot/{dtype}/{rows}x{k}x{n}", _dot, (((rows, k), dtype), ((k, n), dtype)))
    for dtype in (f32, *sorted(NARROW)):
        for which, (shape, axes) in _REDUCTIONS.items():
            yield MeasuredProgram(f"xla/reduce/{which}/{dtype}", _sum(axes), ((shape, dtype),), math.prod(shape))
        for name in LOOPS if dtype == f32 else _NARROW_LOOPS:
            yield MeasuredProgram(f"xla/loop/{name}/{dtype}", LOOPS[name], ((_LOOP, dtype),) * 2, math.prod(_LOOP))


def _indexed(workers: int) -> Iterator[MeasuredProgram]:
    """Reads and folds by indices, and products of each row: ours on one worker, XLA's on the whole machine."""
    f32 = "float32"
    for width in kernels.ACCESSED:
        rows = workers * _ACCESSED // (4 * width)
        for level, size in _TABLES.items():
            n = size // (4 * width)
            table = (((rows,), f"ids/{n}"), ((n, width), f32))
            yield MeasuredProgram(f"take/{level}/{width}", kernels.taker(rows, n, width, workers), table, rows / workers)
        n, x = _TABLES["l2"] // (4 * width), ((rows, width), f32)
        unsorted = kernels.folder(rows, n, width, workers, is_sorted=False)
        yield MeasuredProgram(f"folded/{width}", unsorted, (((rows,), f"ids/{n}"), x), rows / workers)
        n = rows // _RUN
        runs = kernels.folder(rows, n, width, workers, is_sorted=True)
        yield MeasuredProgram(f"runs/{width}", runs, (((rows,), f"sorted/{n}"), x), rows / workers)
    rows = workers * _ORDERED
    yield MeasuredProgram(
        "order", functools.partial(call.order, n=rows // _RUN), (((rows,), f"ids/{rows // _RUN}"),), rows / workers
    )
    rows, (n, count) = workers * _ACCESSED // (4 * _PICKED[0]), _PICKED
    inside = (((count,), f"ids/{n}"), ((rows, n), f32))
    yield MeasuredProgram("picked", kernels.picker(rows, n, count, workers), inside, rows * count / workers)
    for m, k, n in kernels.SMALL_PRODUCTS:
        rows = workers * _MULTIPLIED // (4 * m * k)
        yield MeasuredProgram(f"dot/{m}x{k}x{n}", kernels.multiplier(rows, m, k, workers), (((rows, m, k), f32),), rows / workers)
    for key, (rows, n, width) in {**{str(d[2]): d for d in _INDEXED}, "far": _FAR}.items():
        ids, row = ((rows,), f"ids/{n}"), (width,) if width > 1 else ()
        yield MeasuredProgram(f"xla/gather/{key}", lambda i, x: x[i], (ids, ((n, *row), f32)), rows)
        if key != "far":
            yield MeasuredProgram(f"xla/scatter/{key}", _segment_sum(n), (ids, ((rows, *row), f32)), rows)


def _segment_sum(n: int) -> Function:
    return lambda i, x: jnp.zeros((n, *x.shape[1:]), x.dtype).at[i].add(x)


def _product(of_x: int, of_y: int, batch: tuple[int, ...] = ()) -> Function:
    """A product that contracts dimension ``of_x`` of x and ``of_y`` of y."""
    return lambda x, y: lax.dot_general(x, y, (((of_x,), (of_y,)), (batch, batch)))


_dot = _product(1, 0)


def _loop(x: Any) -> Any:
    return lax.fori_loop(0, _STEPS, lambda _, x: x * 0.75 + 1, x)


def _store_slices(x: Any) -> Any:
    def step(carry: Any, _: None) -> tuple[Any, Any]:
        carry = carry * 0.75 + 1
        return carry, carry

    return lax.scan(step, x, None, length=_SLICES[0])


def _chain(x: Any, w: Any) -> Any:
    for _ in range(CHAIN):
        x = _dot(x, w)
    return x


def _sum(axes: tuple[int, ...]) -> Function:
    return lambda x: x.sum(axes)


# --- Where ``jax.jit`` rounds 16-bit results --------------------------------------------------------------------------------------

# JAX 0.10.2, 0.11.2 and 0.12.0 round every result, except that a bfloat16 result that is converted to float32 keeps its digits: XLA
# drops a conversion of its own in front of one of the program's.
KNOWN_ROUNDING = Rounding(NARROW, frozenset({"float16"}))
_SUFFIX = ".rounding.json"
_FORMAT = "1"  # of the program below, and of its stored answer


@functools.cache
def rounding_at_hand() -> Rounding:
    """The ``Rounding`` of ``jit`` on this CPU, found with a small program; ``KNOWN_ROUNDING`` without a CPU backend. The answer
    depends on the versions and flags of XLA and the CPU, and is kept on disk beside the machine's profile."""
    if not _compat.has_cpu_backend():
        return KNOWN_ROUNDING
    folder = config.cache_dir()
    cache = Cache(None if folder is None else folder.absolute() / "profiles", what="answers of XLA", made="asked")
    try:
        found = json.loads(cache.get(_identity(), _SUFFIX, _asked))
        return Rounding(frozenset(found["results"]), frozenset(found["widened"]))
    except Exception as error:  # neither a strange backend nor a strange file may fail a user's program
        config.logger.warning("asking XLA where it rounds 16-bit results failed, so all of them are rounded: %s", error)
        return Rounding()


def ask_rounding() -> Rounding:
    """Run the program."""
    found = in_own_thread(_ask, "kitsune_jax rounding")
    if isinstance(found, BaseException):
        raise RuntimeError(f"{type(found).__name__}: {found}") from found
    return found


def _ask() -> Rounding:
    numbers = np.linspace(1.0, 2.0, 257)
    with jax.default_device(jax.devices("cpu")[0]):
        answers = {name: _answer(jnp.dtype(name), numbers) for name in sorted(NARROW)}
    return Rounding(
        frozenset(name for name, (rounds, _) in answers.items() if rounds),
        frozenset(name for name, (_, rounds) in answers.items() if rounds),
    )


def _answer(dtype: Any, numbers: np.ndarray) -> tuple[bool, bool]:
    """(whether a result that an operator of the same dtype reads is rounded, whether one that is converted to float32 is)."""
    a, b = (x.astype(dtype) for x in (numbers, numbers[::-1] / 3))
    error, product = (np.asarray(x) for x in jax.jit(_errors)(a, b))
    exact = a.astype(np.float32) * b.astype(np.float32)
    return bool(np.any(error != 0)), bool(np.any(product != exact))


def _errors(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The error of a sum (Knuth's TwoSum), which is 0 where ``s`` keeps its digits, and a product in float32."""
    s = a + b
    t = s - a
    return (a - (s - t)) + (b - t), (a * b).astype(jnp.float32)


def _asked() -> bytes:
    return json.dumps({name: sorted(value) for name, value in dataclasses.asdict(ask_rounding()).items()}).encode()


def _identity() -> str:
    return cache_key(
        format=_FORMAT,
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        ml_dtypes=ml_dtypes.__version__,
        flags=config.xla_flags(),
        cpu=profile.model_name(),
    )
