"""Which stage may run when: the firing rule over bounded queues, and the check that no program deadlocks.

Comes in: a ``TileProgram``. Goes out: ``check_deadlock_free``, None or who waits for which queue; ``Schedule``, by which the
interpreter runs stages. Tokens are moved, not data.
"""

from __future__ import annotations

from kitsune_jax.program.ir import TileProgram


class Deadlock(RuntimeError):
    """No stage can fire although tiles are left. The message says which stage waits for which queue."""


def check_deadlock_free(program: TileProgram, *, lookahead: int = 1) -> str | None:
    """None if the program's queues let every tile through, else who waits for which queue.

    Moves tokens, not data, for no more tiles than are needed to fill every queue. One order of firing is enough: a stage that can
    fire stays able to until it does, so either every order ends or none does. ``lookahead`` as in ``interpret``; plans are made for
    1.
    """
    tiles = min(program.tiles, sum(q.depth for q in program.queues) + (lookahead + 1) * len(program.stages) + 2)
    schedule = Schedule(program, tiles, lookahead)
    try:
        while ready := schedule.ready():
            schedule.fire(ready[-1])
        schedule.check_done()
    except Deadlock as stuck:
        return str(stuck)
    return None


class Schedule:
    """The firing rule: stage s may run its next tile when all its input entries are full and all its output entries are free.

    State: ``done[s]``, the tiles stage s has finished. A stage fires atomically, so that is also how many it has popped and pushed.
    """

    def __init__(self, program: TileProgram, tiles: int | None = None, lookahead: int = 0):
        self.program, self.lookahead = program, lookahead
        self.tiles = program.tiles if tiles is None else tiles
        self.done = [0] * len(program.stages)
        self.pops, self.pushes = _queues_of(program)

    def ready(self) -> list[int]:
        return [s for s, done in enumerate(self.done) if done < self.tiles and not self.waits(s)]

    def waits(self, s: int) -> list[str]:
        """Why stage ``s`` can't fire, in words; empty when it can."""
        tile, why = self.done[s], []
        for q in self.pops[s]:
            queue = self.program.queues[q]
            need = min(tile + 1 + self.lookahead, self.tiles)
            if self.done[queue.producer] < need:
                why.append(f"tile {need - 1} in queue {q}, which {self.name(queue.producer)} fills")
        for q in self.pushes[s]:
            queue = self.program.queues[q]
            slowest = min(queue.consumers, key=lambda c: self.done[c])
            if tile - self.done[slowest] >= queue.depth:
                why.append(f"a free slot in queue {q} (depth {queue.depth}), which {self.name(slowest)} empties")
        return why

    def fire(self, s: int) -> None:
        self.done[s] += 1

    def check_done(self) -> None:
        """Raise ``Deadlock`` where a stage has tiles left."""
        stuck = [s for s, done in enumerate(self.done) if done < self.tiles]
        if stuck:
            lines = [f"{self.name(s)}, at tile {self.done[s]}, waits for {' and for '.join(self.waits(s))}" for s in stuck]
            raise Deadlock("; ".join(lines))

    def name(self, s: int) -> str:
        return f"stage {s} ({self.program.stages[s].name})"


def _queues_of(program: TileProgram) -> tuple[list[list[int]], list[list[int]]]:
    """(queues popped, queues pushed) by each stage. Raises ``TypeError`` where bodies and queues disagree."""
    pops = [[i["queue"] for i in stage.body if i.kind == "pop"] for stage in program.stages]
    pushes = [[i["queue"] for i in stage.body if i.kind == "push"] for stage in program.stages]
    for q, queue in enumerate(program.queues):
        if not queue.consumers:
            raise TypeError(f"queue {q} has no consumer")
        for s, stage in enumerate(program.stages):
            for what, found, named in (("pop", pops[s], s in queue.consumers), ("push", pushes[s], s == queue.producer)):
                if found.count(q) != named:
                    raise TypeError(
                        f"stage {s} ({stage.name}) has {found.count(q)} {what} of queue {q}; the queue says {int(named)}"
                    )
    for s, used in enumerate(zip(pops, pushes, strict=True)):
        for q in (*used[0], *used[1]):
            if not 0 <= q < len(program.queues):
                raise TypeError(f"stage {s} uses queue {q}; the program has {len(program.queues)}")
    return pops, pushes
