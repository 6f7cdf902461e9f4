"""Environment variables and switches, the options of a pipelined function, printable text, and the version.

Comes in: the process environment and the arguments of ``pipeline``. Goes out: typed values. Variables are read when they are
needed, never at import, so a test or a program can change them at any time. They are checked at import and whenever ``pipeline`` is
applied: a meaningless value is an error at once, an unknown name a warning. Invariant: no other module reads the environment.

==========================  ==================================================================================================
``KITSUNE_DISABLE``         1: ``pipeline(fn)`` is ``fn``: no primitive, no planning. The kill switch.
``KITSUNE_FORCE``           1: pipeline every legal region, even if the model expects no gain (for tests and experiments).
``KITSUNE_STRICT``          1: raise ``NotPipelined`` where nothing could be pipelined, and do not hide our own errors.
``KITSUNE_PROGRESS``        on: print a line on stderr for work longer than a second. Default: on where stderr is a terminal.
``KITSUNE_LOG_LEVEL``       Level of the logger ``kitsune_jax``: a name of the ``logging`` module, such as INFO or DEBUG.
``KITSUNE_CACHE_DIR``       Folder for device code and machine profiles. Default: ``kitsune_jax`` in the user's cache folder.
``KITSUNE_CUDA_ARCH``       CUDA architecture to generate code for, such as ``sm_90a``. Default: that of the device at hand.
``KITSUNE_NVRTC_DIR``       Folder with the CUDA compiler (libnvrtc) to use. Default: the best that the machine has.
``KITSUNE_CUDA_AVOID``      Kinds of CUDA kernel that are never chosen: ``sm90-spatial-l2-lanes2``, ...; * matches any text.
``KITSUNE_EMULATOR_SEED``   Seed of the emulator's schedules, read when a function is lowered. Default: 1.
``KITSUNE_PROFILE``         Machine profile that CPU plans are made with, such as ``zen5-2``. Default: measured, once.
``KITSUNE_TUNE``            on: time plans beside ``jax.jit`` when a function is lowered. off: the model chooses. all: as on,
                            without a limit of time. Default: on; off where ``KITSUNE_PROFILE`` is set.
``KITSUNE_NUM_THREADS``     CPU threads a plan may count on. Default: the CPUs this process may run on.
==========================  ==================================================================================================

JAX remembers what it has traced: a switch that changes after a ``jax.jit`` function was first called does not reach the compiled
copy (a call of the pipelined function outside of ``jit`` does see it, and so does a new trace).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import logging
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from kitsune_jax.warning_classes import UnknownVariableWarning

logger = logging.getLogger("kitsune_jax")
logger.addHandler(logging.NullHandler())  # records reach the logs that a program configures, and never its stderr unasked

_PREFIX = "KITSUNE_"
VARIABLES = (
    "KITSUNE_DISABLE",
    "KITSUNE_FORCE",
    "KITSUNE_STRICT",
    "KITSUNE_PROGRESS",
    "KITSUNE_LOG_LEVEL",
    "KITSUNE_CACHE_DIR",
    "KITSUNE_CUDA_ARCH",
    "KITSUNE_NVRTC_DIR",
    "KITSUNE_CUDA_AVOID",
    "KITSUNE_EMULATOR_SEED",
    "KITSUNE_NUM_THREADS",
    "KITSUNE_PROFILE",
    "KITSUNE_TUNE",
)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_SWITCHES = ("disable", "force", "strict")
_overrides: contextvars.ContextVar[dict[str, bool] | None] = contextvars.ContextVar("kitsune_jax_overrides", default=None)


def _switch(name: str) -> bool:
    current = _overrides.get()
    if current and name in current:
        return current[name]
    variable = f"KITSUNE_{name.upper()}"
    text = os.environ.get(variable, "").strip()
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{variable}={text!r} is not a switch: set it to 1 or 0")


def disabled() -> bool:
    """``KITSUNE_DISABLE``: is the package switched off?"""
    return _switch("disable")


def forced() -> bool:
    """``KITSUNE_FORCE``: is every legal region pipelined, even if the model expects no gain?"""
    return _switch("force")


def strict() -> bool:
    """``KITSUNE_STRICT``: is it an error if nothing of a function could be pipelined?"""
    return _switch("strict")


def cache_dir() -> pathlib.Path | None:
    """``KITSUNE_CACHE_DIR``: the folder for compiled device code (it need not exist); ``None`` for a user without a home folder."""
    named, base = os.environ.get("KITSUNE_CACHE_DIR", ""), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if named:
            return pathlib.Path(named).expanduser()
        # A relative XDG_CACHE_HOME is to be ignored (XDG Base Directory Specification).
        return (pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / ".cache") / "kitsune_jax"
    except RuntimeError:  # "Could not determine home directory."
        return None


def cuda_arch() -> str | None:
    """``KITSUNE_CUDA_ARCH``: the CUDA architecture to generate code for ("sm_90a"), or ``None`` for that of the device at hand.

    Raises ``ValueError`` for anything but an architecture.
    """
    text = os.environ.get("KITSUNE_CUDA_ARCH", "").strip()
    if text and not re.fullmatch(r"sm_[0-9]{2,3}[a-z]?|compute_[0-9]{2,3}", text):
        raise ValueError(f"KITSUNE_CUDA_ARCH={text!r} is not a CUDA architecture: use sm_90a, or another from sm_80 on")
    return text or None


def nvrtc_dir() -> pathlib.Path | None:
    """``KITSUNE_NVRTC_DIR``: the folder of the NVRTC to compile kernels with, or ``None`` for the best that the machine has.

    Raises ``ValueError`` if there is no such folder.
    """
    text = os.environ.get("KITSUNE_NVRTC_DIR", "").strip()
    if text and not pathlib.Path(text).is_dir():
        raise ValueError(f"KITSUNE_NVRTC_DIR={text!r} is not a folder: name the one that libnvrtc is in")
    return pathlib.Path(text) if text else None


def cuda_avoid() -> tuple[str, ...]:
    """``KITSUNE_CUDA_AVOID``: patterns of the kinds of CUDA kernel that no plan may have (``targets.cuda.arrangement.kind_of``).

    Raises ``ValueError`` for a pattern that no kind could match.
    """
    patterns = tuple(part.strip() for part in os.environ.get("KITSUNE_CUDA_AVOID", "").split(",") if part.strip())
    for pattern in patterns:
        if not re.fullmatch(r"[a-z0-9*-]+", pattern):
            raise ValueError(f"KITSUNE_CUDA_AVOID={pattern!r} is no kind of kernel: use names like sm90-vertical-resident-lanes2")
    return patterns


def emulator_seed() -> int:
    """``KITSUNE_EMULATOR_SEED``: the seed of the emulator's schedules. Raises ``ValueError`` for anything but a natural number."""
    text = os.environ.get("KITSUNE_EMULATOR_SEED", "").strip() or "1"
    if not text.isdecimal() or int(text) >= 1 << 64:
        raise ValueError(f"KITSUNE_EMULATOR_SEED={text!r} is not an integer from 0 to 2**64 - 1")
    return int(text)


