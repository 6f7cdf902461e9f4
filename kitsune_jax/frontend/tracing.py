"""From the call of a pipelined function to one equation of the primitive ``kitsune_pipeline[call_jaxpr, options]``.

Comes in: a Python function, its arguments and ``Options``. Goes out: the callable that ``jax.jit`` traces (``Body``). It splits
arguments into arrays and static leaves, looks for arguments that the function changes, and binds the primitive. Invariants: there
is one callable per function, policy and options, so that JAX's trace cache recognises it; a transformation only ever rewrites
``call_jaxpr`` and binds the same primitive again, so forward, backward, batched and recomputed programs all reach the same
lowering.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from kitsune_jax import _compat, config, targets
from kitsune_jax.config import Options
from kitsune_jax.errors import MutatedArgument, ResidualsWarning
from kitsune_jax.frontend import lowering
from kitsune_jax.gradient import residual_cleanup
from kitsune_jax.sharding.calls import register as register_partitioner
from kitsune_jax.sharding.calls import register_loaded

# --- arguments: which leaves are arrays, which are static -------------------------------------------------------------------------

_compat.hide_from_tracebacks(__file__)

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_DYNAMIC, _DONATED = object(), object()  # marks, in place of a leaf that is not static


def is_array_like(x: Any) -> bool:
    """Does ``jax.jit`` take ``x`` as a dynamic argument (an array, a number, a ref, the shape of an array)?"""
    if type(x) in (float, int, bool, complex) or isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return True
    return hasattr(x, "__jax_array__") or _compat.valid_jaxtype(x)


@dataclasses.dataclass(frozen=True)
class _WholeArgument:
    """A static argument, kept whole: one leaf, even if it is a pytree."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Static:
    """The hashable part of a call: the tree of its arguments, and each leaf that is not an array."""

    tree: Any
    leaves: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash((self.tree, self.leaves))

    def __eq__(self, other: object) -> bool:
        """As ``jax.jit`` compares static arguments: 1, 1.0 and True are three different values."""
        return (
            isinstance(other, Static)
            and self.tree == other.tree
            and all(type(a) is type(b) and a == b for a, b in zip(self.leaves, other.leaves, strict=True))
        )

    def join(self, donated: Sequence[Any], kept: Sequence[Any]) -> Arguments:
        """The arguments with these arrays in their places: the inverse of ``Statics.split``."""
        given, lent = iter(donated), iter(kept)
        leaves = [next(given) if x is _DONATED else next(lent) if x is _DYNAMIC else x for x in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        unwrap = lambda x: x.value if isinstance(x, _WholeArgument) else x  # noqa: E731
        return tuple(unwrap(a) for a in args), {k: unwrap(v) for k, v in kwargs.items()}


@dataclasses.dataclass(frozen=True)
class Statics:
    """Static and donated arguments, by position and by name, completed from the function's signature as ``jax.jit`` does."""

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()

    @staticmethod
    def of(
        fn: Callable[..., Any],
        argnums: int | Sequence[int] | None,
        argnames: str | Iterable[str] | None,
        donated: int | Sequence[int] | None,
    ) -> Statics:
        """Raises ``ValueError`` for anything but indices and names, and if a donated argument is static."""
        nums, give = _indices("static_argnums", argnums), _indices("donate_argnums", donated)
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
        if not all(isinstance(n, str) for n in names):
            raise ValueError(f"static_argnames={argnames!r} must be a name or names of arguments")
        parameters, positional = _parameters(fn)
        if parameters is None:
            return Statics(nums, names, give)
        unknown = [n for n in names if n not in {p.name for p in parameters}]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"static_argnames: the function has no argument {unknown[0]!r}")
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        nums = tuple(i + len(positional) if i < 0 and not variadic else i for i in nums)
        if argnames is None:
            names = tuple(positional[i] for i in nums if 0 <= i < len(positional))
        elif argnums is None:
            nums = tuple(positional.index(n) for n in names if n in positional)
        if set(nums) & set(give):
            raise ValueError(
                f"argument {min(set(nums) & set(give))} is both static and donated: a static value has no buffer to donate"
            )
        return Statics(nums, names, give)

    def jit_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``jax.jit``."""
        given: dict[str, Any] = {"donate_argnums": self.donated} if self.donated else {}
        if self.argnums or self.argnames:  # ``jax.jit`` completes one of them only where it is not given at all
            given |= {"static_argnums": self.argnums, "static_argnames": self.argnames}
        return given

    def all_arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Can ``jax.jit`` take these arguments as they are?"""
        if self.argnums or self.argnames:
            args = tuple(a for i, a in enumerate(args) if i not in self.argnums and i - len(args) not in self.argnums)
            kwargs = {k: v for k, v in kwargs.items() if k not in self.argnames}
        return all(map(is_array_like, jax.tree.leaves((args, kwargs))))

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Static, list[Any], list[Any]]:
        """``(static, donated arrays, other arrays)``. Raises ``TypeError`` for a static leaf that cannot be hashed."""
        wrapped = (
            tuple(_WholeArgument(a) if i in self.argnums or i - len(args) in self.argnums else a for i, a in enumerate(args)),
            {k: _WholeArgument(v) if k in self.argnames else v for k, v in kwargs.items()},
        )
        paths, tree = jax.tree.flatten_with_path(wrapped)
        donated: list[Any] = []
        kept: list[Any] = []
        leaves: list[Any] = []
        for path, leaf in paths:
            if isinstance(leaf, _WholeArgument) or not is_array_like(leaf):
                _check_hashable(path, leaf)
                leaves.append(leaf)
            elif path[0].idx == 0 and path[1].idx in self.donated:
                leaves.append(_DONATED)
                donated.append(leaf)
            else:
                leaves.append(_DYNAMIC)
                kept.append(leaf)
        return Static(tree, tuple(leaves)), donated, kept


