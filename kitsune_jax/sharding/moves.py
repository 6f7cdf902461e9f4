"""Slices, padding and concatenation along a dimension that is divided among devices: each gets the elements of its part alone. And
reversed and cumulative dimensions, whose parts are exchanged or continued.

Comes in: an op and the shardings of what it reads. Goes out: ``Moves``, or None where a gather sends less; and the part of this
device, by collective permutes between those that have elements and those that want them. Invariant: an element that pads a shard is
in no message.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from kitsune_jax import _compat
from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.reduce import identity

Axes: TypeAlias = tuple[str, ...]  # the mesh axes that divide one dimension, major first
Spec: TypeAlias = tuple[Axes, ...]  # those of each dimension of a value
Mesh: TypeAlias = Mapping[str, int]  # axis -> number of devices along it

KINDS = frozenset({"slice", "pad", "concatenate"})
# Families of ops whose results are divided as their operand is, and each device needs little of the others.
IN_ORDER = frozenset({"rev", "cumulative"})
_MOST_PERMUTES = 4  # in the place of one all-gather: a device waits for each


@dataclasses.dataclass(frozen=True)
class _Segment:
    """``size`` elements of a result from ``at`` on, which are those of ``value`` from ``start`` on."""

    value: int
    start: int
    size: int
    at: int


@dataclasses.dataclass(frozen=True)
class _Message:
    """The elements from ``low`` to ``high`` of the shard of device ``source``, which are those of device ``target``'s part from
    ``at`` on."""

    source: int
    target: int
    low: int
    high: int
    at: int


@dataclasses.dataclass(frozen=True)
class _Round:
    """Messages with elements of ``value``: each device sends and receives one at most. ``sends``: any to another device."""

    value: int
    sends: bool
    messages: tuple[_Message, ...]

    @property
    def size(self) -> int:
        return max(m.high - m.low for m in self.messages)


@dataclasses.dataclass(frozen=True)
class Moves:
    """``dim``: the dimension, and ``axes`` that divide it among ``devices``. ``reads``: the values that are read, with their
    shardings. ``summed``: the result is whole, as a sum over the devices of what each has of it."""

    dim: int
    axes: Axes
    devices: int
    reads: tuple[tuple[int, Spec], ...]
    rounds: tuple[_Round, ...]
    summed: bool

    def run(self, arrays: Mapping[int, Any], fill: Any, shape: tuple[int, ...], dtype: Any, position: Any) -> Any:
        """The part of ``shape`` of the device at ``position`` along the axes. ``fill``: the elements that are in no message; None
        where there are none."""
        found = None
        if fill is not None or self.summed:
            found = lax.broadcast_in_dim(jnp.asarray(0 if fill is None else fill, dtype), shape, ())
        for step in self.rounds:
            part = self._received(arrays[step.value], step, shape[self.dim], position)
            found = part if found is None else jnp.where(self._places(step, shape, position), part, found)
        if not self.summed:
            return found
        return lax.pmax(found, self.axes) if dtype == np.bool_ else lax.psum(found, self.axes)

    def sliced(self, op: Op, x: Any) -> Any:
        """``x``, what the slice ``op`` reads, sliced along the dimensions that it moves and that are whole."""
        whole = {d for d, (n, limit, start) in enumerate(zip(x.shape, op["limit"], op["start"], strict=True)) if start or limit < n}
        for d in sorted(whole - {self.dim}):
            x = lax.slice_in_dim(x, op["start"][d], op["limit"][d], axis=d)
        return x

    def _received(self, x: Any, step: _Round, n: int, position: Any) -> Any:
        """The elements of a round in their places of ``n``, and anything in all other places."""
        d, size = self.dim, step.size
        starts = {m.source: min(m.low, x.shape[d] - size) for m in step.messages}
        # Element ``at`` of the part is element ``low - start`` of the message.
        shifts = {m.target: m.at - (m.low - starts[m.source]) for m in step.messages}
        x = _window(x, d, self._own(starts, position), size)
        if step.sends:
            x = _compat.permuted_over_devices(x, self.axes, [(m.source, m.target) for m in step.messages])
        most, least = max(shifts.values()), min(shifts.values())
        padding = [(most, n - least - size, 0) if e == d else (0, 0, 0) for e in range(x.ndim)]
        x = x if (most, n - least - size) == (0, 0) else lax.pad(x, jnp.zeros((), x.dtype), padding)
        return _window(x, d, most - self._own(shifts, position), n)

    def _places(self, step: _Round, shape: tuple[int, ...], position: Any) -> Any:
        """Is an element of the part in a message of the round?"""
        ends = {m.target: (m.at, m.at + m.high - m.low) for m in step.messages}
        low, high = ({j: ends.get(j, (0, 0))[k] for j in range(self.devices)} for k in (0, 1))
        index = lax.broadcasted_iota(np.int32, shape, self.dim)
        return (index >= self._own(low, position)) & (index < self._own(high, position))

    def _own(self, numbers: Mapping[int, int], position: Any) -> Any:
        """The number of this device; any for one without."""
        some = next(iter(numbers.values()))
        if set(numbers.values()) == {some}:
            return some
        return jnp.asarray([numbers.get(j, some) for j in range(self.devices)], np.int32)[position]


def _window(x: Any, d: int, start: Any, size: int) -> Any:
    if x.shape[d] == size:
        return x
    return (
        lax.slice_in_dim(x, start, start + size, axis=d) if isinstance(start, int) else lax.dynamic_slice_in_dim(x, start, size, d)
    )


# --- reversed and cumulative dimensions -------------------------------------------------------------------------------------------

_COMBINED = {"sum": jnp.add, "prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum, "logsumexp": jnp.logaddexp}


def neutral(fold: str, dtype: Any) -> Any:
    """The number that changes no result of a fold, also not that of a running log-sum."""
    return -math.inf if fold == "logsumexp" else identity(fold, dtype)


def reversed_over_devices(x: Any, axes: Axes, devices: int) -> Any:
    """The part of a reversed dimension, from the reversed part ``x`` of the device at the other end."""
    return _compat.permuted_over_devices(x, axes, [(j, devices - 1 - j) for j in range(devices)])


def running_over_devices(x: Any, running: Callable[[Any, bool], Any], fold: str, d: int, axes: Axes, reverse: bool) -> Any:
    """A cumulative op along dimension ``d``, divided by ``axes``: of this device's part ``x``, then with the totals of the parts
    before it, one row for each device. ``running(x, reverse)``: the op along a whole dimension."""
    own = running(x, reverse)
    first = 0 if reverse else own.shape[d] - 1
    totals = lax.all_gather(lax.slice_in_dim(own, first, first + 1, axis=d), axes, axis=d, tiled=True)
    index, position = lax.broadcasted_iota(np.int32, totals.shape, d), lax.axis_index(axes)
    before = index > position if reverse else index < position
    masked = jnp.where(before, totals, np.asarray(neutral(fold, totals.dtype), totals.dtype))
    of_all = running(masked, False)
    p = totals.shape[d]
    return _COMBINED[fold](own, lax.slice_in_dim(of_all, p - 1, p, axis=d)).astype(own.dtype)


# --- moves ------------------------------------------------------------------------------------------------------------------------


def moves_of(op: Op, graph: Graph, specs: Sequence[Spec | None], mesh: Mesh, made: Spec) -> Moves | None:
    """The moves of ``op``, whose result is divided as ``made`` along the dimensions that stay as they are."""
    dims, out = _moved_dims(op, graph), graph.values[op.outputs[0]].shape
    known = [spec for v in op.inputs if (spec := specs[v]) is not None and len(spec) == len(out)]
    if len(dims) > 1:  # along the others each device slices or pads what it has
        dims = [d for d in dims if any(spec[d] for spec in known)]
    if len(dims) != 1:
        return None
    (d,) = dims
    segments = _segments(op, graph, d)
    values = list(dict.fromkeys(s.value for s in segments))
    divided = {v: spec[d] for v in values if (spec := specs[v]) is not None and spec[d]}
    axes = next(iter(divided.values()), ())
    if not axes or set(divided.values()) != {axes} or any(a in axes for e, used in enumerate(made) if e != d for a in used):
        return None
    devices = math.prod(mesh[a] for a in axes)
    sizes = {v: -(-graph.values[v].shape[d] // devices) if v in divided else None for v in values}
    reads = tuple((v, (*made[:d], axes if v in divided else (), *made[d + 1 :])) for v in values)
    readers = graph.consumers()
    shares = {v: sum(graph.ops[i].kind in KINDS for i in readers.get(v, ())) or 1 for v in values}  # of what a gather sends
    gathered = sum((devices - 1) * size / shares[v] for v, size in sizes.items() if size is not None)

    def candidate(summed: bool) -> tuple[float, Moves]:
        messages = [(s.value, m) for s in segments for m in _messages(s, out[d], devices, sizes[s.value], summed)]
        rounds = _rounds(messages, devices)
        sent = sum(step.size for step in rounds if step.sends) + (2 * (devices - 1) / devices * out[d] if summed else 0)
        return sent, Moves(d, axes, devices, reads, rounds, summed)

    found = [candidate(True)] if op.kind == "slice" else []
    found += [candidate(False)] if out[d] >= devices else []
    found = [(n, m) for n, m in found if n <= gathered and sum(step.sends for step in m.rounds) <= _MOST_PERMUTES]
    return min(found, key=lambda x: x[0])[1] if found else None


def _moved_dims(op: Op, graph: Graph) -> list[int]:
    """The dimensions along which ``op`` does not keep its elements in place; none for strides."""
    if op.kind == "concatenate":
        return [op["dimension"]]
    pairs = zip(graph.values[op.inputs[0]].shape, graph.values[op.outputs[0]].shape, strict=True)
    strided = [op["interior"] if op.kind == "pad" else [s - 1 for s in op["strides"] or ()]]
    found = [d for d, (a, b) in enumerate(pairs) if a != b or (op.kind == "pad" and op["low"][d])]
    return [] if any(map(any, strided)) else found


def _segments(op: Op, graph: Graph, d: int) -> list[_Segment]:
    """The elements of ``op``'s result, but those that fill it up: as they are in what its operands are slices of."""
    x = graph.values[op.inputs[0]].shape
    if op.kind == "slice":
        return [_Segment(op.inputs[0], op["start"][d], op["limit"][d] - op["start"][d], 0)]
    if op.kind == "pad":
        low, high = op["low"][d], op["high"][d]
        start = max(-low, 0)
        found = [_Segment(op.inputs[0], start, x[d] - start - max(-high, 0), max(low, 0))]
    else:
        found, at = [], 0
        for v in op.inputs:
            found.append(_Segment(v, 0, graph.values[v].shape[d], at))
            at += found[-1].size
    producers = graph.producers()
    return [_source(segment, graph, producers, d) for segment in found]