def num_threads() -> int:
    """``KITSUNE_NUM_THREADS``: CPU threads a plan may count on. Raises ``ValueError`` for anything but a positive integer."""
    text = os.environ.get("KITSUNE_NUM_THREADS", "").strip()
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"KITSUNE_NUM_THREADS={text!r} is not a positive integer")
        return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# The families of machine profiles that come with the package (``targets.cpu.profile.profile.FAMILIES``).
CPU_FAMILIES = (
    "zen5", "zen4", "emeraldrapids", "skylakex", "generic", "avx2", "avx512", "avx512bf16", "amx", "neon", "neonbf16",
)  # fmt: skip


def profile() -> str | None:
    """``KITSUNE_PROFILE``: the name of the machine profile that CPU plans are made with; ``None`` for the machine at hand.

    A family without a number of cores stands for as many as ``num_threads`` says. Raises ``ValueError`` for another name.
    """
    text = os.environ.get("KITSUNE_PROFILE", "").strip()
    match = re.fullmatch(r"([a-z0-9]+)(-[1-9]\d{0,3})?", text)
    if text and (match is None or match[1] not in CPU_FAMILIES):
        how = f"use <family> or <family>-<cores>, such as zen5 or avx2-8; the families are {', '.join(CPU_FAMILIES)}"
        raise ValueError(f"KITSUNE_PROFILE={text!r} is no profile: {how}")
    return text or None


TUNE = ("on", "off", "all")


def tune() -> str:
    """``KITSUNE_TUNE``: "on", "off" or "all"; by default off for a named profile, whose plans are the same everywhere.

    Raises ``ValueError`` for anything else.
    """
    text = os.environ.get("KITSUNE_TUNE", "").strip().lower() or ("off" if profile() else "on")
    if text not in TUNE:
        raise ValueError(f"KITSUNE_TUNE={text!r} is not known: use {', '.join(TUNE)}")
    return text


def xla_flags() -> str:
    """``XLA_FLAGS``, which XLA reads itself: they change how fast its code is."""
    return os.environ.get("XLA_FLAGS", "")


