"""Custom calls that others replace: XLA's partitioner, or the call of an exported program; meshes, shardings, modules of shards.

Comes in: a lowering context, shapes, XLA's shardings, or the jaxpr of one shard. Goes out: custom calls and registered partitioners
and resolvers of them; shardings and types of one shard; the module that takes the place of a call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax._compat.jaxprs import (
    core,
    in_avals,
    inner_jaxprs,
    is_exported,
    is_symbolic,
    jax_module,
    lower_jaxpr,
    mlir,
    new_primitive,
    open_parts,
    physical,
    register_lowering,
    symbolic_sizes,
    x64,
)

sharding_impls = jax_module("jax._src.sharding_impls")
mesh_lib = jax_module("jax._src.mesh")
xla_client = jax_module("jax._src.lib").__dict__.get("xla_client")
xla_bridge = jax_module("jax._src.xla_bridge")
sharding_rules = jax_module("jax._src.custom_partitioning_sharding_rule")
compiler = jax_module("jax._src.compiler")
mlir_lib = jax_module("jax._src.lib.mlir")


_registered = set[str]()  # the calls that have a partitioner


def partitions_automatically(ctx: Any) -> bool:
    """Is the module that ``ctx`` lowers for several devices, among which XLA divides it by Shardy's rules? Or a part of it, inside
    of a ``shard_map`` that leaves axes of its mesh automatic?"""
    axes = ctx.module_context.axis_context
    several = hasattr(axes, "manual_axes") or (getattr(axes, "num_devices", 1) or 1) > 1
    return several and bool(_registered) and bool(getattr(jax.config, "jax_use_shardy_partitioner", False))


def partly_manual_mesh(ctx: Any) -> tuple[dict[str, int], tuple[str, ...]] | None:
    """(axes with their sizes, those that are manual) of the ``shard_map`` around what ``ctx`` lowers; None where no axis is."""
    axes = ctx.module_context.axis_context
    manual = frozenset(getattr(axes, "manual_axes", ()))
    return (dict(axes.mesh.shape), tuple(a for a in axes.mesh.axis_names if a in manual)) if manual else None


def has_unreduced_sums(closed: Any) -> bool:
    """Does some value of ``closed`` lie on the devices in parts of sums that are not yet added up, or as the derivative of such?"""
    jaxpr, _ = open_parts(closed)
    atoms = [*jaxpr.invars, *jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    specs = [getattr(getattr(v.aval, "sharding", None), "spec", None) for v in atoms]
    if any(getattr(spec, "unreduced", None) or getattr(spec, "reduced", None) for spec in specs):
        return True
    return any(has_unreduced_sums(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn))


def are_collectives(effects: Collection[Any], axes: Collection[str]) -> bool:
    """Are all ``effects`` of a jaxpr collectives over ``axes``?"""
    kind = getattr(core, "NamedAxisEffect", ())
    return all(isinstance(effect, kind) and effect.name in axes for effect in effects)


def register_partitioner(name: str, partition: Callable[..., Any]) -> None:
    """XLA calls ``partition(shapes, shardings of the operands, result shape, result sharding, config)`` for a custom call of that
    name in a module that it partitions; it returns (a module for one device, shardings of the operands, of the result)."""

    def never(*_: Any) -> Any:
        raise NotImplementedError("kitsune_jax has rules for the Shardy partitioner only")

    def register(**more: Any) -> None:
        xla_client.register_custom_call_partitioner(
            name, never, partition, never, can_side_effecting_have_replicated_sharding=True, **more
        )

    register()
    _registered.add(name)
    # Plugins, such as CUDA's, have partitioners of their own.
    with contextlib.suppress(AttributeError):
        xla_bridge.register_plugin_callbacks(register)


def partitioned_call(
    ctx: Any, args: Sequence[Any], name: str, config: str, plain: Any, marked: Mapping[str, int] | None = None
) -> Any:
    """The results of a custom call that XLA's partitioner will replace.

    ``plain``: a jaxpr of the same results. XLA divides these, its own, as it divides those of any program, and the call's results
    as them. They are operands of the call too, behind ``args``, of which the program in its place reads none, so XLA drops them.
    Inside of a ``shard_map``, where its partitioner ends the process in some programs, they are no operands and it never sees
    them: a group says that they are divided alike. (A function that is lowered once and called twice has the same groups twice,
    all members of which are divided alike: so this is not the way everywhere.)
    ``marked``: mesh axes with their sizes. The call then has one more operand: an array with a dimension for each, divided by it.
    """
    ir = mlir_lib.ir
    results = [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(np.dtype(aval.dtype))) for aval in ctx.avals_out]
    untyped = [core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_out]
    with no_mesh(), x64(True):
        like = lower_jaxpr(ctx.replace(avals_in=in_avals(plain), avals_out=untyped), plain, args)
    like = [x[0] if isinstance(x, list | tuple) else x for x in like]
    return _placed(ctx, _partitioned_op(ctx, results, args, like, (name, config), marked).results)


def _mark(ctx: Any, axes: Mapping[str, int]) -> Any:
    aval = core.ShapedArray(tuple(axes.values()), np.dtype(np.uint8))
    where = jax.sharding.NamedSharding(ctx.module_context.axis_context.mesh, jax.sharding.PartitionSpec(*axes))
    zeros = mlir.ir_constant(np.zeros(aval.shape, aval.dtype))
    return mlir.wrap_with_sharding_op(ctx, zeros, aval, where._to_sdy_sharding(aval.ndim), allow_shardy_lowering=True)


def _placed(ctx: Any, results: Sequence[Any]) -> Sequence[Any]:
    """``results`` with the shardings of their types, which on an explicit mesh hold for every result."""
    placed = getattr(mlir, "lower_with_sharding_in_types", None)
    return results if placed is None else [placed(ctx, x, aval) for x, aval in zip(results, ctx.avals_out, strict=True)]


def _partitioned_op(
    ctx: Any,
    results: Sequence[Any],
    args: Sequence[Any],
    like: Sequence[Any],
    name_and_config: tuple[str, str],
    marked: Mapping[str, int] | None,
) -> Any:
    ir, dialects = mlir_lib.ir, jax_module("jax._src.lib.mlir.dialects")
    name, config = name_and_config
    grouped = partly_manual_mesh(ctx) is not None
    operands = [*args, *(() if grouped else like), *([_mark(ctx, marked)] if marked else ())]
    call = dialects.hlo.CustomCallOp(
        results,
        operands,
        call_target_name=ir.StringAttr.get(name),
        has_side_effect=ir.BoolAttr.get(False),
        backend_config=ir.StringAttr.get(config),
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        operand_layouts=None,
        result_layouts=None,
    )
    mine = None if grouped else slice(len(args), len(args) + len(like))
    call.attributes["sdy.sharding_rule"] = _rule(mine, [x.type for x in operands], results)
    for pair in zip(call.results, like, strict=True) if grouped else ():
        group = ctx.module_context.new_channel()  # a number that the module has once
        for x in pair:
            dialects.sdy.ShardingGroupOp(x, group)
    return call


def _rule(like: slice | None, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """The results are divided as the operands ``like``; every other dimension for itself."""
    rules = sharding_rules
    ins = [rules.ArrayMapping(*(f"x{k}_{d}" for d in range(kind.rank))) for k, kind in enumerate(operands)]
    alone = [rules.ArrayMapping(*(f"y{k}_{d}" for d in range(kind.rank))) for k, kind in enumerate(results)]
    outs = alone if like is None else ins[like]
    return rules.sdy_sharding_rule_to_mlir(rules.SdyShardingRule(tuple(ins), tuple(outs)), list(operands), list(results))


# --- explicit meshes ------------------------------------------------------------------------------------------------------------


@functools.cache
def _typed() -> Any:
    """The primitive that gives an array another type. Made where it is needed: a JAX without rules of lowering has no pipelines."""
    primitive = new_primitive("kitsune_typed")
    primitive.multiple_results = False
    primitive.def_abstract_eval(lambda _, aval: aval)

    def rule(ctx: Any, x: Any, aval: Any) -> Any:
        placed = getattr(mlir, "lower_with_sharding_in_types", None)
        return [x if placed is None else placed(ctx, x, aval)]

    register_lowering(primitive, rule)
    return primitive


def is_explicit(aval: Any) -> bool:
    """Does the type ``aval`` say on which mesh its array lies?"""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty


def with_type(x: Any, aval: Any) -> Any:
    """``x`` with the explicit sharding of ``aval``."""
    return _typed().bind(x, aval=aval) if is_explicit(aval) else x


def without_type(x: Any) -> Any:
    """``x`` as an array whose type says nothing of a mesh."""
    aval = jax.typeof(x)
    return _typed().bind(x, aval=core.ShapedArray(aval.shape, aval.dtype)) if is_explicit(aval) else x


def with_types_of(eqns: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """``arrays``, the operands of the only equation of ``eqns``, with the shardings that it was traced with, if there is one."""
    wanted = [v.aval for v in eqns[0].invars] if eqns else []
    if len(wanted) != len(arrays):
        return list(arrays)
    found = []
    for x, aval in zip(arrays, wanted, strict=True):
        have = jax.typeof(x)
        differs = is_explicit(have) and have.shape == getattr(aval, "shape", None) and have.sharding != aval.sharding
        found.append(_typed().bind(x, aval=aval) if differs else x)
    return found


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """A context in which operators ask for no shardings of their operands."""
    with contextlib.ExitStack() as stack:
        if hasattr(mesh_lib, "use_abstract_mesh"):
            stack.enter_context(mesh_lib.use_abstract_mesh(mesh_lib.empty_abstract_mesh))
        yield


# --- calls whose sizes are known where an exported program is called ------------------------------------------------------------


def unsized_call(ctx: Any, args: Sequence[Any], name: str, config: str) -> Any:
    """The results of a custom call in a program that is exported with symbolic shapes. Behind ``args`` its operands are the values
    of ``symbolic_sizes``."""
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    shapes = [mlir.eval_dynamic_shape_as_tensor(ctx, aval.shape) for aval in ctx.avals_out]
    operands = [*args, *symbolic_sizes(ctx).values()]
    call = mlir.custom_call(name, result_types=types, operands=operands, backend_config=config, api_version=2, result_shapes=shapes)
    return _placed(ctx, call.results)


_resolved = set[str]()  # the calls that have a resolver


def resolves(name: str) -> bool:
    """Have calls of that name a resolver?"""
    return name in _resolved


def register_resolver(name: str, resolve: Callable[..., Any]) -> None:
    """Where an exported program is called, ``resolve(ctx, config, integers)`` is asked about each ``unsized_call`` of that name.

    ``ctx`` lowers the program that calls; ``integers``: the number that each operand is, None where it is an array. It returns a
    module that takes the call's place, or (configuration, a module of the same results, marked) of a ``partitioned_call``; and how
    many operands are sizes.

    JAX's rule for calls of exported programs is wrapped, because no other place knows the shapes before XLA compiles.
    Raises ``AttributeError`` where this JAX has no such rule.
    """
    exporting = jax_module("jax._src.export._export")
    plain, primitive, refine = exporting._call_exported_lowering, exporting.call_exported_p, _refinement()

    def rule(ctx: Any, *args: Any, exported: Any) -> Any:
        known = not any(is_symbolic(d) for aval in ctx.avals_in for d in getattr(aval, "shape", ()))
        if known and not is_exported(ctx) and name.encode() in exported.mlir_module_serialized:
            with ctx.module_context.module.context, mlir_lib.ir.Location.unknown():
                module = exported.mlir_module(serialized=False)
                if next(_unsized(module, name), None) is not None:
                    module = _with_types(module, [physical(ctx.avals_in[k]) for k in exported.module_kept_var_idx])
                    module = mlir_lib.ir.Module.parse(refine(mlir.module_to_bytecode(module)))
                    _resolve(ctx, module, name, resolve)
                    exported = _Resolved(exported, module, ctx.avals_in, ctx.avals_out)
        return plain(ctx, *args, exported=exported)

    register_lowering(primitive, rule)
    _resolved.add(name)


def _refinement() -> Callable[[bytes], bytes]:
    """XLA's pass that turns the shapes of a module into numbers, once those of its arguments are."""
    found = jax_module("jax._src.lib")._jax.mlir.refine_polymorphic_shapes

    def refine(module: bytes) -> bytes:
        shardy = bool(getattr(jax.config, "jax_use_shardy_partitioner", False))
        made: bytes = found(mlir_module=module, enable_shape_assertions=True, validate_static_shapes=True, enable_shardy=shardy)
        return made

    return refine


