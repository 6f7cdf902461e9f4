"""How many registers a stage's body keeps alive, as far as code generation can tell.

Comes in: definitions, uses and matmul products in the order of emission. Goes out: the most registers alive at once, and which
values are alive there. It counts what the program forces (kept values, accumulators in flight), not addresses and temporaries.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class _Span:
    value: object
    registers: int
    first: int
    last: int


class Budget:
    def __init__(self) -> None:
        self.clock = 0
        self.spans: list[_Span] = []
        self.parts: dict[object, list[_Span]] = {}
        self.held = 0

    def define(self, v: object, registers: int) -> None:
        """``registers`` more of value ``v`` are alive from now to its last use."""
        self._add(v, v, registers)

    def hold(self, registers: int) -> None:
        """``registers`` that are alive for the whole kernel: accumulators of sinks."""
        self.held += registers

    def product(self, v: int, chunk: int, registers: int) -> None:
        """Accumulators of one chunk of the matmul ``v``."""
        self._add((v, chunk), v, registers)

    def use(self, key: object) -> None:
        """A value, or a (matmul, chunk), is read now."""
        self.clock += 1
        for span in self.parts.get(key, ()):
            span.last = self.clock

    def peak(self) -> tuple[int, tuple[int, ...]]:
        """(most registers alive at once, the values alive then, largest first)."""
        most, at = self.held, 0
        for moment in {s.first for s in self.spans}:
            total = self.held + sum(s.registers for s in self.spans if s.first <= moment <= s.last)
            if total > most:
                most, at = total, moment
        alive: dict[int, int] = {}
        for s in self.spans:
            v = s.value[1] if isinstance(s.value, tuple) else s.value
            if s.first <= at <= s.last and s.registers and isinstance(v, int):
                alive[v] = alive.get(v, 0) + s.registers
        return most, tuple(sorted(alive, key=lambda v: (-alive[v], v)))

    def life(self, v: object) -> tuple[int, int]:
        """From when to when the value is kept."""
        parts = self.parts.get(v, [])
        if not parts:
            return 0, self.clock  # not kept so far: it may be any time
        return min(s.first for s in parts), max(s.last for s in parts)

    def _add(self, key: object, v: object, registers: int) -> None:
        self.clock += 1
        span = _Span(v, registers, self.clock, self.clock)
        self.spans.append(span)
        self.parts.setdefault(key, []).append(span)