def progress() -> bool | None:
    """``KITSUNE_PROGRESS``: is long work told on stderr? ``None`` where it is not set. Raises ``ValueError`` for anything but a
    switch."""
    text = os.environ.get("KITSUNE_PROGRESS", "").strip().lower()
    if text and text not in _TRUE | _FALSE:
        raise ValueError(f"KITSUNE_PROGRESS={text!r} is not a switch: set it to on or off")
    return text in _TRUE if text else None


def log_level() -> int | None:
    """``KITSUNE_LOG_LEVEL``: the level of the logger ``kitsune_jax``, or ``None`` where it is not set.

    Raises ``ValueError`` for an unknown level.
    """
    text = os.environ.get("KITSUNE_LOG_LEVEL", "").strip().upper()
    level = logging.getLevelNamesMapping().get(text) if text else None
    if text and level is None:
        raise ValueError(f"KITSUNE_LOG_LEVEL={text!r} is not a logging level: use DEBUG, INFO, WARNING or ERROR")
    return level


def check_environment() -> None:
    """Check every variable ``KITSUNE_...``: warn of names that do not exist, once each.

    Raises ``ValueError`` for a value that means nothing.
    """
    for name, hint in unknown_variables().items():
        if name not in _warned:
            _warned.add(name)
            message = f"the environment variable {name} has no effect, because kitsune_jax has none of this name: {hint}"
            warnings.warn(message, UnknownVariableWarning, stacklevel=3)
    for message in wrong_values().values():
        raise ValueError(message)


_warned: set[str] = set()
# The readers of the variables that have values of no meaning.
_READERS: dict[str, Callable[[], Any]] = {
    "KITSUNE_DISABLE": disabled,
    "KITSUNE_FORCE": forced,
    "KITSUNE_STRICT": strict,
    "KITSUNE_PROGRESS": progress,
    "KITSUNE_LOG_LEVEL": log_level,
    "KITSUNE_CUDA_ARCH": cuda_arch,
    "KITSUNE_NVRTC_DIR": nvrtc_dir,
    "KITSUNE_CUDA_AVOID": cuda_avoid,
    "KITSUNE_EMULATOR_SEED": emulator_seed,
    "KITSUNE_NUM_THREADS": num_threads,
    "KITSUNE_PROFILE": profile,
    "KITSUNE_TUNE": tune,
}


def wrong_values() -> dict[str, str]:
    """The variables ``KITSUNE_...`` whose values mean nothing, each with a message that names the value and the possible ones."""
    found: dict[str, str] = {}
    for name, read in _READERS.items():
        try:
            read()
        except ValueError as error:
            if str(error) not in found.values():  # one variable's default may depend on another
                found[name] = str(error)
    return found


@contextlib.contextmanager
def without_wrong_values() -> Iterator[dict[str, str]]:
    """For the command line, which tells of wrong values itself: in the block the variables in ``wrong_values()`` are not set."""
    wrong = wrong_values()
    kept = {name: os.environ.pop(name) for name in wrong}
    try:
        yield wrong
    finally:
        os.environ.update(kept)


def is_command() -> bool:
    """Is this import that of ``python -m kitsune_jax``?"""
    return sys.argv[:1] == ["-m"] and any(word.removeprefix("-m") == "kitsune_jax" for word in sys.orig_argv)


def unknown_variables() -> dict[str, str]:
    """The variables ``KITSUNE_...`` that do not exist, each with advice: the nearest name, or all names."""
    known = [v.removeprefix(_PREFIX) for v in VARIABLES]
    hints = {}
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in VARIABLES:
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1)
            hints[name] = f"did you mean {_PREFIX}{near[0]}?" if near else f"the variables are {', '.join(VARIABLES)}"
    return hints


def variables_beginning_with(*prefixes: str) -> dict[str, str]:
    """The environment variables whose names begin with one of ``prefixes``, for a report of a bug."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def apply_log_level() -> None:
    """Set the level of the logger ``kitsune_jax`` from ``KITSUNE_LOG_LEVEL``, with a handler if the program has none."""
    level = log_level()
    if level is None:
        return
    logger.setLevel(level)
    if all(isinstance(handler, logging.NullHandler) for handler in (*logger.handlers, *logging.getLogger().handlers)):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


@contextlib.contextmanager
def override(*, disable: bool | None = None, force: bool | None = None, strict: bool | None = None) -> Iterator[None]:
    """Set switches for the ``with`` block, in this thread (or task) only; ``None`` leaves a switch as it is.

    Example:
      >>> import jax.numpy as jnp, kitsune_jax as kj
      >>> square = kj.pipeline(lambda x: x * x)
      >>> with kj.config.override(disable=True):
      ...     square.options() is None
      True
    """
    given = dict(zip(_SWITCHES, (disable, force, strict), strict=True))
    token = _overrides.set({**(_overrides.get() or {}), **{k: v for k, v in given.items() if v is not None}})
    try:
        yield
    finally:
        _overrides.reset(token)


# --- options of a pipelined function ----------------------------------------------------------------------------------------------


def _option(default: Any, *values: Any, plans: bool = True) -> Any:
    """A field of ``Options``. ``values``: those that users may give (all, if none are named). ``plans``: plans may depend on it, so
    it is part of the key of remembered plans."""
    return dataclasses.field(default=default, metadata={"values": values, "plans": plans})


@dataclasses.dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The options on which the plan of a region may depend. The planners of targets get them whole, and the plans of a region are
    remembered by them; options that change the choice between plans (``force``) are not among them, so that every choice shares
    the plans. ``deterministic``: equal arguments give equal bits in every run."""

    deterministic: bool = _option(True, True, False)