class _Resolved:
    """An exported program with another module, of fixed shapes."""

    def __init__(self, exported: Any, module: Any, in_avals: Sequence[Any], out_avals: Sequence[Any]):
        self._exported, self._module = exported, module
        self.in_avals, self.out_avals, self.uses_global_constants = tuple(in_avals), tuple(out_avals), False

    def mlir_module(self, serialized: bool = True) -> Any:
        return mlir.module_to_string(self._module) if serialized else self._module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exported, name)


def _unsized(module: Any, name: str) -> Iterator[Any]:
    """The calls of that name in ``module`` that no partitioner waits for."""

    for op in _ops(module, "stablehlo.custom_call"):
        if "sdy.sharding_rule" not in op.attributes and mlir_lib.ir.StringAttr(op.attributes["call_target_name"]).value == name:
            yield op


def _ops(module: Any, name: str | None = None) -> Iterator[Any]:
    """The operations in ``module``, those inside of others first; of that ``name`` only."""

    def inside(op: Any) -> Iterator[Any]:
        for region in op.regions:
            for block in region:
                for inner in block:
                    yield from inside(inner.operation)
        if name in (None, op.name):
            yield op

    return inside(module.operation)


def _with_types(module: Any, avals: Sequence[Any]) -> Any:
    """``module`` with types of these shapes for the last arguments of its main function, each converted where it is read: the
    functions that it calls have symbolic types yet."""
    ir, hlo = mlir_lib.ir, jax_module("jax._src.lib.mlir.dialects").hlo
    main = ir.SymbolTable(module.operation)["main"]
    types = list(main.type.inputs)
    first = len(types) - len(avals)
    for k, aval in enumerate(avals, first):
        argument, before = main.arguments[k], types[k]
        types[k] = ir.RankedTensorType.get(aval.shape, ir.RankedTensorType(before).element_type)
        if types[k] != before:
            argument.set_type(types[k])
            with ir.InsertionPoint.at_block_begin(main.entry_block):
                converted = hlo.ConvertOp(before, argument)
            argument.replace_all_uses_except(converted.result, converted.operation)
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, main.type.results))
    return module


