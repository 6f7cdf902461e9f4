"""The NumPy interpreter of tile programs: what every target's result is compared with.

Comes in: a ``Program`` and its operands. Goes out: its results. Tiles travel through *bounded* queues, and stages fire in a random
order drawn from a seed, so a program that can deadlock does, as ``Deadlock`` with who waits for which queue. Invariants that it
checks on the way: every value has the shape and dtype its type says, and stages push and pop exactly the queues that name them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kitsune_jax.program.execute import Array, State, Tile
from kitsune_jax.program.ir import Program, TileProgram
from kitsune_jax.program.schedule import Schedule


def interpret(
    program: Program | TileProgram,
    arrays: Sequence[Any],
    *,
    schedule_seed: int | None = None,
    widen: bool = False,
    lookahead: int = 0,
) -> list[Array]:
    """Run ``program`` on ``arrays`` (one per operand, of exactly its shape and dtype) and return its results.

    ``schedule_seed``: the order in which ready stages fire; None fires the last ready one, the order of least memory. ``widen``:
    compute and return floats as float64, for comparison with JAX in float64. ``lookahead``: tiles beyond its own that a stage waits
    for before it fires, as one that prefetches does. Sinks of floats accumulate in float64.

    Raises ``Deadlock``, ``ValueError`` for arrays that do not fit the program, ``TypeError`` for a program that breaks its own
    types.

    Example (``program`` doubles its one input): ``interpret(program, [x])[0]`` equals ``2 * x``.
    """
    call = Program.of(program) if isinstance(program, TileProgram) else program
    if len(arrays) != call.operands:
        raise ValueError(f"the program takes {call.operands} arrays, not {len(arrays)}")
    known = dict(enumerate(arrays))
    for part in call.parts:
        state = State(part.program, [known[k] for k in part.reads], widen)
        _run(state, Schedule(part.program, lookahead=lookahead), schedule_seed)
        known.update(zip(part.writes, state.outputs, strict=True))
    return [known[call.operands + k] for k in range(call.results)]


def _run(state: State, schedule: Schedule, seed: int | None) -> None:
    program, rng = state.program, None if seed is None else random.Random(seed)
    while ready := schedule.ready():
        stage = ready[-1] if rng is None else rng.choice(ready)
        number = schedule.done[stage]
        state.run(program.stages[stage].body, Tile(number, state.rows_of(number)), schedule.name(stage))
        schedule.fire(stage)
        _drop_read(state, schedule)
    schedule.check_done()
    state.finish()


def _drop_read(state: State, schedule: Schedule) -> None:
    """Entries that every consumer has read are gone, so that reading one twice is an error here as it is on a device."""
    for queue, ring in zip(state.program.queues, state.rings, strict=True):
        read = min(schedule.done[c] for c in queue.consumers)
        for number in [n for n in ring if n < read]:
            del ring[number]
        if len(ring) > queue.depth:
            raise TypeError(f"a ring of depth {queue.depth} holds {len(ring)} tiles")
