"""The custom calls of the CPU target: the extension that runs them, their registration with XLA, and the thread they run on.

Comes in: an encoded program and its operands. Goes out: the results of its custom call; ``available``, and ``why_not`` where calls
cannot run. Invariant: ``available`` raises nothing for a missing or mismatched extension: one warning names it, and plain JAX runs.
"""

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
from kitsune_jax.errors import MissingExtensionWarning
from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import COPIES, FREE, SCATTER
from kitsune_jax.targets.cpu import bytecode

# --- The extension ----------------------------------------------------------------------------------------------------------------

TARGET_NAME = "kitsune_cpu"
ORDER_NAME = "kitsune_cpu_order"

_lock = threading.Lock()
_state: tuple[Any, str] | None = None  # (extension or None, why not)


def _load() -> tuple[Any, str]:
    """The extension module, registered with XLA, and ""; or None and the reason. Imports and warns once."""
    global _state
    if _state is not None:
        return _state
    with _lock:
        if _state is None:
            _state = _find()
            if _state[0] is None:
                advice = "pip install --force-reinstall --no-deps --no-cache-dir kitsune_jax"
                message = (
                    f"kitsune_jax runs without its CPU pipelines: {_state[1]}. Functions run as plain JAX. To repair it: {advice}"
                )
                warnings.warn(message, MissingExtensionWarning, stacklevel=3)
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
    except Exception as error:  # an XLA that refuses the FFI version the extension was built for
        return None, f"this JAX {jax.__version__} does not take the extension kitsune_jax._cpu ({error})"
    return extension, ""


def available() -> bool:
    """Whether CPU programs can run here. The first call, from any thread, registers the FFI targets (``TARGET_NAME``,
    ``ORDER_NAME``) for the CPU, or warns (``MissingExtensionWarning``) that they cannot run."""
    return _load()[0] is not None


def why_not() -> str:
    """Why ``available()`` is False, as a clause; "" when it is True."""
    return _load()[1]


def extension() -> Any | None:
    """The extension module, or None where it is missing."""
    return _load()[0]


def isa() -> str:
    """The kernel table in use: "avx2", ...; "generic" without the extension."""
    found = extension()
    return "generic" if found is None else str(found.isa())


def isas() -> tuple[str, ...]:
    """Every kernel table that this CPU can run, best first."""
    found = extension()
    return () if found is None else tuple(found.available_isas())


@functools.cache
def digest() -> str:
    """A hash of the extension's file, since another build may have other kernels; "" where it cannot be read."""
    found = extension()
    if found is None:
        return ""
    try:
        return hashlib.sha256(pathlib.Path(found.__file__).read_bytes()).hexdigest()
    except OSError:  # not loaded from a file: the package's version has to suffice
        return ""


def check(words: np.ndarray) -> str:
    """Errors that the extension finds in a program (int64 words), by the check that runs when XLA makes an executable; "" for a
    valid program, and where the extension is missing."""
    found = extension()
    return "" if found is None else str(found.validate(words))


# --- The thread that runs a program -----------------------------------------------------------------------------------------------

# ``flop_count() < 1000`` in XLA's CPU client (JAX 0.10 to 0.12): x + 1 took 5.5 us for 900 elements, 7.7 for 1100; the sum 0.1.
_CHEAP = 1000
# Calls modelled to take this long run on XLA's own thread, so that the caller's Python goes on. It costs 20 us and the wake-up of
# threads: an LSTM of 1.3 ms took 1.65 to 2.3 ms, one of 8 ms 5 % longer (Xeon, 2 cores).
LONG_SECONDS = 10e-3
_READERS = frozenset({"reduce", "argreduce", "cumulative", SCATTER})  # families with one operation per element that they read


@dataclasses.dataclass(frozen=True)
class FlopCounts:
    """Operations of each op of a program, as XLA counts them; empty where the program is unknown.

    XLA's CPU client runs a program of fewer than a thousand operations on the calling thread, and hands any other to a thread of
    its own, for which the caller waits. A custom call counts as no operations, so the caller runs a program that is one short call;
    a long call gets an operand that makes XLA hand it over (``_unread_operand``).
    """

    flops: tuple[int, ...] = ()
    total: int = 0

    def is_of(self, graph: Graph) -> bool:
        """Whether ``graph`` is the program itself. (A region of less than half of a program is planned as a separate graph: the
        rest of the program keeps threads awake and caches full, and the ops are numbered differently.)"""
        return len(graph.ops) == len(self.flops)

    def avoids_hand_over(self, ops: Collection[int]) -> bool:
        """Whether XLA hands the program to a thread of its own because of the operations of ``ops``."""
        return self.total >= _CHEAP > self.total - sum(self.flops[i] for i in ops)


