"""The context of an operator while a program's function is traced: its choices, and the source of further arguments.

Operators that read arguments demand them. ``Recorder`` notes each demand while shapes are evaluated; ``Reader`` hands out the
function's arguments in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from trust.program import Digits, Program

Array = Any
MAX_FEATURES = 80
MAX_SIZE = 1 << 18


@dataclasses.dataclass(frozen=True)
class Argument:
    """``kind``: "row" (streams), "param", "index" (one integer below ``below`` per row) or "mask" (one bool per row)."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    below: int = 0

    @property
    def is_float(self) -> bool:
        return self.kind in ("row", "param")

    @property
    def streams(self) -> bool:
        return self.kind != "param"


class Recorder:
    """Zeros for every demand, and the list of them."""

    def __init__(self) -> None:
        self.demanded: list[Argument] = []

    def __call__(self, argument: Argument) -> Array:
        self.demanded.append(argument)
        return jnp.zeros(argument.shape, argument.dtype)


class Reader:
    """The next argument for every demand."""

    def __init__(self, args: Sequence[Array]) -> None:
        self._left = iter(args)

    def __call__(self, argument: Argument) -> Array:
        return next(self._left)


class Context(Digits):
    """The values so far.

    ``rows``: floating, with one axis behind the leading ones. ``ints``: one integer or bool per row. ``others``: stationary.
    """

    def __init__(self, program: Program, source: Recorder | Reader) -> None:
        super().__init__(0)
        self.program = program
        self.lead = program.lead
        self.rows: list[Array] = []
        self.ints: list[Array] = []
        self.others: list[Array] = []
        self.all: list[Array] = []
        self._source = source
        self._parameters = 0

    def start(self, choice: int) -> None:
        self._left = choice

    @property
    def dtype(self) -> str:
        return self.program.dtype

    def add(self, value: Array) -> None:
        """Keep ``value`` for later operators, unless it is too large."""
        if value.size > MAX_SIZE or max(value.shape, default=0) > 4096:
            return
        self.all.append(value)
        streams = value.shape[: len(self.lead)] == self.lead
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        if floating and streams and value.ndim == len(self.lead) + 1 and 0 < value.shape[-1] <= MAX_FEATURES:
            self.rows.append(value)
        elif not floating and value.shape == self.lead:
            self.ints.append(value)
        elif floating and value.ndim <= 2 and value.size <= 1024:
            self.others.append(value)

    def param(self, *shape: int) -> Array:
        """A weight: an argument, or a constant of the program."""
        at, self._parameters = self._parameters, self._parameters + 1
        if at in self.program.constants:
            value = constant(self.program, at, shape)
            return jnp.asarray(value) if shape else value
        return self._source(Argument("param", shape, self.dtype))

    def row(self, width: int) -> Array:
        """Another input that streams."""
        return self._source(Argument("row", (*self.program.lead, width), self.dtype))

    def index(self, below: int) -> Array:
        """One integer per row, from 0 to ``below`` - 1."""
        return self._source(Argument("index", self.program.lead, "int32", below))

    def mask(self) -> Array:
        """One bool per row."""
        return self._source(Argument("mask", self.program.lead, "bool"))

    def stationary(self, choice: int, width: int) -> Array:
        """A vector of ``width``: a result of an earlier reduction, if one fits, or a weight."""
        fitting = [v for v in self.others if v.shape == (width,)]
        return fitting[choice % len(fitting)] if fitting and choice % 3 else self.param(width)

    def integers(self, choice: int, below: int) -> Array:
        """Integers below ``below``, one per row: made of earlier ones, or a new input."""
        whole = [v for v in self.ints if jnp.issubdtype(v.dtype, jnp.integer)]
        if whole and choice % 2:
            return jnp.abs(whole[choice % len(whole)].astype(jnp.int32)) % max(1, below)
        return self.index(max(1, below))


def constant(program: Program, at: int, shape: tuple[int, ...]) -> Array:
    """The value of constant parameter ``at``: a NumPy array, or a Python number."""
    rng = np.random.default_rng([program.seed, 1000 + at])
    if not shape:
        return float(np.round(rng.uniform(-1, 1), 3))
    return weight(rng, shape).astype(jnp.dtype(program.dtype))


def weight(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal, such that a product with it keeps its operand's size."""
    return rng.standard_normal(shape) / np.sqrt(max(1, shape[-2] if len(shape) > 1 else 1))