def _resolve(ctx: Any, module: Any, name: str, resolve: Callable[..., Any]) -> None:
    """Replace the calls of that name in ``module``, whose shapes are known."""
    ir, func = mlir_lib.ir, jax_module("jax._src.lib.mlir.dialects").func
    table = ir.SymbolTable(module.operation)
    for op in list(_unsized(module, name)):
        text = ir.StringAttr(op.attributes["backend_config"]).value
        operands, results = list(op.operands), list(op.results)
        types = [x.type for x in results]
        found, count = resolve(ctx, text, list(map(_integer, operands)))
        operands = operands[: len(operands) - count]
        with ir.InsertionPoint(op), op.location:
            part = ir.Module.parse(found if isinstance(found, bytes) else found[1])
            callee = mlir.merge_mlir_modules(module, "kitsune_part", part, dst_symtab=table)
            new = func.CallOp(types, ir.FlatSymbolRefAttr.get(callee), operands)
            if not isinstance(found, bytes):
                config, _, marked = found
                new = _partitioned_op(ctx, types, operands, list(new.results), (name, config), marked)
        for before, after in zip(results, new.results, strict=True):
            before.replace_all_uses_with(after)
        op.erase()


def _integer(value: Any) -> int | None:
    """The number that ``value`` is, if it is a constant integer."""
    ir = mlir_lib.ir
    made, kind = value.owner, ir.RankedTensorType(value.type)
    if kind.rank or not isinstance(kind.element_type, ir.IntegerType) or getattr(made, "name", "") != "stablehlo.constant":
        return None
    return int(ir.DenseElementsAttr(made.attributes["value"]).get_splat_value().value)


