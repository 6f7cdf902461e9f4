"""The version of JAX at hand, its modules, public and private, and what its tracebacks show.

Invariant: importing this module works with every JAX; what a JAX lacks fails where it is used (``jax_support`` tries that first).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import re
import types
from typing import Any

import jax


def parse_version(text: str) -> tuple[int, ...]:
    """The release in a version: (0, 13, 0) of "0.13.0rc1", "0.13.0.dev20260101" and "0.13"; () where it has no number."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", text)
    parts = [int(x) for x in numbers[0].split(".")[:3]] if numbers else []
    return (*parts, *[0] * (3 - len(parts))) if parts else ()


def jax_module(name: str) -> Any:
    """A module of JAX; an empty one of that name where this JAX has none, so that what needs it fails where it is used."""
    try:
        return importlib.import_module(name)
    except Exception:  # a module that was replaced may fail in any way, and importing this package must not
        return types.ModuleType(name)


VERSION = parse_version(jax.__version__)

ad_util = jax_module("jax._src.ad_util")
api_util = jax_module("jax._src.api_util")
checkify = jax_module("jax._src.checkify")
core = jax_module("jax._src.core")
lu = jax_module("jax._src.linear_util")
source_info_util = jax_module("jax._src.source_info_util")
traceback_util = jax_module("jax._src.traceback_util")
tree_util = jax_module("jax._src.tree_util")
util = jax_module("jax._src.util")
ad = jax_module("jax._src.interpreters.ad")
batching = jax_module("jax._src.interpreters.batching")
mlir = jax_module("jax._src.interpreters.mlir")
pe = jax_module("jax._src.interpreters.partial_eval")
remat = jax_module("jax._src.interpreters.remat")
discharge = jax_module("jax._src.state.discharge")
state_types = jax_module("jax._src.state.types")
prng = jax_module("jax._src.random.prng")
jet_lib = jax_module("jax.experimental.jet")
jex_core = jax_module("jax.extend.core")


def new_primitive(name: str) -> Any:
    """A primitive without rules."""
    return jex_core.Primitive(name)


def valid_jaxtype(x: Any) -> bool:
    """Can ``x`` be an operand of a primitive: an array, a number, a ref?"""
    try:
        aval = jax.typeof(x)
    except TypeError:
        return False
    return getattr(getattr(aval, "dtype", None), "kind", "") != "T"  # an array of strings has a type, but no operations


def jaxpr_as_fun(closed: Any) -> Any:
    """The function that a closed jaxpr stands for: of flat arrays, to a list of arrays."""
    return jex_core.jaxpr_as_fun(closed)


def hide_from_tracebacks(path: str) -> None:
    """Leave frames of the file ``path`` out of the tracebacks that JAX filters for its users."""
    with contextlib.suppress(AttributeError, TypeError):  # a JAX that cannot shows them
        traceback_util.register_exclusion(path)


def api_boundary(fn: Any) -> Any:
    """``fn``, out of which errors come with the traceback that JAX filters for its users, as out of ``jax.jit`` functions."""
    try:
        return traceback_util.api_boundary(fn)
    except (AttributeError, TypeError):  # a JAX that cannot shows every frame
        return fn


# A user's function is traced and evaluated through this folder. What JAX and our reports call the user's line is never a line of
# this package. Files have the names here that their frames have: a link on the way to the package is not followed.
_HERE = pathlib.Path(__file__).parent
for _file in _HERE.glob("*.py"):
    hide_from_tracebacks(str(_file))
with contextlib.suppress(AttributeError, TypeError):
    source_info_util.register_exclusion(str(_HERE.parent) + os.sep)
