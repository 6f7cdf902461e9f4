"""Stages that are equal but for where things lie become one function, which gets these constants from a table.

Comes in: the code of every stage, in which whatever may differ between equal stages stands as ``at.<name>`` (``Constants``). Goes
out: the ``Kind``s of stages: a text, and for each of its stages a row of constants. Invariant: stages are of one kind only if their
texts are the same, letter for letter, once generated names are numbered within the stage.

ptxas takes time for every line that it inlines, and the layers of a deep network, forwards and backwards, are few kinds of stages.
Constants lie in constant memory and not in registers: a stage that needs all of its registers for a tile can read them again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

# Families of names that the generator makes of an index of the whole program, by what they number: values, queues, sinks, arrays.
# All of them are local to a stage's function. Counters of one stage (t1, x2, m3) are numbered within it already.
_FAMILIES = (
    ("v", "d", "c", "r", "e", "k", "s", "h", "index", "image"),
    ("q", "queue", "pop", "push"),
    ("sink", "sum", "gradient", "partial", "panel", "columns"),
    ("in", "staged"),
    ("o", "out"),
)
_SPACE = {family: space for space, families in enumerate(_FAMILIES) for family in families}
_NAME = re.compile(rf"(?<!\.)\b((?:[tw]_)?)({'|'.join(sorted(_SPACE, key=len, reverse=True))})(\d+)(?=\b|[a-z_])")
_MEMBER = re.compile(r"\.\*at\.(\w+)")
_NUMBER = re.compile(r"\bat\.(\w+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """``at.<name>`` in the text of a stage. ``declaration``: as a member of a struct, with {} for its name. ``value``: a number, or
    the name of a member of the struct ``of``."""

    name: str
    declaration: str
    value: str
    of: str = ""

    @property
    def initializer(self) -> str:
        return f"&{self.of}::{self.value}" if self.of else self.value


class Constants:
    """The constants of one stage. What is asked for again, by the same name and ``key``, is the same constant."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, object], Constant] = {}

    def number(self, name: str, key: object, value: int, type_: str = "u32") -> str:
        """The C++ expression of a number, such as an offset."""
        return f"at.{self._add(name, key, f'{type_} {{}}', str(value)).name}"

    def parameter(self, value: str) -> str:
        """The C++ expression of a pointer to rows: ``value`` is in0, out1, ... of the kernel's parameters."""
        name = value.rstrip("0123456789")
        type_ = "const void*" if name == "in" else "void*"
        return f"p.*at.{self._add(name, value, f'{type_} Params::*{{}}', value, 'Params').name}"

    def ring(self, value: str, depth: int) -> str:
        """The C++ expression of the barriers of the lanes' rings ``value`` in the header."""
        constant = self._add("ring", value, f"Ring<{depth}> (Header::*{{}})[kLanes]", value, "Header")
        return f"(header.*at.{constant.name})"

    def _add(self, name: str, key: object, declaration: str, value: str, of: str = "") -> Constant:
        if (name, key) not in self.found:
            index = sum(other == name for other, _ in self.found)
            self.found[name, key] = Constant(f"{name}{index}", declaration, value, of)
        found = self.found[name, key]
        if (found.declaration, found.value) != (declaration, value):
            raise AssertionError(f"{name} of {key} is {found.value} and {value}")
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class StageCode:
    """``consume``, ``load``: the bodies of the stage's two functions. ``split``: the CTAs that run it."""

    consume: tuple[str, ...]
    load: tuple[str, ...]
    split: int
    constants: tuple[Constant, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Equal ``stages``. ``fields``: the constants in which they differ, with a row of ``places`` for each; others are literals."""

    stages: tuple[int, ...]
    consume: tuple[str, ...]
    load: tuple[str, ...]
    fields: tuple[Constant, ...]
    places: tuple[tuple[str, ...], ...]

    @property
    def number(self) -> int:
        """That of its first stage, by which its functions are called."""
        return self.stages[0]


def kinds(codes: Sequence[StageCode], share: bool = True) -> list[Kind]:
    """The kinds of the stages, in the order of their first ones. Without ``share`` every stage is a kind of its own."""
    groups: dict[object, list[int]] = {}
    for s, code in enumerate(codes):
        groups.setdefault(_signature(code) if share else s, []).append(s)
    return [_kind(codes, tuple(stages)) for stages in groups.values()]


def places(kind: Kind) -> str:
    """The table of the constants in which stages of one kind differ, as C++."""
    stages = ", ".join(map(str, kind.stages))
    lines = [f"// Where things lie for stages {stages}, which run the same code", f"struct Place{kind.number} {{"]
    lines += [f"  {field.declaration.format(field.name)};" for field in kind.fields]
    lines += ["};", f"KITSUNE_CONSTANT Place{kind.number} kPlaces{kind.number}[] = {{"]
    lines += [f"    {{{', '.join(place)}}}," for place in kind.places]
    return "\n".join([*lines, "};\n"])


def _signature(code: StageCode) -> object:
    """Equal for stages of one kind."""
    return *_renumbered(code), code.split, tuple((c.name, c.declaration) for c in code.constants)


def _kind(codes: Sequence[StageCode], stages: tuple[int, ...]) -> Kind:
    first = codes[stages[0]]
    columns = list(zip(*(codes[s].constants for s in stages), strict=True))
    fields = tuple(column[0] for column in columns if len({c.value for c in column}) > 1)
    literals = {c.name: c.value for c in first.constants if c not in fields}
    consume, load = _renumbered(first) if len(stages) > 1 else (first.consume, first.load)
    places = zip(*([c.initializer for c in column] for column in columns if column[0] in fields), strict=True)
    return Kind(stages, _with_literals(consume, literals), _with_literals(load, literals), fields, tuple(places))


def _with_literals(lines: tuple[str, ...], literals: dict[str, str]) -> tuple[str, ...]:
    """``lines`` with the values of constants that need no table."""

    def member(found: re.Match[str]) -> str:
        return f".{literals[found[1]]}" if found[1] in literals else found[0]

    def number(found: re.Match[str]) -> str:
        return literals.get(found[1], found[0])

    return tuple(_NUMBER.sub(number, _MEMBER.sub(member, line)) for line in lines)


def _renumbered(code: StageCode) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The two texts with generated names numbered from 0, in the order in which the stage speaks of what they stand for."""
    numbers: tuple[dict[str, int], ...] = tuple({} for _ in _FAMILIES)

    def local(found: re.Match[str]) -> str:
        prefix, family, number = found.groups()
        known = numbers[_SPACE[family]]
        return f"{prefix}{family}{known.setdefault(number, len(known))}"

    consume = tuple(_NAME.sub(local, line) for line in code.consume)
    return consume, tuple(_NAME.sub(local, line) for line in code.load)