# --- in a partitioner -----------------------------------------------------------------------------------------------------------


def parts_of_result(shape: Any, sharding: Any) -> tuple[list[Any], list[Any]]:
    """(shapes, shardings) of the results of a call."""
    return (shape.tuple_shapes(), sharding.tuple_elements()) if shape.is_tuple() else ([shape], [sharding])


def as_result(shape: Any, shardings: Sequence[Any]) -> Any:
    """The sharding of a call's result, of which ``shardings`` are the parts."""
    return xla_client.HloSharding.tuple_sharding(shape, list(shardings)) if shape.is_tuple() else shardings[0]


def sharding_wish(eqns: Sequence[Any]) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, ...] | None, ...]] | None:
    """(the axes of the mesh with their sizes, the axes of each dimension, None for any) of the sharding constraint that ``eqns``
    are; None for other equations, and for a constraint that says more."""
    if not eqns or eqns[-1].primitive.name != "sharding_constraint":
        return None
    params, aval = eqns[-1].params, eqns[-1].outvars[0].aval
    sharding = params["sharding"]
    if not isinstance(sharding, jax.sharding.NamedSharding) or params.get("layout") is not None:
        return None
    if any(kind != jax.sharding.AxisType.Auto for kind in getattr(sharding.mesh, "axis_types", ())):
        return None
    if getattr(sharding.spec, "unreduced", None) or sharding.memory_kind not in (None, "device", "unpinned_host"):
        return None
    spec = (*sharding.spec, *(None,) * (aval.ndim - len(sharding.spec)))
    free = params.get("unconstrained_dims") or ()
    parts = tuple(
        None if d in free or part is jax.sharding.PartitionSpec.UNCONSTRAINED else _axes(part) for d, part in enumerate(spec)
    )
    return tuple(sharding.mesh.shape.items()), parts