def flattened(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any], list[int]]:
    """``fn`` as a function of the tracers and arrays among the leaves of its arguments, these, and their numbers among the leaves.

    All other leaves are static already and stay the Python values they are.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer | jax.Array | np.ndarray)]

    @functools.wraps(fn, updated=())
    def flat(*values: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(places, values, strict=True):
            filled[i] = x
        a, k = jax.tree.unflatten(tree, filled)
        return fn(*a, **k)

    return flat, [leaves[i] for i in places], places


def checkpoint(fn: Callable[..., Any], policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """``jax.checkpoint(fn)`` that also takes static leaves, as ``pipeline`` does."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        flat, dynamic, places = flattened(fn, args, kwargs)
        _compat.name_call(flat, fn, args, kwargs, places)
        return jax.checkpoint(flat, policy=policy)(*dynamic)

    return wrapped


def _indices(name: str, given: int | Sequence[int] | None) -> tuple[int, ...]:
    values = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise ValueError(f"{name}={given!r} must be an index or indices of positional arguments")
    return values


def _check_hashable(path: Any, leaf: Any) -> None:
    value = leaf.value if isinstance(leaf, _WholeArgument) else leaf
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"argument {jax.tree_util.keystr(path[1:])} of a pipelined function is a {type(value).__name__}, which is neither an "
            "array nor hashable: register it as a pytree (jax.tree_util.register_dataclass), make it hashable, or close over it"
        ) from None


# --- changes of objects among the arguments, which would be lost ------------------------------------------------------------------
# A traced function works on copies of its arguments, so a change in a mutable object (a module of flax nnx, an optimizer, a counter
# of random numbers) does not reach the caller's object. A function that changes nothing keeps its results, jaxpr and traces.

# Primitives that call a body with their operands -> the parameter that holds the body.
_CALLS = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "kitsune_pipeline": "call_jaxpr",
}


@dataclasses.dataclass(frozen=True)
class Changed:
    """The result of a function that has replaced arrays of its arguments.

    Array ``names[i]`` was ``before[i]`` and is ``after[i]``; only the jaxpr can tell whether both are the same value.
    ``lost``: names of arrays that are known already to hold another value.
    """

    result: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    names: tuple[str, ...]
    lost: tuple[str, ...]


jax.tree_util.register_dataclass(Changed, ["result", "before", "after"], ["names", "lost"])


