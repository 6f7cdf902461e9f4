"""Changes that a function makes in the objects among its arguments, which would be lost.

Comes in: a function of pytrees. Goes out: the same function, whose result also tells which arrays of its arguments it replaced;
and, once it is traced, an error that names them. A traced function works on copies of its arguments, so what it changes in a
mutable object (a module of flax nnx, an optimizer, a counter of random numbers) does not reach the caller's object. Invariants: a
function that replaces nothing has the results, the jaxpr and the traces that it has without this; the work is done once per trace.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from kitsune_jax import _compat
from kitsune_jax.errors import MutatedArgument

_compat.hide_from_tracebacks(__file__)

# Equations that call a body with their operands: the parameter that is the body.
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

    ``names[i]`` was ``before[i]`` and is ``after[i]``; only the jaxpr can tell whether these are two names of one value.
    ``lost``: names of which it is known already that they are not.
    """

    result: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    names: tuple[str, ...]
    lost: tuple[str, ...]


jax.tree_util.register_dataclass(Changed, ["result", "before", "after"], ["names", "lost"])


def watched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, which returns a ``Changed`` where it has replaced arrays in objects among its arguments and does not return them."""

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
                if _is_dead(new):
                    lost.append(at)
                elif _compat.valid_jaxtype(new) and _compat.valid_jaxtype(old):
                    pairs.append((at, old, new))
        if not pairs and not lost:
            return result
        names, olds, news = zip(*pairs, strict=True) if pairs else ((), (), ())
        return Changed(result, olds, news, names, tuple(lost))

    return call


def settled(closed: Any, tree: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """``(jaxpr, tree of its results, names of the arrays whose change is lost)`` of a watched function, traced to ``closed``.

    The names are of what holds another value than before; ``nnx.jit`` and ``nnx.remat`` replace all arrays of a module by results
    of theirs that are the same values.
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


def refuse(fn: Callable[..., Any], lost: tuple[str, ...]) -> None:
    """Raises ``MutatedArgument`` where changes are lost."""
    if not lost:
        return
    name = getattr(fn, "__qualname__", type(fn).__name__)
    told = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
    raise MutatedArgument(
        f"the pipelined function {name} changes its arguments in place and does not return the change: {told}. "
        "A pipelined function works on copies of its arguments, as under jax.jit, so the caller's objects would keep their old "
        "values. Write one of these:\n"
        "- Pipeline only what changes nothing (the loss, the forward pass), and leave the update to nnx.jit around it.\n"
        "- Return what changes, and write it back outside: `return loss, nnx.state(model, nnx.BatchStat)` in the function, "
        "`nnx.update(model, state)` behind the call.\n"
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
    """``(path, old, new)`` of the leaves of ``x``, once ``before`` and ``tree``, that are others now and not in ``result``."""
    try:
        leaves, now = jax.tree.flatten(x)
        if now == tree and all(new is old for new, (_, old) in zip(leaves, before, strict=True)):
            return []
        after, again = jax.tree.flatten_with_path(x)[0], jax.tree.leaves(x)
    except Exception:  # flattening is the user's code: ``equinox.nn.State`` refuses it after its use, so nothing of it can be lost
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


def _is_dead(x: Any) -> bool:
    """Is it a tracer of a trace that has ended (the body of a loop), which can be no result?"""
    return isinstance(x, jax.core.Tracer) and not _compat.is_alive(x)


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of positional arguments."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a built-in without a signature
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{i}]" for i in range(count - len(names))]


def _forwarded(program: Any) -> list[int | None]:
    """For each result of a jaxpr the number of the argument that it is, or None where it is computed."""
    jaxpr, _ = _compat.open_parts(program)
    sources = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for v, i in zip(eqn.outvars, _handed_on(eqn), strict=False):
            if i is not None and not _compat.is_literal(eqn.invars[i]) and eqn.invars[i] in sources:
                sources[v] = sources[eqn.invars[i]]
    return [None if _compat.is_literal(v) else sources.get(v) for v in jaxpr.outvars]


def _handed_on(eqn: Any) -> list[int | None]:
    """For each result of an equation the number of the operand that it is, as far as that is known."""
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
