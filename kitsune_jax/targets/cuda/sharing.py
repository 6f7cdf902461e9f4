"""Stages that are equal but for where things lie become one function, which gets these constants from a table.

Comes in: the code of every stage. Goes out: the ``Kind``s of stages: a code, and for each of its stages a row of constants.
Invariant: stages are of one kind only if their codes are the same data, once names and constants are numbered within the stage.

ptxas takes time for every line that it inlines, and the layers of a deep network, forwards and backwards, are few kinds of stages.
Constants lie in constant memory and not in registers: a stage that needs all of its registers for a tile can read them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kitsune_jax.targets.cuda.device_ir import Constant, Ref, rebuild

# Kinds of names, by what their numbers count in the tile program: values, queues, sinks, inputs, outputs.
_FAMILIES = (
    ("v", "d", "c", "r", "e", "k", "s", "h", "index", "image", "gather", "work", "pick"),
    ("q", "queue", "pop", "push"),
    ("sink", "gradient", "panel", "columns"),
    ("in", "staged"),
    ("out",),
)
_FAMILY = {kind: number for number, kinds in enumerate(_FAMILIES) for kind in kinds}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Equal ``stages``. ``fields``: the constants in which they differ, with a row of ``places`` for each; others are literals."""

    stages: tuple[int, ...]
    code: Any
    fields: tuple[Constant, ...]
    places: tuple[tuple[str, ...], ...]

    @property
    def number(self) -> int:
        """That of its first stage, by which its functions are called."""
        return self.stages[0]


def kinds(codes: Sequence[Any], share: bool = True) -> list[Kind]:
    """The kinds of the stages, in the order of their first ones. Without ``share`` every stage is a kind of its own."""
    if not share or len(codes) == 1:
        return [Kind((s,), code, (), ()) for s, code in enumerate(codes)]
    groups: dict[Any, list[int]] = {}
    numbered = [_numbered(code) for code in codes]
    for s, (code, _) in enumerate(numbered):
        groups.setdefault(_without_values(code), []).append(s)
    return [_kind(codes, numbered, tuple(stages)) for stages in groups.values()]


def _kind(codes: Sequence[Any], numbered: Sequence[tuple[Any, tuple[Constant, ...]]], stages: tuple[int, ...]) -> Kind:
    if len(stages) == 1:
        return Kind(stages, codes[stages[0]], (), ())
    code, constants = numbered[stages[0]]
    columns = zip(*(numbered[s][1] for s in stages), strict=True)
    differing = [(c, column) for c, column in zip(constants, columns, strict=True) if len({x.value for x in column}) > 1]
    places = tuple(zip(*([x.initializer for x in column] for _, column in differing), strict=True))
    return Kind(stages, code, tuple(c for c, _ in differing), places)


def _numbered(code: Any) -> tuple[Any, tuple[Constant, ...]]:
    """``code`` with names and constants numbered from 0, in the order in which it speaks of them; and its constants."""
    names: dict[tuple[int | str, int], int] = {}
    counts: dict[int | str, int] = {}
    found: dict[tuple[str, Any], Constant] = {}

    def change(x: Any) -> Any:
        if isinstance(x, Ref):
            family = _FAMILY.get(x.kind, x.kind)
            if (family, x.of) not in names:
                names[family, x.of] = counts.get(family, 0)
                counts[family] = names[family, x.of] + 1
            return Ref(x.kind, names[family, x.of], x.part)
        if isinstance(x, Constant):
            if (x.name, x.key) not in found:
                index = sum(name == x.name for name, _ in found)
                found[x.name, x.key] = dataclasses.replace(x, key=index)
            elif found[x.name, x.key].value != x.value:
                raise AssertionError(f"{x.name} of {x.key} is {found[x.name, x.key].value} and {x.value}")
            return found[x.name, x.key]
        return x

    return rebuild(code, change), tuple(found.values())


def _without_values(code: Any) -> Any:
    return rebuild(code, lambda x: dataclasses.replace(x, value="") if isinstance(x, Constant) else x)
