"""What the elementwise operations of one of XLA's fused loops take together.

Comes in: a ``Profile``, the operations of a kernel. Goes out: seconds of the whole machine, beside what the loop reads and writes.
A core works on several iterations of a loop at once. Operations that do not wait for each other keep its units busy; a chain of
them, as layers are, waits for results unless there are iterations enough to go on with. A loop whose operations are busy for
``busy`` and whose longest chain waits for ``wait`` takes ``busy * wait / (window + busy)``, and ``busy`` at least: as many
iterations share the wait as fit into a window. In a chain of six functions each takes two to three times as long as alone (JAX 0.12
on a Xeon with AMX: 1, 2, 3 and 5 tanhs took 0.3, 0.8, 1.5 and 3.3 ns an element of one thread; beside each other 0.25 each).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection

from kitsune_jax.graph import Op
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import RegionCost
from kitsune_jax.profile import xla
from kitsune_jax.profile.model import Profile, table

NARROW = ("bfloat16", "float16")
FAMILIES = ("pointwise", "convert")
_TANH_FLOPS = 14.0  # XLA's code for what was not measured, by its operations
_SIMPLE = 4.0  # operations up to which an op costs no more than arithmetic
ARITHMETIC = 5  # operations of the loop "arithmetic" beyond those of "move"
# Instructions of a tanh for each of arithmetic: what the latter keeps busy hides behind the memory in any loop that is short.
_OF_TANH = 1 / 28
# XLA's CPU compiler gives a loop a second thread where it reads and writes this much, or where it has more operations than bytes
# and its costs (an operation 1, a function 2, a byte 10) come to this: ``parallel_task_assignment.cc``, tried with 1 to 19 sums and
# products of 2 000 to 150 000 numbers in each dtype (JAX 0.12).
_SHARED_BYTES, _SHARED_COST = 2 * (256 << 10), 2 * 100_000
_FUNCTION_COST, _BYTE_COST = 2, 10
_FUNCTIONS = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "tanh", "erf", "sqrt", "rsqrt", "cbrt", "pow", "sin", "cos", "tan", "atan2"}
)
_EXPANDED = {"logistic": 3}  # functions that are made of another one and of so many operations
# What a chain of six functions takes more than one of two: three times as long where they never wait, nine where they always do.
_LEAST, _MOST = 3.05, 8.0
_COMPARED = frozenset({"max", "min"})  # of narrow numbers, as they are


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Seconds of the whole machine for an element. ``busy``: in which its units have work. ``wait``: from the operands to
    the result, shared by the elements of a vector."""

    busy: float
    wait: float

    def __add__(self, other: Work) -> Work:
        return Work(self.busy + other.busy, self.wait + other.wait)

    def times(self, n: float) -> Work:
        return Work(n * self.busy, n * self.wait)


@functools.lru_cache(maxsize=16)
def fused(profile: Profile) -> Fused:
    """The loops of the machine of ``profile``, made once."""
    return Fused(profile)


