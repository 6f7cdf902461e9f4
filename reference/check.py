"""The checker of tile programs: types, shapes, queues and freedom from deadlock.

Comes in: a ``Program`` or a ``TileProgram``, from the builder or written by hand. Goes out: nothing, or ``ValueError`` with the
stage, the instruction and what is wrong there; ``Schedule``, by which the interpreter runs stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from kitsune_jax.ops.graph import Op, Value
from kitsune_jax.ops.spec import DTYPES, resolve_rows
from kitsune_jax.ops.table import OPS, verify_op
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import FOLDED, SINKS, WITHIN, ArrayType, Instr, LoopBody, Program, SinkType, TileProgram, TileType, walk
from reference.instruction_types import RULES, Wrong, describe_types, need
from reference.operators import FOLDS

# --- the firing rule over bounded queues ------------------------------------------------------------------------------------------


class Deadlock(RuntimeError):
    """No stage can fire although tiles are left. The message names the queue that each stage waits for."""


def check_deadlock_free(program: TileProgram, *, lookahead: int = 1) -> str | None:
    """None if the program's queues let every tile through, else which stage waits for which queue.

    Moves tokens, not data, for no more tiles than are needed to fill every queue. One order of firing is enough: a stage that can
    fire stays able to until it does, so either every order ends or none does. ``lookahead`` as in ``interpret``; plans are made for
    1.
    """
    tiles = min(program.tiles, sum(q.depth for q in program.queues) + (lookahead + 1) * len(program.stages) + 2)
    schedule = Schedule(program, tiles, lookahead)
    try:
        fired = True
        while fired:
            fired = False
            for s in range(len(program.stages)):
                while schedule.can_fire(s):
                    schedule.fire(s)
                    fired = True
        schedule.check_done()
    except Deadlock as stuck:
        return str(stuck)
    return None


class Schedule:
    """The firing rule: stage s may run its next tile when all its input entries are full and all its output entries are free.

    State: ``done[s]``, the tiles that stage s has finished. A stage fires atomically, so it has popped and pushed as many.
    """

    def __init__(self, program: TileProgram, tiles: int | None = None, lookahead: int = 0):
        self.program, self.lookahead = program, lookahead
        self.tiles = program.tiles if tiles is None else tiles
        self.done = [0] * len(program.stages)
        self.pops, self.pushes = _queues_of(program)

    def ready(self) -> list[int]:
        return [s for s in range(len(self.done)) if self.can_fire(s)]

    def can_fire(self, s: int) -> bool:
        """Has stage ``s`` a tile left, and waits for nothing?"""
        tile, queues = self.done[s], self.program.queues
        full = min(tile + 1 + self.lookahead, self.tiles)
        if tile >= self.tiles or any(self.done[queues[q].producer] < full for q in self.pops[s]):
            return False
        return all(tile - self.done[c] < queues[q].depth for q in self.pushes[s] for c in queues[q].consumers)

    def waits_for(self, s: int) -> list[str]:
        """The queue entries that stage ``s`` waits for, in words; empty if it can fire."""
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
        """Raise ``Deadlock`` if a stage has tiles left."""
        stuck = [s for s, done in enumerate(self.done) if done < self.tiles]
        if stuck:
            lines = [f"{self.name(s)}, at tile {self.done[s]}, waits for {' and for '.join(self.waits_for(s))}" for s in stuck]
            raise Deadlock("; ".join(lines))

    def name(self, s: int) -> str:
        return f"stage {s} ({self.program.stages[s].name})"


def _queues_of(program: TileProgram) -> tuple[list[list[int]], list[list[int]]]:
    """(queues popped, queues pushed) by each stage. Raises ``TypeError`` if bodies and queues disagree."""
    pops = [[i["queue"] for i in stage.body if i.kind == "pop"] for stage in program.stages]
    pushes = [[i["queue"] for i in stage.body if i.kind == "push"] for stage in program.stages]
    for q, queue in enumerate(program.queues):
        if not queue.consumers:
            raise TypeError(f"queue {q} has no consumer")
        for s, stage in enumerate(program.stages):
            for what, found, named in (("pop", pops[s], s in queue.consumers), ("push", pushes[s], s == queue.producer)):
                if found.count(q) != named:
                    raise TypeError(
                        f"stage {s} ({stage.name}) has {found.count(q)} {what} of queue {q}; the queue declares {int(named)}"
                    )
    for s, used in enumerate(zip(pops, pushes, strict=True)):
        for q in (*used[0], *used[1]):
            if not 0 <= q < len(program.queues):
                raise TypeError(f"stage {s} uses queue {q}; the program has {len(program.queues)}")
    return pops, pushes


# --- the rules of a program -------------------------------------------------------------------------------------------------------


def verify(program: Program | TileProgram, *, lookahead: int = 1) -> None:
    """Raise ``ValueError`` if ``program`` breaks a rule of ``program.ir``. ``lookahead``: as in ``check_deadlock_free``.

    Checked: types and shapes of every instruction; values are defined once, before they are read, and not read outside of the loop
    that defines them; carries keep their types; slices stay inside their arrays; every output is written; queues are popped and
    pushed as declared, are bounded and let every tile through; parts of a call fit its arrays and its phases. The cost is linear in
    the number of instructions, for any size of arrays.

    >>> verify(TileProgram((4,), 0, (), (), (), (), (), (), ()))
    Traceback (most recent call last):
    reference.instruction_types.Wrong: tiles of 0 rows
    """
    if isinstance(program, TileProgram):
        _tile_program(program, lookahead)
        return
    checked: set[int] = set()
    written: dict[int, int] = dict.fromkeys(range(program.operands), -1)  # array -> phase that writes it
    phase = 0
    for k, part in enumerate(program.parts):
        where = f"part {k}"
        need(part.phase >= phase, f"{where}: phase {part.phase} comes after phase {phase}")
        phase = part.phase
        for what, numbers, types in (("reads", part.reads, part.program.inputs), ("writes", part.writes, part.program.outputs)):
            need(len(numbers) == len(types), f"{where}: {what} {len(numbers)} arrays, its program has {len(types)}")
            for n, t in zip(numbers, types, strict=True):
                need(0 <= n < len(program.arrays), f"{where}: {what} array {n}; the call has {len(program.arrays)}")
                a = program.arrays[n]
                agree = (a.shape, a.dtype) == (t.shape, t.dtype)
                need(agree, f"{where}: {what} array {n} as {t.dtype}{list(t.shape)}; it is {a.dtype}{list(a.shape)}")
        for n in part.reads:
            need(written.get(n, phase) < phase, f"{where}: reads array {n}, which no earlier phase writes")
        for n in part.writes:
            need(n not in written, f"{where}: writes array {n}, which is an operand or written by another part")
            written[n] = phase
        if id(part.program) not in checked:  # equal parts share their program
            checked.add(id(part.program))
            try:
                _tile_program(part.program, lookahead)
            except Wrong as error:
                raise Wrong(f"{where}: {error}") from None
    missing = [n for n in range(len(program.arrays)) if n not in written]
    need(not missing, f"arrays {missing} of the call are never written")


def _tile_program(program: TileProgram, lookahead: int) -> None:
    need(program.tile_rows > 0, f"tiles of {program.tile_rows} rows")
    need(0 <= program.batch_axes <= len(program.axes), f"{program.batch_axes} batch axes of {len(program.axes)} stream axes")
    for what, arrays in (("input", program.inputs), ("output", program.outputs)):
        for k, array in enumerate(arrays):
            _array(program, array, f"{what} {k}")
    _order(program)
    for k, array in enumerate(program.outputs):
        kept = [n for n, stride in zip(program.axes, array.row_strides, strict=False) if not stride]
        need(not array.streamed or math.prod(kept) <= 1, f"output {k}: several rows are written to one place")
    for k, sink in enumerate(program.sinks):
        _sink(program, sink, f"sink {k}")
    defined: set[int] = set()
    for v, _ in program.literals:
        need(
            v < len(program.values) and program.values[v] == TileType(False, (), program.values[v].dtype), f"constant %{v} has rows"
        )
        _define(program, defined, v)
    bodies = _Bodies(program, defined)
    for s, stage in enumerate(program.stages):
        bodies.run(stage.body, set(dict(program.literals)), {}, f"stage {s} ({stage.name})")
    _written(program, bodies.slices)
    try:
        need(all(q.depth > 0 for q in program.queues), "a queue of depth 0")
        stuck = check_deadlock_free(program, lookahead=lookahead)
    except TypeError as error:
        raise Wrong(str(error)) from None
    need(stuck is None, f"the stages deadlock: {stuck}")


def _sink(program: TileProgram, sink: SinkType, name: str) -> None:
    need(sink.how in FOLDS, f"{name}: how is {sink.how!r}")
    need(0 <= sink.array < len(program.outputs), f"{name}: there is no output {sink.array}")
    out = program.outputs[sink.array]
    text = f"{name} of {list(sink.shape)}: output {sink.array} is {out.dtype}{list(out.shape)}"
    need(not out.streamed and out.loaded.shape == sink.shape, f"{text} and may depend on no row")
    if out.row_strides:  # one for each batch
        real = [d in out.dims for d, n in enumerate(out.shape) if n > 1]
        contiguous = real == sorted(real)
        distinct = all(stride or n <= 1 for n, stride in zip(program.axes[: program.batch_axes], out.row_strides, strict=False))
        need(contiguous and distinct, f"{text}, in which the sums of a batch are not contiguous, or those of several overlap")


def _order(program: TileProgram) -> None:
    """Check the array that holds the order of the stream, if there is one."""
    k = program.order
    if k is None:
        return
    need(not program.batch_axes, "a stream with batch axes has no order of its own")
    need(0 <= k < len(program.inputs), f"the order of the stream is input {k}; the program has {len(program.inputs)}")
    array, wanted = program.inputs[k], ArrayType((program.rows,), "int32", False)
    need(array == wanted, f"input {k} is {array.dtype}{list(array.shape)}; the order of the stream is int32{[program.rows]}")
    read = any(i.kind in ("load", "load_slice") and i["array"] == k for s in program.stages for i in walk(s.body))
    need(not read, f"input {k} is the order of the stream, and a stage reads it")


def _array(program: TileProgram, array: ArrayType, name: str) -> None:
    need(array.dtype in DTYPES, f"{name}: there is no dtype {array.dtype}")
    strides = array.row_strides
    if not strides:
        need(not array.streamed or not program.axes, f"{name} streams without row strides")
        return
    need(len(strides) == len(program.axes), f"{name}: {len(strides)} row strides for {len(program.axes)} stream axes")
    need(array.streamed or not any(strides[program.batch_axes :]), f"{name} depends on rows, and is not streamed")
    ascending = all(a < b for a, b in zip((-1, *array.dims), (*array.dims, len(array.shape)), strict=True))
    need(ascending, f"{name}: {array.dims} are not ascending dimensions of {list(array.shape)}")
    if 0 in (*array.shape, *program.axes):
        return
    dense = dim_strides(array.shape)
    reach = [((n - 1) * s) for n, s in zip(program.axes, strides, strict=True)]
    last = sum(reach) + sum((array.shape[d] - 1) * dense[d] for d in array.dims)
    inside = min(reach) >= 0 and last < math.prod(array.shape)
    need(inside, f"{name}: rows with strides {strides} reach element {last} of {math.prod(array.shape)}")


def _define(program: TileProgram, defined: set[int], v: int) -> None:
    need(0 <= v < len(program.values), f"there is no value %{v}")
    need(v not in defined, f"%{v} is defined twice")
    need(program.values[v].dtype in DTYPES, f"%{v}: there is no dtype {program.values[v].dtype}")
    defined.add(v)


class _Bodies:
    """A check of the instructions of stages, including their loops."""

    def __init__(self, program: TileProgram, defined: set[int]):
        self.program, self.defined, self.numbers = program, defined, dict(program.literals)
        self.slices: dict[int, dict[int, list[tuple[int, int]]]] = {}  # output -> dimension -> elements stored per instruction

    def run(self, body: Sequence[Instr], visible: set[int], loops: Mapping[int, int], where: str) -> None:
        """Check ``body``. ``visible``: values that may be read, to which its own are added. ``loops``: number -> count of each."""
        for n, instr in enumerate(body):
            here = f"{where}, instruction {n}, {instr.kind}"
            try:
                for v in instr.inputs:
                    need(v in visible, f"%{v} is not defined here")
                if instr.kind == "loop":
                    self._loop(instr, visible, loops, here)
                else:
                    need(instr.block is None, "only a loop has a block")
                    again = instr.kind in ("push", "pop") or (instr.kind == "sink_at" and instr["sorted"])
                    need(not loops or not again, "it may not be in a loop")
                    self._one(instr, loops)
                for v in instr.outputs:
                    _define(self.program, self.defined, v)
            except Wrong as error:
                raise error if str(error).startswith(where) else Wrong(f"{here}: {error}") from None
            except KeyError as error:
                raise Wrong(f"{here}: {error.args[0]}") from None
            visible.update(instr.outputs)

    def _types(self, values: Sequence[int]) -> list[TileType]:
        return [self.program.values[v] for v in values]

    def _loop(self, instr: Instr, visible: set[int], loops: Mapping[int, int], here: str) -> None:
        block, count = instr.block, instr["count"]
        need(isinstance(block, LoopBody), "it has no block")
        assert block is not None
        need(isinstance(count, int) and count >= 0, f"it runs {count} times")
        if (within := instr.get("within")) is not None:
            axis, step, _, _, which = within
            fits = self.program.batch_axes <= axis < len(self.program.axes) and step > 0 and which in WITHIN
            need(fits and self.program.order is None, f"the bounds of its numbers are {within}")
        together = instr.get("together", 1)
        need(together == 1 or within is not None and together > 1, f"{together} of its numbers are whole together")
        if (shifted := instr.get("shifted")) is not None:
            array, sign, guard, _ = shifted
            fits = within is not None and sign in (-1, 1) and guard in ("rows", "elements")
            of = self.program.inputs[array] if fits and 0 <= array < len(self.program.inputs) else None
            known = of is not None and of.dtype == "int32" and math.prod(of.shape) == 1 and not of.streamed
            need(known, f"the bounds of its numbers are shifted by {shifted}")
        inside = visible | {block.index, *block.carries}
        for v in (block.index, *block.carries):
            _define(self.program, self.defined, v)
        index = self.program.values[block.index]
        need(index == TileType(False, (), "int32"), f"its number is {index}, and must be int32[]")
        self.run(block.body, inside, {**loops, block.index: count}, here)
        for v in block.results:
            need(v in inside, f"its result %{v} is not defined in it")
        wanted = self._types(block.carries)
        for what, values in (("initial", instr.inputs), ("next", block.results), ("final", instr.outputs)):
            got = self._types(values)
            text = f"its {what} carries are {', '.join(map(str, got))}; its block takes {', '.join(map(str, wanted))}"
            need(got == wanted, text)

    def _one(self, instr: Instr, loops: Mapping[int, int]) -> None:
        if instr.kind in ("load_slice", "store_slice"):
            self._slice(instr, loops)
            return
        if instr.kind in FOLDED and instr.get("dims") is not None and 0 <= instr["sink"] < len(self.program.sinks):
            shape = self.program.sinks[instr["sink"]].shape
            self._cut(instr, instr.inputs[FOLDED[instr.kind] :], shape, range(len(shape)), loops)
        if instr.kind in ("cut", "paste"):
            count, shape = loops.get(instr.inputs[-1], -1), self.program.values[instr.inputs[0]].shape
            need(count >= 0, f"%{instr.inputs[-1]} is no number of a loop around it")
            fits = not shape or (count <= shape[0] if instr.kind == "cut" else count == shape[0])
            need(fits, f"the loop counts to {count}, and the value is {self.program.values[instr.inputs[0]]}")
        ins, outs = self._types(instr.inputs), [self.program.values[v] for v in instr.outputs if v < len(self.program.values)]
        rule = RULES.get(instr.kind)
        if rule is None:
            _table_op(instr, ins, outs)
            return
        wanted = rule(self.program, instr, ins, outs)
        need(outs == wanted, f"it makes {describe_types(wanted)}, but declares {describe_types(outs)}")

    def _slice(self, instr: Instr, loops: Mapping[int, int]) -> None:
        loading = instr.kind == "load_slice"
        arrays = self.program.inputs if loading else self.program.outputs
        need(0 <= instr["array"] < len(arrays), f"there is no array {instr['array']}")
        array, numbers = arrays[instr["array"]], instr.inputs if loading else instr.inputs[1:]
        for d, first, last in self._cut(instr, numbers, array.shape, array.kept, loops):
            if not loading:
                self.slices.setdefault(instr["array"], {}).setdefault(d, []).append((first, last))
        extent = dict(zip(instr["dims"], instr["sizes"], strict=True))
        made = TileType(array.streamed, tuple(extent.get(d, array.shape[d]) for d in array.kept), array.dtype)
        got = self._types(instr.outputs if loading else instr.inputs[:1])
        need(got == [made], f"the slice is {made}, not {describe_types(got)}")

    def _cut(
        self, instr: Instr, numbers: Sequence[int], shape: Sequence[int], kept: Sequence[int], loops: Mapping[int, int]
    ) -> list[tuple[int, int, int]]:
        """The dimensions that ``instr`` cuts by ``numbers``, all of them among ``kept``: each with the first element of all slices,
        and the end of the elements that they cover without a gap, over all iterations."""
        dims, steps, sizes = instr["dims"], instr["steps"], instr["sizes"]
        need(len(numbers) == len(dims) == len(steps) == len(sizes), "it needs a dimension, a step and a size for each number")
        fit = len(set(dims)) == len(dims) and set(dims) <= set(kept)
        need(fit, f"dimensions {dims}: those that do not stream are {tuple(kept)}")
        found = []
        for v, d, step, size in zip(numbers, dims, steps, sizes, strict=True):
            first, last, gaps = self._reach(v, step, size, loops)
            need(first >= 0 and last <= shape[d], f"elements {first} to {last} of dimension {d}, which has {shape[d]}")
            found.append((d, first, first if gaps else last))
        return found

    def _reach(self, number: int, step: int, size: int, loops: Mapping[int, int]) -> tuple[int, int, bool]:
        """(first element of a slice, end of the last one, whether there are gaps between them), over all iterations."""
        need(size >= 0 and step >= 0, f"a step of {step} and a size of {size}")
        if (count := loops.get(number)) is not None:
            return 0, (count - 1) * step + size if count else 0, count > 1 and step > size
        constant = self.numbers.get(number)
        need(isinstance(constant, int), f"%{number} is neither the number of a loop around it nor a constant")
        assert isinstance(constant, int)
        return constant * step, constant * step + size, False


def _written(program: TileProgram, slices: Mapping[int, Mapping[int, Sequence[tuple[int, int]]]]) -> None:
    """Check that every output is stored by one instruction, filled by ``slices``, or folded into by a sink."""
    instrs = [i for stage in program.stages for i in walk(stage.body)]
    folded = {i["sink"] for i in instrs if i.kind in SINKS}
    writers = Counter(i["array"] for i in instrs if i.kind == "store")
    writers.update(slices.keys())
    for k, sink in enumerate(program.sinks):
        need(k in folded, f"nothing is folded into sink {k}")
        writers[sink.array] += 1
    for k, array in enumerate(program.outputs):
        need(writers[k] == 1, f"output {k} is written by {writers[k]} stores and sinks")
        for d, reaches in slices.get(k, {}).items():
            end = 0
            for first, last in sorted(reaches):
                end = max(end, last) if first <= end else end
            need(end == array.shape[d], f"output {k}: slices write {end} of {array.shape[d]} elements of dimension {d}")


# Parameters of an op that name dimensions along which it works: never the rows of a tile.
_ALONG = {
    "reduce": "axes",
    "argreduce": "axis",
    "cumulative": "axis",
    "rev": "dimensions",
    "iota": "dimension",
    "concatenate": "dimension",
}
_ROWS = 1_000_003  # represents the rows of a tile, and no other extent


def _table_op(instr: Instr, ins: Sequence[TileType], outs: Sequence[TileType]) -> None:
    spec = OPS.get(instr.kind)
    need(spec is not None and spec.family != "dot", "there is no such instruction")
    assert spec is not None
    tile = any(t.tile for t in (*ins, *outs))
    need(all(t.tile for t in outs) or not tile, "a result of tiles is a tile")
    params = resolve_rows(dict(instr.params), _ROWS)
    if tile and spec.family in _ALONG:
        along = params[_ALONG[spec.family]]
        need(0 not in (along if isinstance(along, Collection) else (along,)), "it works across the rows of a tile")
    if tile and spec.family == "pad":
        need(not any(params[k][0] for k in ("low", "high", "interior")), "it pads the rows of a tile")
    missing = {*spec.takes, *(("new_dtype",) if spec.family == "convert" else ())} - params.keys()
    need(not missing, f"it has no parameter {', '.join(sorted(missing))}")
    values = [Value((_ROWS, *t.shape) if t.tile else t.shape, t.dtype) for t in (*ins, *outs)]
    inputs, outputs = tuple(range(len(ins))), tuple(range(len(ins), len(values)))
    try:
        verify_op(Op(instr.kind, inputs, outputs, tuple(params.items())), values)
    except ValueError as error:
        raise Wrong(str(error).replace(str(_ROWS), "R")) from None