def constrained(x: Any, mesh: Sequence[tuple[str, int]], parts: Sequence[Sequence[str] | None]) -> Any:
    """``x`` with the sharding constraint that ``sharding_wish`` has read."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = jax.sharding.PartitionSpec(*(free if axes is None else tuple(axes) or None for axes in parts))
    automatic = (jax.sharding.AxisType.Auto,) * len(mesh)
    on = jax.sharding.AbstractMesh(tuple(n for _, n in mesh), tuple(axis for axis, _ in mesh), axis_types=automatic)
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(on, spec))


def common_mesh(
    shardings: Sequence[Any], axes: dict[str, int] | None = None, wished: dict[str, int] | None = None
) -> tuple[dict[str, int], list[tuple[tuple[str, ...], ...] | None]]:
    """(axes with their sizes, for each sharding the axes of each dimension) of a mesh that has a place for all these shardings.

    None in the place of one that divides no dimension: a replicated one, or that of an array on one device, which XLA copies to all
    (it runs callbacks on one). ``axes``: of the only mesh that may be; without it they are those ``wished`` if possible, or have
    names of their own. Raises ``NotImplementedError`` where there is no such mesh.
    """
    whole = [s.is_replicated() or s.is_maximal() for s in shardings]
    tiled = [s for s, undivided in zip(shardings, whole, strict=True) if not undivided]
    if not tiled:
        return axes or wished or {"a0": 1}, [None] * len(shardings)
    meshes = [_abstract(axes)] if axes else [*([_abstract(wished)] if wished else ()), *_meshes(tiled[0].num_devices())]
    for mesh in meshes:
        with contextlib.suppress(Exception):
            specs = [
                None if undivided else sharding_impls.parse_flatten_op_sharding(s, mesh)[0]
                for s, undivided in zip(shardings, whole, strict=True)
            ]
            found = [None if spec is None else tuple(map(_axes, spec)) for spec in specs]
            return dict(mesh.shape), found
    raise NotImplementedError("its shardings have no mesh in common")


def in_order_of_devices(axes: dict[str, int], sharding: Any) -> dict[str, int]:
    """``axes``, each of which divides one dimension in ``sharding``, in the order in which XLA numbers the devices: the first
    changes slowest. Raises ``NotImplementedError`` where it numbers them in another way."""
    wanted = [(axis,) for axis in axes]
    for order in itertools.permutations(axes):
        mesh = {axis: axes[axis] for axis in order}
        with contextlib.suppress(Exception):
            if [_axes(part) for part in sharding_impls.parse_flatten_op_sharding(sharding, _abstract(mesh))[0]] == wanted:
                return mesh
    raise NotImplementedError("its devices are in no order of the mesh")


def _meshes(devices: int) -> Iterator[Any]:
    """The meshes of so many devices whose axes cannot be divided."""
    sizes = _primes(devices)
    for order in sorted(set(itertools.permutations(sizes))) if len(sizes) < 7 else [tuple(sizes)]:
        yield jax.sharding.AbstractMesh(order, tuple(f"a{k}" for k in range(len(order))))


def _axes(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _primes(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def sharding_of(mesh: dict[str, int], spec: Sequence[Sequence[str]]) -> Any:
    """XLA's sharding of an array whose dimensions are divided by the axes ``spec`` of ``mesh``."""
    return jax.sharding.NamedSharding(_abstract(mesh), _partition_spec(spec))._to_xla_hlo_sharding(len(spec))


