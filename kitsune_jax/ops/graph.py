"""The Graph: the data that every pass after capture reads.

Comes in: values and ops, from capture. Goes out: a ``Graph`` of frozen, comparable and hashable dataclasses; and graph algorithms.
Invariants, checked by ``Graph.validate``: value ids are indices into ``Graph.values``; every value is defined once (graph input,
literal, or output of one op); ops are in topological order. Nothing here knows JAX's equations or a device.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

Scalar: TypeAlias = bool | int | float
Param: TypeAlias = Any  # None, bool, int, float, str, or a (nested) tuple of those: hashable, and JSON has them


C = TypeVar("C", bound=type[Any])


def quick(cls: C) -> C:
    """A frozen dataclass with slots whose objects are made by the thousand, with an ``__init__`` that takes half the time: it sets
    each slot by its descriptor, where that of ``dataclasses`` has ``object.__setattr__`` look the slot up."""
    fields = dataclasses.fields(cls)
    given = ", ".join(f.name if f.default is dataclasses.MISSING else f"{f.name}=_default_{f.name}" for f in fields)
    sets = "".join(f"\n    _set_{f.name}(self, {f.name})" for f in fields)
    names: dict[str, Any] = {f"_set_{f.name}": getattr(cls, f.name).__set__ for f in fields}
    names |= {f"_default_{f.name}": f.default for f in fields}
    exec(f"def __init__(self, {given}):{sets}", names)  # as ``dataclasses`` does
    names["__init__"].__annotations__ = cls.__init__.__annotations__
    type.__setattr__(cls, "__init__", names["__init__"])
    return cls


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An array. ``literal`` is set for rank-0 constants only (a Python scalar, already representable in ``dtype``)."""

    shape: tuple[int, ...]
    dtype: str
    literal: Scalar | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        if self.literal is not None:
            return f"{self.literal}:{self.dtype}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One operation. ``kind`` is a key of ``kitsune_jax.ops.table.OPS``, or ``"opaque"`` for a primitive outside the table.

    ``params`` is a name-sorted tuple of pairs. ``source`` is the user's line ("model.py:12 (mlp)"). ``reason``: why an opaque op is
    opaque. ``label``: the name that the user knows (the JAX primitive's). ``body``: one step of a loop (kind ``"scan"``,
    ``ops.loops``).
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[tuple[str, Param], ...] = ()
    source: str = ""
    reason: str = ""
    label: str = ""
    body: Graph | None = None

    def __getitem__(self, name: str) -> Param:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(f"{self.kind} has no parameter {name!r}")


def make_params(**params: Param) -> tuple[tuple[str, Param], ...]:
    """Canonical form of op parameters: sorted by name, lists and ranges made tuples, NumPy integers made Python ones."""
    return tuple(sorted((k, _freeze(v)) for k, v in params.items()))


def _freeze(x: Any) -> Param:
    if isinstance(x, (list, tuple, range)):
        return tuple([v if type(v) is int else _freeze(v) for v in x])
    if x is None or isinstance(x, (bool, str)):
        return x
    if hasattr(x, "__index__"):
        return int(x)
    return float(x)


class _Hashed:
    """A place for the hash of a graph, which takes milliseconds. No field: a copy in another process has another hash."""

    __slots__ = ("_hash",)
    _hash: int


