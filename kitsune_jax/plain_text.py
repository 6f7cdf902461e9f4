"""Text of unknown origin (names of functions and files, error messages) made fit for a terminal, a log or a page.

Comes in: any string. Goes out: the same, with every character that is not printable written as its Python escape. Invariant: what
this returns moves no cursor, changes no colour and reorders nothing on the reader's screen.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""``text`` on one line, with white space as spaces and other unprintable characters as escapes.

    >>> printable("a\tb \x1b[31mred")
    'a b \\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """The same of each line of ``text``."""
    return "\n".join(map(printable, text.split("\n")))