def _abstract(mesh: dict[str, int]) -> Any:
    return jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))


_told: dict[str, RuntimeError] = {}  # errors that were raised in a partitioner, by their texts


def compilation_error(text: str) -> RuntimeError:
    """An error to raise in a partitioner, which the compilation then raises in the place of XLA's, where JAX can do so."""
    if not _told and hasattr(compiler, "register_xla_runtime_error_handler"):
        compiler.register_xla_runtime_error_handler(lambda error: next((e for t, e in _told.items() if t in str(error)), None))
    _told[text] = RuntimeError(text)
    return _told[text]


@contextlib.contextmanager
def manual_mesh(mesh: dict[str, int]) -> Iterator[None]:
    """The context in which a program of one shard is traced: collectives know the axes of ``mesh``, and nothing of the thread that
    compiles (its mesh, its precision of integers) is seen."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_mesh())
        stack.enter_context(x64(True))
        stack.enter_context(core.extend_axis_env_nd(mesh.items()))
        yield


@functools.cache
def _product_over_devices() -> Any:
    primitive = new_primitive("kitsune_product_over_devices")
    primitive.multiple_results = False
    primitive.def_abstract_eval(lambda aval, **_: aval)

    def rule(ctx: Any, x: Any, axes: tuple[tuple[str, int], ...]) -> Any:
        """JAX's all-reduce for a maximum, with a multiplication in the place of its maximum."""
        ir, hlo = mlir_lib.ir, jax_module("jax._src.lib.mlir.dialects").hlo
        with core.extend_axis_env_nd(axes):
            (made,) = mlir.lower_fun(lambda x: jax.lax.pmax(x, tuple(a for a, _ in axes)), multiple_results=False)(ctx, x)
        (block,) = made.owner.regions[0].blocks
        (maximum,) = (op for op in block.operations if op.operation.name == "stablehlo.maximum")
        with ir.InsertionPoint(maximum):
            product = hlo.multiply(*maximum.operation.operands)
        maximum.operation.result.replace_all_uses_with(product)
        maximum.operation.erase()
        return [made]

    register_lowering(primitive, rule)
    return primitive


def product_over_devices(x: Any, axes: dict[str, int]) -> Any:
    """``x`` multiplied up over the devices along the mesh ``axes``, which have these sizes. JAX has no such collective."""
    return _product_over_devices().bind(x, axes=tuple(axes.items()))