@dataclasses.dataclass(frozen=True, slots=True)
class Graph(_Hashed):
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple[Op, ...]

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash((self.values, self.inputs, self.outputs, self.ops)))
            return self._hash

    def producers(self) -> dict[int, int]:
        """value id -> index of the op that defines it (absent for inputs and literals)."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}

    def consumers(self) -> dict[int, tuple[int, ...]]:
        """value id -> indices of the ops that read it, ascending, each once."""
        out: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            for v in dict.fromkeys(op.inputs):
                out.setdefault(v, []).append(i)
        return {v: tuple(ops) for v, ops in out.items()}

    def validate(self) -> None:
        """Raise ``ValueError`` if an invariant of this module is broken."""
        defined = set(self.inputs) | {i for i, v in enumerate(self.values) if v.literal is not None}
        if len(set(self.inputs)) != len(self.inputs):
            raise ValueError("a graph input is listed twice")
        for i, op in enumerate(self.ops):
            for v in op.inputs:
                if v not in defined:
                    raise ValueError(f"op {i} ({op.kind}) reads value {v} before it is defined")
            for v in op.outputs:
                if not 0 <= v < len(self.values):
                    raise ValueError(f"op {i} ({op.kind}) defines unknown value {v}")
                if v in defined:
                    raise ValueError(f"op {i} ({op.kind}) defines value {v} again")
                defined.add(v)
            if op.body is not None:
                op.body.validate()
        for v in self.outputs:
            if v not in defined:
                raise ValueError(f"graph output {v} is never defined")

    def __str__(self) -> str:
        def name(v: int) -> str:
            val = self.values[v]
            return str(val) if val.literal is not None else f"%{v}"

        lines = [f"graph({', '.join(f'%{v}:{self.values[v]}' for v in self.inputs)})"]
        for op in self.ops:
            outs = ", ".join(f"%{v}:{self.values[v]}" for v in op.outputs)
            params = ", ".join(f"{k}={v}" for k, v in op.params)
            lines.append(f"  {outs} = {op.kind}({', '.join(map(name, op.inputs))}) {{{params}}}  # {op.source}")
            if op.body is not None:
                lines += [f"    {line}" for line in str(op.body).splitlines()]
        lines.append(f"  return {', '.join(map(name, self.outputs))}")
        return "\n".join(lines)


def reached(start: Iterable[int], near: Callable[[int], Iterable[int]]) -> set[int]:
    """``start``, and everything to which ``near`` leads from there, step by step.

    >>> reached([1], lambda n: [2 * n] if n < 8 else [])
    {8, 1, 2, 4}
    """
    found = set(start)
    work = list(found)
    while work:
        new = set(near(work.pop())) - found
        found |= new
        work += new
    return found


class DisjointSets:
    """Sets that are joined. Every key is in one, at first by itself."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def root(self, key: Hashable) -> Hashable:
        """The key that represents the set of ``key``."""
        while (parent := self._parent.get(key, key)) != key:
            self._parent[key] = self._parent.get(parent, parent)
            key = parent
        return key

    def join(self, keys: Sequence[Hashable]) -> None:
        for key in keys[1:]:
            if (root := self.root(key)) != (first := self.root(keys[0])):
                self._parent[root] = first


def topological(needs: Sequence[Collection[int]], rank: Sequence[int]) -> list[int]:
    """Nodes in an order in which each comes after those it needs, the lowest ``rank`` first (Kahn's algorithm).

    A node that depends on itself, or on one that does, is left out.

    >>> topological([{1}, set(), {2}], rank=[0, 1, 2])
    [1, 0]
    """
    readers: list[list[int]] = [[] for _ in needs]
    for node, before in enumerate(needs):
        for other in before:
            readers[other].append(node)
    missing = [len(before) for before in needs]
    ready = [(rank[node], node) for node, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, (rank[reader], reader))
    return order


CONSTANT = "constant"  # the label of an opaque op without inputs whose result, an array of integers, is known where it is lowered


def is_constant(graph: Graph, producers: Mapping[int, int], v: int) -> bool:
    """Is value ``v`` the same in every call, and known: made of arrays that are known (``CONSTANT``), by operators of the table?"""
    wanted, seen, found = [v], set[int](), False
    while wanted:
        x = wanted.pop()
        if x in seen or graph.values[x].literal is not None:
            continue
        seen.add(x)
        if x not in producers:
            return False
        op = graph.ops[producers[x]]
        if op.kind == "opaque" and op.label != CONSTANT or op.body is not None:
            return False
        found |= op.kind == "opaque"
        wanted += op.inputs
    return found