def watch_mutations(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, but it returns a ``Changed`` if it replaced arrays in objects among its arguments and does not return them."""

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        objects = list(_objects(fn, args, kwargs))
        before = [jax.tree.flatten_with_path(x) for _, x in objects]
        result = fn(*args, **kwargs)
        pairs: list[tuple[str, Any, Any]] = []
        lost: list[str] = []
        for (name, x), (leaves, tree) in zip(objects, before, strict=True):
            for path, old, new in _replaced(x, leaves, tree, result):
                at = name + jax.tree_util.keystr(path)
                if isinstance(new, jax.core.Tracer) and not _compat.is_alive(new):  # of the body of a loop: it cannot be a result
                    lost.append(at)
                elif _compat.valid_jaxtype(new) and _compat.valid_jaxtype(old):
                    pairs.append((at, old, new))
        if not pairs and not lost:
            return result
        names, olds, news = zip(*pairs, strict=True) if pairs else ((), (), ())
        return Changed(result, olds, news, names, tuple(lost))

    return call


def find_lost_mutations(closed: Any, tree: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """``(jaxpr, tree of its results, names of the arrays whose change is lost)`` of a watched function, traced to ``closed``.

    Only arrays with another value than before are named: ``nnx.jit`` and ``nnx.remat`` replace all arrays of a module by results
    that are the same values.
    """
    data = tree.node_data()
    if data is None or data[0] is not Changed:
        return closed, tree, ()
    result = tree.children()[0]
    names, lost = data[1]
    sources = _forwarded(closed)
    first, last = sources[result.num_leaves :][: len(names)], sources[result.num_leaves + len(names) :]
    lost += tuple(name for name, old, new in zip(names, first, last, strict=True) if new is None or new != old)
    return _compat.first_results(closed, result.num_leaves), result, lost


def refuse_mutations(fn: Callable[..., Any], lost: tuple[str, ...]) -> None:
    """Raise ``MutatedArgument`` if any change is lost."""
    if not lost:
        return
    name = getattr(fn, "__qualname__", type(fn).__name__)
    first = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
    raise MutatedArgument(
        f"the pipelined function {name} changes its arguments in place and does not return the change: {first}. "
        "A pipelined function works on copies of its arguments, as under jax.jit, so the caller's objects would keep their old "
        "values. Write one of these:\n"
        "- Pipeline only the part that changes nothing (the loss, the forward pass), and leave the update to nnx.jit around it.\n"
        "- Return the new values, and write them back outside: `return loss, nnx.state(model, nnx.BatchStat)` in the function, "
        "`nnx.update(model, state)` after the call.\n"
        "- Take and return the state: `graphdef, state = nnx.split(model)` outside, `model = nnx.merge(graphdef, state)` in the "
        "function, which returns `nnx.state(model)`.\n"
        "- If the change may be lost, make it in a copy: `model = jax.tree.map(lambda x: x, model)` in the function.\n"
        "docs/training.md shows a program of each."
    )


def _objects(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The outermost mutable objects among the arguments, each with its name."""
    for name, argument in [*zip(_names(fn, len(args)), args, strict=True), *kwargs.items()]:
        for path, x in jax.tree.flatten_with_path(argument, is_leaf=lambda x: _is_object(x) or _is_state(x))[0]:
            if _is_object(x):
                yield name + jax.tree_util.keystr(path), x


def _is_object(x: Any) -> bool:
    """Is ``x`` a pytree node with a state of its own? Lists, tuples and mappings are data, and so are dataclasses.

    Functions write into those when they mean their own copy (``batch["x"] = normalise(batch["x"])``), and ``jax.jit`` lets them. A
    dataclass that handles its assignments itself is an object, as modules of nnx are.
    """
    if x is None or isinstance(x, list | tuple | dict | functools.partial | jax.Array) or _is_state(x):
        return False
    if dataclasses.is_dataclass(x) and (type(x).__setattr__ is object.__setattr__ or _is_frozen(x)):
        return False
    return not jax.tree_util.all_leaves([x])


def _is_frozen(x: Any) -> bool:
    return bool(getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False))


def _is_state(x: Any) -> bool:
    """Is ``x`` a mapping of a class of its own, such as ``nnx.State``? ``nnx.merge`` makes a module that shares its variables: a
    function that takes a state returns what it wants to keep."""
    return isinstance(x, Mapping) and not isinstance(x, dict)