def permuted_over_devices(x: Any, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Any:
    """``x`` of the first device on the second one, for each of ``pairs`` of positions along ``axes``. JAX's own collective takes
    axes in the order of the mesh alone."""
    sizes = core.get_axis_env().axis_sizes
    order = sorted(axes, key=list(sizes).index)
    positions = np.arange(math.prod(sizes[a] for a in order)).reshape([sizes[a] for a in order])
    place = positions.transpose([order.index(a) for a in axes]).reshape(-1)
    return jax.lax.ppermute(x, tuple(order), [(int(place[source]), int(place[target])) for source, target in pairs])


def module_of(closed: Any, mesh: dict[str, int], platform: str) -> bytes:
    """The module of ``closed``, a program of one shard, for XLA to put in the place of a call."""
    context = sharding_impls.SPMDAxisContext(_abstract(mesh), frozenset(mesh))
    module = mlir.build_mlir_module_helper(closed, name="kitsune_shard", platforms=[platform], backend=None, axis_context=context)
    return bytes(mlir.module_to_bytecode(module))


def local_avals(shapes: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """The types of one shard of arrays of XLA's ``shapes``."""
    return [core.ShapedArray(s.tile(x).dimensions(), x.numpy_dtype()) for x, s in zip(shapes, shardings, strict=True)]


# --- compilations of a program alone ----------------------------------------------------------------------------------------------

# The machine code is never run.
_FAST: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_gpu_autotune_level": 0,
}
_PASS = "spmd-partitioning"


def partition_by_xla(closed: Any, mesh: Mapping[str, int], given: Sequence[Any], asked: Sequence[Any], platform: str) -> bytes:
    """The module of one shard in XLA's own partition of ``closed``, a program of whole arrays. ``given``, ``asked``: the mesh axes
    of each dimension of the operands and results.

    The module is in no public result of a compilation, so it is read from what XLA can be told to write after a pass.
    """
    devices = _devices(mesh, platform)
    on = jax.sharding.Mesh(np.array(devices).reshape(tuple(mesh.values())), tuple(mesh))
    places = [[jax.sharding.NamedSharding(on, _partition_spec(spec)) for spec in specs] for specs in (given, asked)]
    jitted = jax.jit(core.jaxpr_as_fun(closed), in_shardings=tuple(places[0]), out_shardings=places[1], keep_unused=True)
    with no_mesh(), x64(True):
        module = jitted.lower(*in_avals(closed)).compiler_ir("stablehlo")
    with tempfile.TemporaryDirectory(prefix="kitsune") as folder:
        dumped = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": _PASS, "xla_dump_hlo_as_proto": True}
        _compiled_alone(module, devices, True, dumped)
        (after,) = pathlib.Path(folder).glob(f"*after_{_PASS}*.hlo.pb")
        proto = _first_field(after.read_bytes())
    return bytes(xla_client._xla.mlir.hlo_to_stablehlo(proto))


def in_every_group(module: bytes, group: Mapping[str, int], mesh: Mapping[str, int]) -> bytes:
    """``module``, a program of one of the devices along the axes ``group``, as one of a device of the whole ``mesh``, for each
    group of devices that differ in those axes alone. Raises ``ValueError`` where a collective names devices in an unknown way."""
    if math.prod(group.values()) == math.prod(mesh.values()):
        return module
    ir, hlo = mlir_lib.ir, jax_module("jax._src.lib.mlir.dialects").hlo
    axes = [*(axis for axis in mesh if axis not in group), *group]
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values())).transpose([list(mesh).index(axis) for axis in axes])
    ids = ids.reshape(-1, math.prod(group.values()))  # a row for each group
    places = np.zeros(ids.size, np.uint32)
    places[ids] = np.arange(ids.shape[1], dtype=np.uint32)
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        for name in ("mhlo.spmd_parameters_shardings", "mhlo.spmd_output_sharding"):  # among the devices of one group
            if name in parsed.operation.attributes:
                del parsed.operation.attributes[name]
        meshes = {op.attributes["sym_name"].value: str(op.attributes["mesh"]) for op in _ops(parsed, "sdy.mesh")}
        for op in list(_ops(parsed)):
            for name in ("replica_groups", "source_target_pairs"):
                if name in op.attributes:
                    found = _device_groups(op.attributes[name], meshes)
                    found = np.ascontiguousarray(ids[:, found].reshape(-1, found.shape[1]))
                    op.attributes[name] = ir.DenseIntElementsAttr.get(found)
        for op in list(_ops(parsed, "stablehlo.partition_id")):
            with ir.InsertionPoint(op):
                table = hlo.ConstantOp(ir.DenseIntElementsAttr.get(places, type=ir.IntegerType.get_unsigned(32)))
                place = hlo.DynamicSliceOp(table, [hlo.PartitionIdOp()], ir.DenseI64ArrayAttr.get([1]))
                scalar = hlo.ReshapeOp(op.results[0].type, place)
            op.results[0].replace_all_uses_with(scalar.result)
            op.erase()
        return bytes(mlir.module_to_bytecode(parsed))


