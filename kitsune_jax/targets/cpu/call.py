"""The custom calls of the CPU target: the extension, its registration with XLA, and which thread runs a call."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import math
import pathlib
import threading
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import COPIES, FREE, SCATTER
from kitsune_jax.targets.cpu import bytecode

# ----------------------------------------------------------------------------------------------------------------------------------
# The CPU extension as seen from Python: whether it is there, and its registration with XLA.
#
# Comes in: nothing. Goes out: ``available()``, ``register()`` and the names of the FFI targets. Invariant: importing this module
# and calling its functions never fails because of a missing or mismatched extension; that is said once, as a warning, and plain
# JAX runs.
# ----------------------------------------------------------------------------------------------------------------------------------

TARGET_NAME = "kitsune_cpu"
ORDER_NAME = "kitsune_cpu_order"

_lock = threading.Lock()
_state: tuple[Any, str] | None = None  # (extension or None, why not)


def _load() -> tuple[Any, str]:
    """The extension module, known to XLA, and ""; or None and the reason. Looked for, and warned about, once."""
    global _state
    if _state is not None:
        return _state
    with _lock:
        if _state is None:
            _state = _find()
            if _state[0] is None:
                advice = "pip install --force-reinstall --no-deps --no-cache-dir kitsune_jax"
                warnings.warn(
                    f"kitsune_jax runs without its CPU pipelines: {_state[1]}. Functions run as plain JAX. To repair it: {advice}",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return _state


def _find() -> tuple[Any, str]:
    try:
        extension = importlib.import_module("kitsune_jax._cpu")
        version = extension.format_version()
    except Exception as error:  # a half-built extension can fail in any way, and none may reach the user's program
        return None, f"the extension kitsune_jax._cpu cannot be imported ({error})"
    if version != bytecode.VERSION:
        return None, f"the extension reads program format {version}, but this package writes {bytecode.VERSION}: different builds"
    try:
        jax.ffi.register_ffi_target(TARGET_NAME, extension.handlers(), platform="cpu")
        jax.ffi.register_ffi_target(ORDER_NAME, extension.order_handler(), platform="cpu")
    except Exception as error:  # an XLA that refuses the version of the FFI which the extension was built for
        return None, f"this JAX {jax.__version__} does not take the extension kitsune_jax._cpu ({error})"
    return extension, ""


def available() -> bool:
    """Whether CPU programs can run here. The first call warns (RuntimeWarning) if they cannot."""
    return _load()[0] is not None


def why_not() -> str:
    """Why ``available()`` is False, as a clause; "" when it is True."""
    return _load()[1]


def register() -> bool:
    """Registers the FFI targets (``TARGET_NAME``, ``ORDER_NAME``) for the CPU, once; safe from any thread. Returns ``available()``.

    >>> from kitsune_jax.targets.cpu import runtime
    >>> runtime.register() == runtime.available()
    True
    """
    return available()


def extension() -> Any | None:
    """The extension module, or None where it is missing."""
    return _load()[0]


def isa() -> str:
    """The kernel table that programs use from now on: "avx2", ...; "generic" without the extension."""
    found = _load()[0]
    return "generic" if found is None else str(found.isa())


def isas() -> tuple[str, ...]:
    """Every kernel table that this CPU can run, best first."""
    found = _load()[0]
    return () if found is None else tuple(found.available_isas())


@functools.cache
def digest() -> str:
    """A hash of the extension's file: another build may have other kernels."""
    found = _load()[0]
    if found is None:
        return ""
    try:
        return hashlib.sha256(pathlib.Path(found.__file__).read_bytes()).hexdigest()
    except OSError:  # loaded from somewhere that is no file: the package's version has to do
        return ""


def check(words: np.ndarray) -> str:
    """What the extension finds wrong with a program (int64 words), by the code that checks it when XLA makes an executable; "" for
    a valid program, and where the extension is missing."""
    extension = _load()[0]
    return "" if extension is None else str(extension.validate(words))


def calls() -> int:
    """Custom calls executed so far in this process; 0 without the extension."""
    extension = _load()[0]
    return 0 if extension is None else int(extension.calls())


# ----------------------------------------------------------------------------------------------------------------------------------
# Who runs a program of XLA:CPU: the thread that calls it, or another one that has to wake up first.
#
# Comes in: the Graph of a whole program. Goes out: ``Handed``. XLA's CPU client counts the operations of a compiled program and
# runs one of fewer than a thousand where it is called; any other it hands to a thread of its own, for which the caller waits. A
# custom call counts as nothing: where a short pipeline is all that a program has to do, the caller runs it. A long one is given
# as many operations as it takes to be handed over (``targets.cpu.call``).
# ----------------------------------------------------------------------------------------------------------------------------------