def _replaced(x: Any, before: list[tuple[Any, Any]], tree: Any, result: Any) -> list[tuple[Any, Any, Any]]:
    """``(path, old, new)`` of the leaves of ``x`` that differ from ``before`` and ``tree``, and are not in ``result``."""
    try:
        leaves, now = jax.tree.flatten(x)
        if now == tree and all(new is old for new, (_, old) in zip(leaves, before, strict=True)):
            return []
        after, again = jax.tree.flatten_with_path(x)[0], jax.tree.leaves(x)
    except Exception:  # flattening is user code: ``equinox.nn.State`` refuses it after its use, so no change of it can be lost
        return []
    olds, returned = dict(before), {id(leaf) for leaf in jax.tree.leaves(result)}
    return [
        (path, olds[path], new)
        for (path, new), same in zip(after, again, strict=True)
        if path in olds
        and new is not olds[path]
        and id(new) not in returned
        and new is same  # some classes make new arrays each time
    ]


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of positional arguments."""
    parameters, positional = _parameters(fn)
    rest = next((p.name for p in parameters or () if p.kind is p.VAR_POSITIONAL), "args")
    return positional[:count] + [f"{rest}[{i}]" for i in range(count - len(positional))]


def _parameters(fn: Callable[..., Any]) -> tuple[list[inspect.Parameter] | None, list[str]]:
    """All parameters of ``fn``, ``None`` for a built-in without a signature; and the names of those that are positional."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None, []
    return parameters, [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _forwarded(program: Any) -> list[int | None]:
    """For each result of a jaxpr the number of the argument that it is, or None if it is computed."""
    jaxpr, _ = _compat.open_parts(program)
    sources = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for v, i in zip(eqn.outvars, _handed_on(eqn), strict=False):
            if i is not None and not _compat.is_literal(eqn.invars[i]) and eqn.invars[i] in sources:
                sources[v] = sources[eqn.invars[i]]
    return [None if _compat.is_literal(v) else sources.get(v) for v in jaxpr.outvars]


def _handed_on(eqn: Any) -> list[int | None]:
    """For each result of an equation the number of the operand that it is, or None if it is computed or unknown."""
    name = eqn.primitive.name
    if name in _CALLS:
        return _forwarded(eqn.params[_CALLS[name]])
    if name == "cond":
        first, *others = (_forwarded(b) for b in eqn.params["branches"])
        return [None if i is None or any(o[j] != i for o in others) else 1 + i for j, i in enumerate(first)]
    if name == "while":
        consts = eqn.params["body_nconsts"]
        start = eqn.params["cond_nconsts"] + consts
        return [start + j if i == consts + j else None for j, i in enumerate(_forwarded(eqn.params["body_jaxpr"]))]
    if name == "scan":
        consts, carries = _compat.scan_parts(eqn)
        body = _forwarded(eqn.params["jaxpr"])
        kept = [consts + j if i == consts + j else None for j, i in enumerate(body[:carries])]
        return kept + [i if i is not None and i >= consts + carries else None for i in body[carries:]]
    return []


# --- the primitive ``kitsune_pipeline[call_jaxpr, options]`` ----------------------------------------------------------------------

_jitted: weakref.WeakKeyDictionary[Any, dict[Options, Callable[..., list[jax.Array]]]] = weakref.WeakKeyDictionary()
_jitted_lock = threading.Lock()


def _impl(*args: Any, call_jaxpr: Any, options: Options) -> list[Any]:
    """Evaluate eagerly: compiled, so that an evaluated jaxpr reaches its pipelines too.

    Under ``disable_jit``, and where ``debug_nans`` looks for the failing operator, evaluate op by op instead: a compiled copy would
    hide the operators from the user, and would come back here.
    """
    if jax.config.jax_disable_jit or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return _compat.jaxpr_as_fun(call_jaxpr)(*args)
    return _compiled(call_jaxpr, options)(*args)


def _compiled(call_jaxpr: Any, options: Options) -> Callable[..., list[Any]]:
    """The jitted call, kept as long as ``call_jaxpr`` lives. It holds a copy, because JAX's caches would keep the key alive."""
    key = _compat.open_parts(call_jaxpr)[0]
    with _jitted_lock:
        per_options = _jitted.setdefault(key, {})
        if options not in per_options:
            copy = _compat.replace_jaxpr(call_jaxpr)
            per_options[options] = jax.jit(functools.partial(pipeline_p.bind, call_jaxpr=copy, options=options))
        return per_options[options]


# The platform that a program is traced for while ``explain`` plans for another one than JAX's own. JAX keys its caches on it. Made
# at import, because making one empties them.
expected_platform = jax.make_user_context(None)


def _choose_residuals(*parts: Any) -> Any:
    """``residual_cleanup.shrink_residuals``. If it fails, the gradient is right and keeps JAX's own residuals, which cost bytes."""
    try:
        return residual_cleanup.shrink_residuals(*parts)
    except Exception as error:
        if config.strict():
            raise
        config.logger.exception("a gradient keeps the residuals of JAX's own linearization")
        warnings.warn(
            f"kitsune_jax could not choose the residuals of a gradient ({type(error).__name__}: {error}), so it saves for the "
            "backward pass what jax.grad would save. This is a bug of kitsune_jax: please report it. KITSUNE_STRICT=1 turns this "
            "warning into an error.",
            ResidualsWarning,
            stacklevel=2,
        )
        return None


def _repeats_products(options: Options) -> bool:
    """May the backward pass recompute products on the target that a program traced now will most likely run on? The answer matters
    for speed alone: a program traced for one platform and lowered for another is right as well."""
    platform = expected_platform.value or _compat.default_platform()
    target = lowering.target_of(options, platform if platform in targets.PLATFORMS else None)
    return target is not None and targets.get(target).capabilities.repeats_products


def _primitive() -> Any:
    primitive = _compat.new_primitive(lowering.PRIMITIVE_NAME)
    _compat.register_call_rules(primitive, _choose_residuals, _repeats_products)
    # Lowering is cacheable: equal calls in a module share one function, and multi-platform export asks for it.
    for platform in (None, *targets.PLATFORMS):
        rule = functools.partial(lowering.lower_call, platform=platform)
        _compat.register_lowering(primitive, rule, platform=platform, cacheable=True)
    primitive.def_impl(_impl)
    try:
        register_partitioner(lowering.pipelined_shard)
    except Exception:  # a JAX without such partitioners costs the pipelines of sharded programs only
        config.logger.warning("this JAX takes no partitioner: sharded functions run without pipelines", exc_info=True)
    try:
        register_loaded(lowering.pipelined_part, lowering.machine_key)
    except Exception:
        config.logger.info("this JAX calls exported programs in another way: those with symbolic shapes have no pipelines")
    return primitive


try:
    pipeline_p, primitive_failure = _primitive(), ""
except Exception as error:  # an unknown JAX: nothing is bound then, and functions run as plain ``jit`` (``frontend.explain``)
    pipeline_p, primitive_failure = None, f"{type(error).__name__}: {error}"


# --- the callable that ``jax.jit`` traces -----------------------------------------------------------------------------------------

Residuals: TypeAlias = "str | Callable[..., Any]"


class Body:
    """The callable that ``jax.jit`` traces: it traces ``fn`` to a jaxpr and binds the primitive on it.

    Holds ``fn`` weakly, as it is the value of a cache whose key is ``fn``; the ``Pipeline`` that calls it holds ``fn``.
    """

    def __init__(self, fn: Callable[..., Any], residuals: Residuals, options: Options | None) -> None:
        self._fn: Callable[[], Any] = _reference(fn)
        self._residuals = residuals
        self._options = options
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        self.__doc__ = fn.__doc__
        with contextlib.suppress(TypeError, ValueError):  # a built-in without a signature
            self.__signature__ = inspect.signature(fn)
        self.call_split = functools.partial(call_split, self)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._fn()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._options is None or not _compat.is_staging():
            # Not under jit's trace: disable_jit, or debug_nans runs the function op by op to name the failing operator. Let it see
            # them.
            return self._with_residuals(self._fn())(*args, **kwargs)
        fn = self.watched()
        flat, dynamic, places = flattened(fn, args, kwargs)
        closed, out_tree = _compat.trace_call(flat, dynamic, _compat.call_info(fn, args, kwargs, places))
        closed, out_tree, lost = find_lost_mutations(closed, out_tree)
        refuse_mutations(self._fn(), lost)
        closed, consts = _compat.indices_inside(closed)
        outs = pipeline_p.bind(*consts, *dynamic, call_jaxpr=closed, options=self._options)
        return jax.tree.unflatten(out_tree, outs)

    def watched(self) -> Callable[..., Any]:
        """The function without a primitive around it, as ``watch_mutations`` makes it."""
        return self._with_residuals(watch_mutations(self._fn()))

    def _with_residuals(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if self._residuals == "save":
            return fn
        return checkpoint(fn, self._residuals if callable(self._residuals) else None)


def call_split(body: Body, static: Static, donated: list[Any], kept: list[Any]) -> Any:
    args, kwargs = static.join(donated, kept)
    return body(*args, **kwargs)


_bodies: weakref.WeakKeyDictionary[Any, dict[Any, Body]] = weakref.WeakKeyDictionary()
_bodies_lock = threading.Lock()


def body_of(fn: Callable[..., Any], residuals: Residuals, options: Options | None) -> Body:
    """One body per function, residual policy and options, so that JAX's trace cache recognises it. Lives as long as ``fn``."""
    if not isinstance(_reference(fn), weakref.ref):
        return Body(fn, residuals, options)
    with _bodies_lock:
        per_fn = _bodies.setdefault(fn, {})
        key = (residuals, options)
        if key not in per_fn:
            per_fn[key] = Body(fn, residuals, options)
        return per_fn[key]


def _reference(fn: Callable[..., Any]) -> Callable[[], Any]:
    try:
        hash(fn)
        return weakref.ref(fn)
    except TypeError:  # an unhashable callable, such as a module that holds arrays: it gets a body of its own
        return lambda: fn