def _device_groups(attribute: Any, meshes: Mapping[str, str]) -> Any:
    """The numbers of devices, a row for each group or pair, that an attribute of a collective lists or names by axes of a mesh."""
    ir, text = mlir_lib.ir, str(attribute)
    if text.startswith("dense<"):
        found = np.array(ir.DenseIntElementsAttr(attribute))
        if found.size and found.min() >= 0:
            return found
    elif (named := re.fullmatch(r"#stablehlo.replica_group_mesh_axes<mesh = @(\w+), axes = \[(.*)\]>", text)) is not None:
        sizes = {axis: int(n) for axis, n in re.findall(r'"(\w+)"=(\d+)', meshes[named[1]])}
        axes = re.findall(r'#stablehlo.axis_ref<name = "(\w+)">', named[2])
        if "device_ids" not in meshes[named[1]] and named[2].count("#") == len(axes):
            order = [*(k for k, axis in enumerate(sizes) if axis not in axes), *map(list(sizes).index, axes)]
            devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order)
            return devices.reshape(-1, math.prod(sizes[axis] for axis in axes))
    raise ValueError(f"a collective among unknown devices: {text}")


def compiled_shard(module: bytes, mesh: Mapping[str, int], platform: str) -> tuple[str, int]:
    """(the text, the bytes of temporary memory) of the compiled ``module`` of one shard."""
    loaded = _compiled_alone(module, _devices(mesh, platform), False, {})
    (text,) = (found.to_string() for found in loaded.hlo_modules())
    return text, loaded.get_compiled_memory_stats().temp_size_in_bytes


def _devices(mesh: Mapping[str, int], platform: str) -> list[Any]:
    """Raises ``RuntimeError`` where the devices of this process may not be those for which the program is compiled: all processes
    have to come to the same decisions."""
    count, devices = math.prod(mesh.values()), jax.devices(platform)
    if len(devices) < count or (jax.process_count() > 1 and len(devices) != count):
        raise RuntimeError(f"a program of {count} devices cannot be compiled for the {len(devices)} of this process")
    return devices[:count]


def _compiled_alone(module: Any, devices: Sequence[Any], divided: bool, more: Mapping[str, Any]) -> Any:
    """``divided``: by XLA. To compile a module that is divided already, each device has a replica of the program. JAX's cache of
    compiled programs is passed by: a program from there was not written by a pass."""
    backend, ids = devices[0].client, np.array([[d.id for d in devices]])
    options = compiler.get_compile_options(
        *((1, len(devices), ids) if divided else (len(devices), 1, ids.T)),
        {**_FAST, **more},
        detailed_logging=False,
        backend=backend,
    )
    build = options.executable_build_options
    build.use_spmd_partitioning, build.use_shardy_partitioner = divided, divided
    return backend.compile_and_load(module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=options)


def _first_field(message: bytes) -> bytes:
    """The first field of a protocol buffer, a message: the ``HloModuleProto`` of an ``HloProto``."""
    length, shift, at = 0, 0, 1
    while True:
        byte = message[at]
        length, shift, at = length | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return message[at : at + length]


def _partition_spec(spec: Sequence[Sequence[str]]) -> Any:
    return jax.sharding.PartitionSpec(*(tuple(axes) or None for axes in spec))