def _source(segment: _Segment, graph: Graph, producers: Mapping[int, int], d: int) -> _Segment:
    """``segment`` with the value that its own one is a slice of, if it is."""
    while (i := producers.get(segment.value)) is not None and graph.ops[i].kind == "slice":
        op = graph.ops[i]
        if _moved_dims(op, graph) != [d]:
            break
        segment = dataclasses.replace(segment, value=op.inputs[0], start=segment.start + op["start"][d])
    return segment


def _messages(segment: _Segment, n: int, devices: int, size: int | None, summed: bool) -> Iterator[_Message]:
    """The messages with a segment of a result of ``n`` elements. ``size``: of a shard of its value; None for one that all have."""
    part = n if summed else -(-n // devices)
    for target in range(devices):
        first = 0 if summed else target * part  # of this device's part
        low, high = max(segment.at, first), min(segment.at + segment.size, first + part, n)
        back = segment.start - segment.at  # from the result to the value
        low, high = low + back, high + back
        if size is None:
            sources = [(target, 0, high)]
        else:
            some = [target] if summed else range(low // size, -(-high // size))
            sources = [(k, k * size, (k + 1) * size) for k in some]
        for k, begin, end in sources:
            a, b = max(low, begin), min(high, end)
            if a < b:
                yield _Message(k, target, a - begin, b - begin, a - back - first)


def _rounds(messages: Sequence[tuple[int, _Message]], devices: int) -> tuple[_Round, ...]:
    """Messages of equal distances are a round, and what a device has itself is first."""
    found: dict[tuple[int, int, int], dict[int, _Message]] = {}
    for value, m in messages:
        distance, turn = (m.target - m.source) % devices, 0
        while m.target in found.get((distance, value, turn), ()):
            turn += 1
        found.setdefault((distance, value, turn), {})[m.target] = m
    return tuple(_Round(value, distance > 0, tuple(found[distance, value, k].values())) for distance, value, k in sorted(found))
