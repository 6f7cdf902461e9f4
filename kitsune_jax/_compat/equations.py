"""Equations: what they call, where they stand in the user's program, and binding them again."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from kitsune_jax._compat.jaxprs import open_parts, trace_jaxpr
from kitsune_jax._compat.versions import discharge, source_info_util
from kitsune_jax.plain_text import printable


def called(eqn: Any) -> str:
    """What the user called: the primitive's name; of a high-level primitive (``jax.experimental.hijax``) the name of its class, or
    of the function it wraps.
    """
    high = eqn.params.get("_prim")
    if high is None:
        return str(eqn.primitive.name)
    traced = getattr(high, "params", {}).get("traced")
    return str(getattr(traced, "fun_name", None) or type(high).__name__)


def expansion(eqn: Any) -> Any | None:
    """What a high-level primitive on arrays stands for, as a closed jaxpr of low-level ones; ``None`` for other equations."""
    high = eqn.params.get("_prim")
    atoms = (*eqn.invars, *eqn.outvars)
    if eqn.primitive.name != "call_hi_primitive" or any(type(v.aval).__name__ != "ShapedArray" for v in atoms):
        return None
    expand = functools.partial(eqn.primitive.to_lojax, _prim=high)
    with eqn.ctx.manager:
        return trace_jaxpr(expand, [v.aval for v in eqn.invars], lower=True)


def is_ref(aval: Any) -> bool:
    """Is it the type of a reference to a mutable array?"""
    return type(aval).__name__ == "AbstractRef"


def without_refs(closed: Any) -> Any:
    """``closed`` as JAX lowers it: references are values, and those among the arguments are results as well."""
    jaxpr, _ = open_parts(closed)
    if any(is_ref(v.aval) for v in jaxpr.invars) or any("MutableArray" in type(e).__name__ for e in jaxpr.effects):
        return discharge.discharge_state(closed)
    return closed


def is_transposed(eqn: Any) -> bool:
    """Does the equation come from transposition, as the backward pass of every gradient does? JAX notes it in the name stack."""
    stack = eqn.source_info.name_stack.stack
    return any(type(part).__name__ == "Transform" and part.name == "transpose" for part in stack)  # a user's scope is a Scope


def source_line(eqn: Any) -> str:
    """The user's line, "model.py:12 (mlp)", or "" where there is none: never a frame inside JAX or this package."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return printable(f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name.rsplit('.', 1)[-1]})")


@contextlib.contextmanager
def user_context(eqn: Any) -> Iterator[None]:
    """Bind primitives as if they stood where ``eqn`` stands: its mesh and configuration, its name stack, its traceback.

    ``eqn.ctx.manager`` carries the (manual) mesh: without it ``shard_map(check_vma=True)`` refuses what is bound.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind_eqn(eqn: Any, vals: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluate one equation on ``vals`` (with other ``params`` if given) in its own context. Returns the list of its results."""
    bind_params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    with user_context(eqn):
        outs = eqn.primitive.bind(*vals, **bind_params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def scan_parts(eqn: Any) -> tuple[int, int]:
    """How many operands of a ``scan`` are constants, and how many are carries. The others are arrays with a slice for each step."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = (len(list(part)) for part in eqn.params["ft_in"].unpack())
    return consts, carries
