"""``python -m kitsune_jax report``: one file for a report of a bug.

Comes in: a function and arguments. Goes out: text with versions, variables of the environment, what ``explain`` says, the jaxpr,
and the parts that fell back, with their tracebacks. Invariant: no number of an array is written, and of a path only its last part.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import jax

import kitsune_jax as kj
from kitsune_jax.cli import doctor
from kitsune_jax.cli.bench import split, with_pipelines
from kitsune_jax.cli.functions import Example
from kitsune_jax.cli.output import plain

_HEAD = """\
# A report for kitsune_jax

It holds no number of an array, and of paths only the last part. It does hold names of functions, lines of source in tracebacks, and
the values of the variables below: read it before you send it. Please add what you expected.
"""


def text(example: Example) -> str:
    """The report of ``example``. It lowers the function, and neither compiles nor runs it."""
    of_arrays, arrays = split(example.args)

    def lowered() -> str:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            jax.jit(of_arrays(with_pipelines(example.function, of_arrays, arrays)[0])).lower(*arrays)
        return "\n".join(f"{w.category.__name__}: {w.message}" for w in told) or "none"

    sections = {
        "Warnings when it is lowered": _tried(lowered),
        "Parts that fell back": _fallbacks(),
        "Explain": _tried(lambda: kj.explain(example.function)(*example.args).text(verbose=True)),
        "Jaxpr": _tried(lambda: str(jax.make_jaxpr(of_arrays(example.function))(*arrays))),
    }
    facts = doctor.facts()
    values = facts["environment"].items()
    facts["environment"] = {k: Path(v).name if v.startswith(("/", "~")) else v for k, v in values}  # folders may hold spaces
    tables = "\n\n".join(plain(table) for table in doctor.tables(facts) if table.rows)
    whole = [_HEAD, f"Function: {example.name}\n", _section("Doctor", tables)]
    return without_paths("\n".join([*whole, *(_section(title, content) for title, content in sections.items())]))


def _section(title: str, content: str) -> str:
    return f"## {title}\n\n```text\n{content.rstrip()}\n```\n"


def _tried(make: Callable[[], str]) -> str:
    """The text of ``make``, or the traceback of its error: a report is wanted above all where something fails."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return make()
    except Exception as error:
        return "".join(traceback.format_exception(error))


def _fallbacks() -> str:
    found = [f"{f.part} of {f.function}, {f.count} times: {f.reason}\n{f.traceback}" for f in kj.fallbacks()]
    return "\n".join(found) or "none"


# --- Paths ------------------------------------------------------------------------------------------------------------------------

_IN_TRACEBACKS = re.compile(r'(File ")([^"\n]*)(")')
# A slash or a tilde that begins a word, and folders behind it: not "us/tile", "a / b" or "1/2".
_ABSOLUTE = re.compile(r"(?:(?<=file://)|(?<![\w.\-\]\)/~]))~?/(?:[^\s/:;,\"'`()<>|=]+/)*([^\s/:;,\"'`()<>|=]+)/?")


def without_paths(text: str) -> str:
    """``text`` with the last part of each absolute path in its place.

    >>> without_paths("--xla_dump_to=/home/ada/dumps File \\"/home/ada b/model.py\\", 0.5 us/tile")
    '--xla_dump_to=dumps File "model.py", 0.5 us/tile'
    """
    text = _IN_TRACEBACKS.sub(lambda m: f"{m[1]}{Path(m[2]).name}{m[3]}", text)
    for folder in sorted(_known_folders(), key=len, reverse=True):  # they may hold spaces
        text = text.replace(f"{folder}/", "/")
        text = Path(folder).name.join(re.split(rf"{re.escape(folder)}(?=\W|$)", text))
    return _ABSOLUTE.sub(lambda m: m[1], text)


def _known_folders() -> set[str]:
    folders = {str(Path.cwd()), str(Path.home()), tempfile.gettempdir(), sys.prefix, *(p for p in sys.path if p)}
    return {folder.rstrip("/") for folder in folders if len(folder.rstrip("/")) > 1 and folder.startswith("/")}
