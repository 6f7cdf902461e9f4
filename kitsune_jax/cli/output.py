"""The output of a command: tables for a person, or JSON.

Comes in: ``Table``s of text, and plain data. Goes out: with Rich, if it is installed, in a terminal; as plain text in a pipe.
Invariant: a pipe gets the same text with and without Rich, without escape sequences.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from kitsune_jax.config import printable, printable_lines


@dataclasses.dataclass(frozen=True)
class Table:
    """``rows`` of cells under ``title``. ``head``: the names of the columns, or none. ``right``: columns of numbers."""

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    right: Sequence[int] = ()


def show_tables(tables: Sequence[Table]) -> None:
    """Print the tables that have rows."""
    console = _console()
    for k, table in enumerate(t for t in tables if t.rows):
        if k:
            print()
        if console is None:
            print(plain(table))
        else:
            console.print(_rich(table))


def show_text(text: str) -> None:
    """Print ``text``, with its first line bold in a terminal."""
    console = _console()
    first, _, rest = printable_lines(text).partition("\n")
    if console is None:
        print(printable_lines(text))
    else:
        console.print(first, style="bold", markup=False, highlight=False, soft_wrap=True)
        print(rest)


def show_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


def plain(table: Table) -> str:
    """The table as aligned text.

    >>> print(plain(Table("cache", [("cuda", "2"), ("choices", "14")], right=(1,))))
    cache
      cuda      2
      choices  14
    """
    rows = [[printable(cell) for cell in row] for row in ((table.head, *table.rows) if table.head else table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [table.title]
    for row in rows:
        cells = [c.rjust(w) if i in table.right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _console() -> Any:
    """Rich's console if there is a terminal and Rich is installed, else ``None``."""
    if not sys.stdout.isatty():
        return None
    try:
        return importlib.import_module("rich.console").Console()
    except ImportError:
        return None


def _rich(table: Table) -> Any:
    text = importlib.import_module("rich.text").Text
    shown = importlib.import_module("rich.table").Table(
        title=printable(table.title),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=True,
        show_header=bool(table.head),
    )
    for i in range(len(table.rows[0])):
        name = table.head[i] if table.head else ""
        shown.add_column(name, justify="right" if i in table.right else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(text(printable(cell)) for cell in row))
    return shown
