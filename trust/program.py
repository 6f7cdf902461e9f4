"""A random program as plain data, written as JSON and read back.

Invariant: every ``Program`` with known names is meaningful. A choice is taken modulo the number of its options, so a program stays
valid whatever the shrinker removes from it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Op:
    """Operator ``name`` in the form that ``choice`` picks, of value ``first`` (0: newest) and value ``second`` (0: oldest)."""

    name: str
    first: int = 0
    second: int = 0
    choice: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, its loop and transformation, and its arguments.

    Attributes:
      dtype: of its floating arguments.
      lead: the axes that stream (rows); ``features``: the last axis of the first ``inputs`` arguments.
      ops: the function's body.
      outputs: the values that it returns, counted from the newest.
      constants: parameters that are not arguments but arrays (or, of rank 0, Python numbers) that the function closes over.
      spare: one more argument that nothing reads.
      magnitude: the factor of its inputs.
      loop: "none", or the loop or branch whose body the function is; transform: applied to the whole.
      loop_choice, transform_choice: their forms.
      pipelined: "body", "loop" or "whole": the part that ``kitsune_jax.pipeline`` is applied to; "all": to each of them, nested.
      force, residuals: its options.
      seed: of the arguments' values.
    """

    dtype: str = "float32"
    lead: tuple[int, ...] = (7,)
    features: int = 5
    ops: tuple[Op, ...] = ()
    inputs: int = 1
    outputs: tuple[int, ...] = (0,)
    constants: tuple[int, ...] = ()
    spare: bool = False
    magnitude: float = 1.0
    loop: str = "none"
    loop_choice: int = 0
    transform: str = "none"
    transform_choice: int = 0
    pipelined: str = "body"
    force: bool = True
    residuals: Literal["save", "recompute"] = "save"
    seed: int = 0

    def to_json(self) -> str:
        """As short as can be read: defaults are left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {k: v for k, v in fields.items() if k != "ops" and v != Program.__dataclass_fields__[k].default}
        return json.dumps({**plain, "ops": [[op.name, op.first, op.second, op.choice] for op in self.ops]})

    @staticmethod
    def from_json(text: str | dict[str, Any]) -> Program:
        """Raises ``TypeError`` for a field that ``Program`` does not have."""
        fields = dict(json.loads(text) if isinstance(text, str) else text)
        fields["ops"] = tuple(Op(*op) for op in fields.get("ops", ()))
        for name in ("lead", "outputs", "constants"):
            if name in fields:
                fields[name] = tuple(fields[name])
        return Program(**fields)


class Digits:
    """Choices from one number: each takes the next digit, in the base of its number of options."""

    def __init__(self, number: int) -> None:
        self._left = number

    def below(self, n: int) -> int:
        self._left, digit = divmod(self._left, n)
        return digit

    def pick(self, *options: Any) -> Any:
        return options[self.below(len(options))]


class Invalid(Exception):
    """A program that plain JAX rejects as well, or that would be far too large: it proves nothing."""
