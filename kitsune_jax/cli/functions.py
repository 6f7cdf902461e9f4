"""The function that a user names as FILE:FUNCTION, and arguments to call it with.

Comes in: the text, and perhaps an expression for the arguments. Goes out: an ``Example``. The file is executed as a module, with
its folder first on ``sys.path``, as a script's is. Invariants: any error in the file, name or arguments raises ``UsageError``, with
the place in the user's file and no traceback; what the user's code prints goes to stderr, so that stdout is the command's.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax.errors import NotPipelined

ARGUMENTS = """\
The arguments of the call, first of these that there is:
  --args EXPR        an expression, evaluated in the file's namespace, to which jax, jnp and np are added
  FUNCTION_args()    a function in the file that returns them (the dots of a.b are written as _)
  ARGS               a variable in the file
A tuple holds one argument each; anything else is the only argument. Shapes will do: jax.ShapeDtypeStruct((4096, 64), "float32")."""


class UsageError(Exception):
    """Wrong use of the command; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Example:
    """A user's function and arguments. ``name``: as the user wrote it, with the base name of the file."""

    name: str
    path: Path
    function: Callable[..., Any]
    args: tuple[Any, ...]


def load(named: str, expression: str | None) -> Example:
    """The function called ``named`` ("model.py:step") and its arguments. Raises ``UsageError``."""
    file, colon, name = named.rpartition(":")
    if not (colon and file and name):
        raise UsageError(f"{named!r} is not of the form FILE:FUNCTION, such as model.py:step")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}")
    module = _executed(path)
    function = _attribute(module, name, path)
    if not callable(function):
        raise UsageError(f"{name} in {path.name} is no function, but {type(function).__name__}")
    args = _arguments(module, name, path, expression)
    return Example(f"{path.name}:{name}", path, function, args if isinstance(args, tuple) else (args,))


def _executed(path: Path) -> ModuleType:
    name = f"{path.stem}_of_user" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))
    with users_errors(path, f"{path.name} cannot be executed"):
        spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, name: str, path: Path) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n, x in getattr(found, "__dict__", {}).items() if callable(x) and not n.startswith("_")]
            near = difflib.get_close_matches(part, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{path.name} has no function {name}{hint}")
        found = getattr(found, part)
    return found


def _arguments(module: ModuleType, name: str, path: Path, expression: str | None) -> Any:
    if expression is not None:
        try:  # the user's own expression, on the user's machine
            return eval(expression, {"jax": jax, "jnp": jnp, "np": np, **vars(module)})
        except Exception as error:
            raise UsageError(f"--args cannot be evaluated: {type(error).__name__}: {error}") from error
    maker = f"{name.replace('.', '_')}_args"
    if hasattr(module, maker):
        with users_errors(path, f"{maker}() in {path.name} fails"):
            return getattr(module, maker)()
    if hasattr(module, "ARGS"):
        return module.ARGS
    raise UsageError(f"{path.name} says no arguments for {name}: define {maker}() or ARGS in it, or give --args EXPR\n{ARGUMENTS}")


@contextlib.contextmanager
def users_errors(path: Path, what: str) -> Iterator[None]:
    """Run the user's code. Its errors become a ``UsageError`` that begins with ``what`` and names the line in the user's file."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except UsageError:
        raise
    except NotPipelined as error:  # says for itself what to do
        raise UsageError(str(error)) from error
    except Exception as error:
        raise UsageError(f"{what}: {_place(path, error)}{type(error).__name__}: {error}") from error


def _place(path: Path, error: Exception) -> str:
    """ "line 12: ", the last line of the user's file that the error passed; "" where it passed none."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    return f"line {lines[-1]}: " if lines else ""


def with_arrays(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with an array in the place of each ``jax.ShapeDtypeStruct``: standard normal numbers, zeros of other types."""
    rng = np.random.default_rng(0)

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(leaf.shape, dtype=np.float32), leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    filled: tuple[Any, ...] = jax.tree.map(array, args)
    return filled