def count_flops(graph: Graph) -> FlopCounts:
    flops = tuple(_flops(graph, op) for op in graph.ops)
    return FlopCounts(flops, sum(flops))


def _flops(graph: Graph, op: Op) -> int:
    if op.kind == "opaque":
        return _CHEAP  # unknown: count it as expensive
    if op.body is not None:
        return count_flops(op.body).total
    family = OPS[op.kind].family
    if family in FREE or family in COPIES:
        return 0
    size = max(graph.values[v].size for v in (op.inputs if family in _READERS else op.outputs))
    if family == "dot":
        shape = graph.values[op.inputs[0]].shape
        return 2 * size * math.prod(shape[d] for d in op["lhs_contract"])
    return size


# --- Binding the custom calls -----------------------------------------------------------------------------------------------------

# Of ``_unread_operand``: no number repeated and no count, for either of which XLA would compile a kernel.
_ALTERNATING = np.tile(np.array([1, 0], np.float32), 32)


def call(
    program: np.ndarray, args: Sequence[Any], out_avals: Sequence[Any], seconds: float = 0.0, label: str = TARGET_NAME
) -> list[Any]:
    """Bind the custom call that runs ``program`` (int64 words, ``bytecode.encode``) on ``args``, for ``seconds`` by the model.
    ``label``: its name in profilers.

    ``out_avals`` give shape and dtype of each result (``jax.ShapeDtypeStruct`` or the abstract values of the equations replaced,
    which also carry what ``shard_map`` tracks). Returns the results, one per aval. Arrays are dense and row-major. Raises
    ``RuntimeError`` where the extension is missing.

    The call has one more result, a byte that nobody reads. Without it, XLA miscompiles a loop whose body is this call alone: it
    simplifies the tuple of all results to the call, which becomes the root of the body, and loop-invariant code motion then takes
    "operand i of the root is carry i" for "carry i never changes". A long call also has one more operand (``_unread_operand``).
    """
    if not available():
        raise RuntimeError(f"CPU pipelines cannot run here: {why_not()}")
    unread = _compat.aval_like(out_avals[0], (1,), np.uint8)
    more = _unread_operand(args) if seconds >= LONG_SECONDS else []
    outs = _compat.named_ffi_call(label, TARGET_NAME, [*out_avals, unread])(*args, *more, program=program)
    return outs[: len(out_avals)]


def _unread_operand(args: Sequence[Any]) -> list[Any]:
    """An operand that nobody reads, made by 3 071 operations in a microsecond; [] for a call without operands.

    Without it XLA runs the call on the calling thread (``FlopCounts``): the user's Python, and Ctrl-C, would wait until the call
    ends, where other programs return at once. It is a Fourier transform of a constant: XLA has a library for it, does not fold it,
    and computes equal ones of a program once. For an addition LLVM would compile a kernel, in 20 of the 30 ms that it took to
    compile a program of one call (Zen 4, 2 cores).
    """
    if not args:
        return []
    lengths = (_ALTERNATING.size,)
    made = lax.fft_p.bind(_compat.constant(_ALTERNATING), fft_type=lax.FftType.RFFT, fft_lengths=lengths)
    return [_compat.varying_like(made, jax.typeof(args[0]))]


def order(ids: Any, n: int) -> Any:
    """``Target.order`` by the custom call ``kitsune_cpu_order``. Raises ``RuntimeError`` where the extension is missing."""
    if not available():
        raise RuntimeError(f"CPU pipelines cannot run here: {why_not()}")
    result = _compat.aval_like(jax.typeof(ids), (ids.size,), np.int32)
    (positions,) = _compat.named_ffi_call("kitsune:order", ORDER_NAME, [result])(ids, n=np.int64(n))
    return positions
