"""The one error of the CPU code generator."""

from __future__ import annotations


class CannotLower(ValueError):
    """A tile program holds something the CPU target has no code for; ``reason`` says what, in words.

    ``supports`` gives the same reasons per op before a region is formed, so that a planned region never meets this.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason
