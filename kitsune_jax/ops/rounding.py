"""Which results of 16-bit floats are rounded to their dtype, and which keep the digits that they were computed with.

A 16-bit float is computed in float32. JAX rounds every operator's result; a compiler may leave that out between operators that it
fuses. Users rely on what ``jax.jit`` does: compensated sums (``s = a + b; e = b - (s - a)``) find an error of 0 where the roundings
are left out. So a pipeline rounds wherever ``jit`` on the platform at hand does (``profile.rounding`` asks it).
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.graph import Scalar
from kitsune_jax.ops.comparisons import HAND_ON

NARROW = frozenset({"bfloat16", "float16"})
# Of operands that their dtype can hold, it can hold the result: nothing is left to round.
_EXACT = HAND_ON | {"convert_element_type", "floor", "ceil", "round", "sign", "rem", "reduce_precision", "nextafter"}


@dataclasses.dataclass(frozen=True, slots=True)
class Rounding:
    """``results``: the dtypes in which every operator's result is rounded. ``widened``: those in which that also holds for a result
    that is converted to a wider float right away, as a sum in float32 converts what it adds up; in others that conversion takes the
    digits that were computed."""

    results: frozenset[str] = NARROW
    widened: frozenset[str] = NARROW

    def rounds(self, kind: str, dtype: str, literals: tuple[Scalar | None, ...] = ()) -> bool:
        """Does a result of ``dtype`` of an op of this kind have to be rounded? ``literals``: its operands that are constants.

        >>> Rounding().rounds("add", "bfloat16"), Rounding().rounds("max", "bfloat16"), Rounding().rounds("add", "float32")
        (True, False, False)
        """
        if dtype not in self.results or kind in _EXACT:
            return False
        # bfloat16 has the exponents of float32: times a half or two, no digit of a normal number is lost.
        scaled = kind == "mul" and dtype == "bfloat16" and any(_only_scales(c) for c in literals)
        return not scaled

    def keeps_digits(self, dtype: str, wider: str) -> bool:
        """Does a conversion of a value of ``dtype`` to ``wider`` take the digits that the value was computed with?"""
        return dtype in NARROW and wider in ("float32", "float64") and not (dtype in self.results and dtype in self.widened)


def _only_scales(c: Scalar | None) -> bool:
    return c is not None and abs(float(c)) in (0.25, 0.5, 1.0, 2.0, 4.0)


EVERYWHERE = Rounding()
