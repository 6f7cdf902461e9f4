"""The errors of the code generators."""

from __future__ import annotations


class CannotLower(ValueError):
    """A tile program, or a plan of it, holds something a target has no code for; ``reason`` says what, in words.

    ``supports`` gives the same reasons per op before a region is formed, and ``check`` per plan before it is chosen.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class InvalidProgram(Exception):
    """Generated code that the extension refuses: a defect of this package, found before the code becomes part of a compilation.

    The message is the extension's, and names the instruction. The region it was generated for can still lower as plain HLO.
    """