# ``flop_count() < 1000`` in XLA's CPU client (JAX 0.12): x + 1 took 5.5 us for 900 elements and 7.7 for 1100, whose sum takes 0.1.
_CHEAP = 1000
# Calls that are modelled to take so long are handed over: the caller's Python goes on meanwhile. It takes 20 us, and
# sometimes as long again as the call: its threads have slept, and the system wakes two of them on one core. An LSTM of 1.3 ms took
# 1.65 on the average, up to 2.3 for seconds on end, one of 8 ms 5 % longer (Xeon with AMX, 2 cores).
LONG_SECONDS = 10e-3
_READERS = frozenset({"reduce", "argreduce", "cumulative", SCATTER})  # families with an operation for each element that they read


@dataclasses.dataclass(frozen=True)
class Handed:
    """``flops``: of each op of a program, as XLA counts them; none where nothing is known of the program."""

    flops: tuple[int, ...] = ()
    total: int = 0

    def is_of(self, graph: Graph) -> bool:
        """Is this ``graph`` the program itself? A region of less than half of one is planned as a graph of its own: what runs
        beside it keeps threads awake and caches full, and its ops have other numbers."""
        return len(graph.ops) == len(self.flops)

    def without(self, ops: Collection[int]) -> bool:
        """Is the program handed to another thread, but not what is left of it without ``ops``?"""
        return self.total >= _CHEAP > self.total - sum(self.flops[i] for i in ops)


def handed(graph: Graph) -> Handed:
    flops = tuple(_flops(graph, op) for op in graph.ops)
    return Handed(flops, sum(flops))


def _flops(graph: Graph, op: Op) -> int:
    if op.kind == "opaque":
        return _CHEAP  # nobody knows
    if op.body is not None:
        return handed(op.body).total
    family = OPS[op.kind].family
    if family in FREE or family in COPIES:
        return 0
    size = max(graph.values[v].size for v in (op.inputs if family in _READERS else op.outputs))
    if family == "dot":
        shape = graph.values[op.inputs[0]].shape
        return 2 * size * math.prod(shape[d] for d in op["lhs_contract"])
    return size


# ----------------------------------------------------------------------------------------------------------------------------------
# The custom calls of a CPU program and of the order of its stream, as JAX sees them.
# ----------------------------------------------------------------------------------------------------------------------------------

# XLA:CPU runs a program of fewer operations than this at once, in the thread that asks for it (1000, JAX 0.10 to 0.12).
_OPERATIONS = 1024


def call(program: np.ndarray, args: Sequence[Any], out_avals: Sequence[Any], seconds: float = 0.0) -> list[Any]:
    """Bind the custom call that runs ``program`` (int64 words, ``bytecode.encode``) on ``args``, for ``seconds`` by the model.

    ``out_avals`` give shape and dtype of each result (``jax.ShapeDtypeStruct`` or the abstract values of the equations replaced,
    which also carry what ``shard_map`` tracks). Returns the results, one per aval. Arrays are dense and row-major. Raises
    ``RuntimeError`` where the extension is missing.

    The call has one more result, a byte that nobody reads. Without it, a loop whose body is nothing but this call would be compiled
    wrongly: XLA simplifies the tuple of all results of a call to the call itself, which makes the call the root of the body, and
    its loop-invariant code motion then takes "operand i of the root is carry i" for "carry i never changes".

    A long call has one more operand, which nobody reads: see ``_operations``.
    """
    if not register():
        raise RuntimeError(f"CPU pipelines cannot run here: {why_not()}")
    unread = _compat.aval_like(out_avals[0], (1,), np.uint8)
    more = _operations(args) if seconds >= LONG_SECONDS else []
    outs = jax.ffi.ffi_call(TARGET_NAME, [*out_avals, unread])(*args, *more, program=program)
    return list(outs)[: len(out_avals)]


def _operations(args: Sequence[Any]) -> list[Any]:
    """An array that takes XLA ``_OPERATIONS`` operations to make of an element of ``args``, less than a microsecond; [] where there
    is no element.

    XLA:CPU counts the operations of a program and knows none of a custom call. A program of few operations it takes for cheap, and
    runs it in the thread that asks for it: the user's Python would stand still for as long as the call takes, where other programs
    return at once, and Ctrl-C would wait for its end.
    """
    some = next((x for x in args if x.size), None)
    if some is None:
        return []
    first = lax.slice(some, (0,) * some.ndim, (1,) * some.ndim).reshape(1).astype(np.int32)
    return [lax.iota(np.int32, _OPERATIONS) + first]


def order(ids: Any, n: int) -> Any:
    """``Target.order`` by the custom call ``kitsune_cpu_order``. Raises ``RuntimeError`` where the extension is missing."""
    if not register():
        raise RuntimeError(f"CPU pipelines cannot run here: {why_not()}")
    result = _compat.aval_like(jax.typeof(ids), (ids.size,), np.int32)
    return jax.ffi.ffi_call(ORDER_NAME, result)(ids, n=np.int64(n))