@dataclasses.dataclass(frozen=True, slots=True)
class Options(PlannerOptions):
    """Options of a pipelined function: the static parameter that stays on the primitive through every transformation.

    Everything that changes what a lowering does is in here, because JAX keys its caches on it. ``force``: ignore the cost model.
    ``target``: None (the platform's own) or "emulator": CUDA kernels, run on the CPU. ``residuals``: the name of the policy, for
    reports; the policy itself is applied in the jaxpr. ``export``: "plain": ``jax.export`` gets plain HLO; "calls": custom calls.
    ``network``: (seconds of an empty message, bytes per second) between devices whose collectives run beside other operators.
    """

    strict: bool = _option(False, True, False)
    force: bool = _option(False, True, False, None)
    target: str | None = None
    residuals: str = _option("save", plans=False)
    export: str = _option("plain", "plain", "calls", plans=False)
    network: tuple[float, float] | None = None


def check_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given``, options by name, with Python's bools for NumPy's. Raises ``ValueError`` for a value that an option cannot have."""
    allowed = {field.name: field.metadata.get("values") for field in dataclasses.fields(Options)}
    checked = {name: bool(value) if isinstance(value, np.bool_) else value for name, value in given.items()}
    for name, value in checked.items():
        values = allowed[name]
        if values and not any(type(value) is type(v) and value == v for v in values):
            raise ValueError(f"{name}={value!r} is not known: use {' or '.join(map(repr, values))}")
    network = checked.get("network")
    if network is not None:
        pair = tuple(network) if isinstance(network, tuple | list) else ()
        if len(pair) != 2 or not all(isinstance(x, int | float) for x in pair) or pair[0] < 0 or not pair[1] > 0:
            raise ValueError(f"network={network!r} is not known: use (seconds of an empty message, bytes per second), or None")
        checked["network"] = float(pair[0]), float(pair[1])
    return checked


def resolve(given: Mapping[str, Any]) -> Options:
    """The options of a call made now. ``given``: options by name, checked. ``force=None`` takes ``KITSUNE_FORCE``;
    ``KITSUNE_STRICT`` also sets ``strict``."""
    force = given["force"]
    return Options(**{**given, "strict": given["strict"] or strict(), "force": forced() if force is None else force})


def planner_options(options: PlannerOptions) -> PlannerOptions:
    """Those of ``options`` on which the plan of a region may depend, and no others."""
    return PlannerOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(PlannerOptions)})


T = TypeVar("T", bound=Options)


def key_of_plans(options: T) -> T:
    """``options`` with those that no plan depends on at their defaults."""
    unread: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(options) if not f.metadata.get("plans", True)}
    return dataclasses.replace(options, **unread)


# --- printable text: names of functions and files, error messages -----------------------------------------------------------------


def printable(text: str) -> str:
    r"""``text`` on one line, with white space as spaces and other unprintable characters as escapes.

    The result moves no cursor, changes no colour and reorders nothing on a terminal.


    >>> printable("a\tb \x1b[31mred")
    'a b \\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def shown_file(path: str) -> str:
    """The name of a source file in reports, "model.py". That of a notebook's cell, which Python knows by a hash, is "cell [5]",
    with the number that the notebook shows beside the cell since it ran last.

    >>> shown_file("/home/me/model.py")
    'model.py'
    """
    shell: Any = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    try:
        cell = shell.instance().compile.format_code_name(path) if shell is not None and shell.initialized() else None
    except Exception:  # another IPython, whose cells keep the names of their files
        cell = None
    number = re.fullmatch(r"In\[(\d+)\]", cell[1]) if cell else None
    return f"cell [{number[1]}]" if number else os.path.basename(path)


def printable_lines(text: str) -> str:
    """``printable`` of each line of ``text``."""
    return "\n".join(map(printable, text.split("\n")))


# The version of this package; pyproject.toml has the same.
__version__ = "0.1.0"