class Fused:
    """``window``: seconds of ``busy`` that a core keeps under way."""

    def __init__(self, profile: Profile):
        self._numbers = known = table(profile)
        self._move = move = known["xla/loop/move/float32"]
        two, six = self._beyond("xla/loop/tanh/float32"), self._beyond("xla/chain/tanh/float32")
        alone = (known["xla/beside/tanh/float32"] - move) / xla.BESIDE
        alone = min(max(alone, two / 6), two / 2)
        grown = min(max(six / two, _LEAST), _MOST)
        # two = 4 busy wait / (window + 2 busy), six = 36 busy wait / (window + 6 busy)
        self.window = alone * (6 * grown - 18) / (9 - grown)
        self._tanh = Work(alone, two * (self.window + 2 * alone) / (4 * alone))
        self._arithmetic = {home: self._simple(home) for home in ("float32", *NARROW)}
        self.work = functools.lru_cache(maxsize=1024)(self._work)

    def seconds(self, work: Work, elements: float = 1) -> float:
        """``work`` of so many elements."""
        return max(work.busy, work.busy * work.wait / max(self.window * elements + work.busy, 1e-30))

    def op(self, kind: str, dtype: str) -> float:
        """An element of an op, in a loop with nothing else in it."""
        return self.seconds(self.work(kind, dtype))

    def kernel(self, cost: RegionCost, ops: Collection[int]) -> float:
        """The elementwise operations of a kernel: what all of them keep busy, and the longest chain of them."""
        busy, longest, elements = 0.0, 0.0, 0
        wait: dict[int, float] = {}  # value -> the longest chain that ends in it
        for i in sorted(ops):
            op = cost.graph.ops[i]
            before = max((wait.get(v, 0.0) for v in op.inputs), default=0.0)
            if cost.family(i) in FAMILIES:
                size = cost.graph.values[op.outputs[0]].size
                dtype = cost.graph.values[op.inputs[0] if op.inputs else op.outputs[0]].dtype
                work = self.work(op.kind, dtype).times(size * _repeated(op) * hashes(op))
                busy, before, elements = busy + work.busy, before + work.wait, max(elements, size)
            wait.update(dict.fromkeys(op.outputs, before))
            longest = max(longest, before)
        return self.seconds(Work(busy, longest), elements)

    def one_thread(self, cost: RegionCost, ops: Collection[int], moved: int) -> bool:
        """Does XLA give a loop of ``ops``, which reads and writes ``moved`` bytes, one thread?"""
        flops = functions = 0
        for i in ops:
            if cost.family(i) not in FAMILIES:
                continue
            op = cost.graph.ops[i]
            size = cost.graph.values[op.outputs[0]].size * _repeated(op)
            dtype = cost.graph.values[op.inputs[0] if op.inputs else op.outputs[0]].dtype
            converted = 2 * size if self._is_converted(dtype) else 0  # each operand, or all but one constant, and the result
            if is_function(op.kind):
                functions, flops = functions + size, flops + converted + _EXPANDED.get(op.kind, 0) * size
            else:
                flops += size + converted
        if flops <= moved:
            return moved < _SHARED_BYTES
        return flops + _FUNCTION_COST * functions + _BYTE_COST * moved < _SHARED_COST

    def _is_converted(self, dtype: str) -> bool:
        """Is arithmetic on ``dtype`` done in float32? That of float16 is not where the CPU has instructions for it."""
        return dtype in NARROW and self._arithmetic[dtype].busy > 2 * self._arithmetic["float32"].busy

    def _work(self, kind: str, dtype: str) -> Work:
        flops, like = (OPS[kind].flops, OPS[kind].like) if kind in OPS else (1.0, None)
        home = dtype if dtype in NARROW else "float32"
        simple = self._arithmetic[home]
        if kind in _COMPARED and home != "float32":
            simple = simple.times(0.5)
        name, as_long = like or (kind, 1.0)
        if f"xla/loop/{name}/float32" in self._numbers and name not in ("move", "arithmetic"):
            found = self._function(self._beyond(f"xla/loop/{name}/float32")).times(as_long)
        elif flops <= _SIMPLE:
            found = Work(0.0, 0.0)
        else:
            found = self._tanh.times(flops / _TANH_FLOPS)
        return (found + simple).times(2.0 if dtype == "float64" else 1.0)

    def _beyond(self, key: str) -> float:
        """What operations take that a loop has beside moving its elements."""
        return max(self._numbers[key] - self._move, 0.1 * self._move)

    def _function(self, two: float) -> Work:
        """A function of which ``two``, one after the other, take so long, and which waits as much as a tanh for what it is busy."""
        ratio = self._tanh.wait / self._tanh.busy
        busy = min((two + math.sqrt(two * two + 4 * ratio * self.window * two)) / (4 * ratio), two / 2)
        return Work(busy, ratio * busy)

    def _simple(self, home: str) -> Work:
        """Arithmetic on numbers of dtype ``home``, and their conversions: what it waits is what gelus take beyond their tanhs."""
        known, tanh = self._numbers, self._tanh
        move = known[f"xla/loop/move/{home}"]
        busy = tanh.busy * _OF_TANH
        if home != "float32":
            busy = max(busy, (known[f"xla/loop/arithmetic/{home}"] - move) / ARITHMETIC)
        count = xla.GELU_ARITHMETIC + (home != "float32")  # the tanh is converted as well
        gelu = (known[f"xla/chain/gelu/{home}"] - move) / xla.GELUS
        each = tanh.busy + count * busy
        wait = gelu * (self.window + xla.GELUS * each) / (xla.GELUS * each)
        return Work(busy, max((wait - tanh.wait) / count, busy))


def is_function(kind: str) -> bool:
    """Is an op an elementary function, or made of one?"""
    return kind in _FUNCTIONS or kind in _EXPANDED


def instructions(cost: RegionCost, ops: Collection[int]) -> int:
    """About the instructions of the body of a loop of ``ops``, of which a function is one."""
    found = 0
    for i in ops:
        if cost.family(i) in FAMILIES:
            op = cost.graph.ops[i]
            dtype = cost.graph.values[op.inputs[0] if op.inputs else op.outputs[0]].dtype
            rounded = 7 if dtype == "bfloat16" else 3 if dtype == "float16" and is_function(op.kind) else 0
            found += (1 + rounded + _EXPANDED.get(op.kind, 0)) * _repeated(op)
    return found


def hashes(op: Op) -> float:
    """Of an op that hashes, how many of XLA's it is: two that take a word each of the same result are one."""
    return 0.5 if op.kind == "threefry2x32" and op["word"] != "xor" else 1.0


def _repeated(op: Op) -> int:
    """Multiplications of a power by a fixed integer, which are as many operations."""
    if op.kind != "integer_pow":
        return 1
    power = abs(op["y"])
    return max(1, power.bit_length() + power.bit_count() - 2)
