"""The custom call of a kernel, as JAX sees it, and the operands that XLA packs for it.

Comes in: ``Code``, the region's operands, and a way to evaluate what does not depend on the stream. Goes out: the region's results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.graph import Value
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, Program, TileProgram, walk
from kitsune_jax.targets.cuda import compile, pack, runtime
from kitsune_jax.targets.cuda.kernel import Packed
from kitsune_jax.targets.cuda.lower import Code


def call(
    target: str,
    code: Code,
    program: Program,
    args: Sequence[Any],
    out_avals: Sequence[Any],
    evaluate: Callable[[int, Sequence[Any]], Any],
) -> list[Any]:
    """Bind the custom call of ``code`` on the region's operands ``args``; one result per aval.

    ``evaluate(op, operands)`` gives the result of an op of the graph whose operands do not stream.
    """
    if target == "emulator":
        runtime.register("cpu", compile.emulator_library())
    else:
        runtime.register("CUDA")
    kernel = code.kernel
    operands = [args[k] for k in kernel.inputs]
    for part, packed in zip(program.parts, kernel.packed, strict=True):
        given = [args[k] if k < program.operands else None for k in part.reads]  # None: another part makes it
        operands += _packed(packed, _Stationary(packed.program, given, evaluate))
    own = [_compat.aval_like(a, a.shape, np.float32) if k in kernel.widened else a for k, a in enumerate(out_avals)]
    results = [*own, *(_compat.aval_like(out_avals[0], a.shape, jnp.dtype(a.dtype)) for a in kernel.kept)]
    aliases = {len(operands) + k: result for k, (result, _) in enumerate(kernel.filled)}
    for result, how in kernel.filled:
        aval = results[result]
        operands.append(jnp.full(aval.shape, identity(how, np.dtype(aval.dtype)), aval.dtype))
    operands += args[program.operands :]  # what the kernel asks the L2 for
    # The workspace is never empty, so that the call has a result that nobody reads: see `targets.cpu.emit.call` for what XLA makes
    # of a loop's body that is nothing but a call all of whose results are carries.
    workspace = _compat.aval_like(out_avals[0], (kernel.workspace_bytes,), np.uint8)
    outs = jax.ffi.ffi_call(runtime.TARGET_NAME, [*results, workspace], input_output_aliases=aliases)(
        *operands,
        image=np.frombuffer(code.image, np.uint8),
        launch=np.asarray(kernel.launch, np.int64),
        name=code.name.encode("utf-8", "replace").decode(),  # the path of a source file may hold other bytes
    )
    found = list(outs)[: len(out_avals)]
    for k in kernel.widened:
        found[k] = jax.lax.convert_element_type(found[k], out_avals[k].dtype)
    return found


def _packed(packed: Packed, stationary: _Stationary) -> list[Any]:
    """The operands that XLA makes for a part."""
    found: list[Any] = []
    for group, order in zip(packed.weights, packed.order, strict=True):
        found.append(pack.weights(group, order, [stationary.value(r.value) for r in group]))
    if packed.vectors:
        values = [None if r.value is None else stationary.value(r.value) for r in packed.vectors]
        found.append(pack.vectors(packed.vectors, values))
    return found + [stationary.value(v) for v in packed.tables]


class _Stationary:
    """Values of a tile program that do not stream, each computed once, in front of the call."""

    def __init__(self, program: TileProgram, args: Sequence[Any], evaluate: Callable[[int, Sequence[Any]], Any]):
        self.program, self.args, self.evaluate = program, args, evaluate
        self.literals = dict(program.literals)
        self.makers: dict[int, Instr] = {
            v: i for s in program.stages for i in walk(s.body) for v in i.outputs if not program.values[v].tile
        }
        # What stands in a loop of the graph, or hands it a carry, says the loop's number.
        self.loops = {i.op for s in program.stages for i in walk(s.body) if i.kind == "loop"}
        self.known: dict[int, Any] = {}
        self.by_op: dict[int, Any] = {}  # makers stand in every stage that needs them

    def value(self, v: int) -> Any:
        if v not in self.known:
            self.known[v] = self._value(v)
        return self.known[v]

    def _value(self, v: int) -> Any:
        if v in self.literals:
            return np.asarray(self.literals[v], dtype=jnp.dtype(self.program.values[v].dtype))
        instr = self.makers[v]
        if instr.kind in ("load", "load_slice"):  # the recipe of a slice says how to cut it
            return self.args[instr["array"]]
        operands = [self.value(x) for x in instr.inputs]
        if instr.kind == "reshape":
            return jnp.reshape(operands[0], instr["new_sizes"])
        if instr.op < 0 or instr.op in self.loops:  # of a pass over the tile program, or of a loop's body, not of the graph
            t = self.program.values[v]
            return OPS[instr.kind].evaluate(dict(instr.params), *operands, out=Value(t.shape, t.dtype))
        if instr.op not in self.by_op:
            self.by_op[instr.op] = self.evaluate(instr.op, operands)
        return self.by_op[instr.op]
