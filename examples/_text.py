"""The text that the language models of the examples learn: the reference of the Python language, which every Python brings along.

Comes in: sizes and the number of a step. Goes out: arrays of characters' numbers. Invariant: which characters step ``i`` sees
depends on the seed and ``i`` alone."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics

import numpy as np


@dataclasses.dataclass(frozen=True)
class Text:
    """``train`` and ``held_out`` are numbers of ``characters``, [length] int32."""

    characters: str
    train: np.ndarray
    held_out: np.ndarray

    def batch(self, rows: int, length: int, seed: tuple[int, ...]) -> np.ndarray:
        """[rows, length + 1] from random places of the training part: a model sees all but the last and tells all but the first."""
        return _pieces(self.train, rows, length + 1, np.random.default_rng(seed))

    def held_out_batch(self, rows: int, length: int) -> np.ndarray:
        return _pieces(self.held_out, rows, length + 1, np.random.default_rng(0))

    def encode(self, text: str) -> np.ndarray:
        """Raises ``ValueError`` for a character that the text does not have."""
        return np.array([self.characters.index(c) for c in text], np.int32)

    def decode(self, numbers: np.ndarray) -> str:
        return "".join(self.characters[int(i)] for i in numbers)


def python_reference() -> Text:
    """About half a million characters; what is not ASCII is left out. One topic in ten is held out."""
    topics = pydoc_data.topics.topics
    texts = ["".join(c for c in topics[name] if c.isascii()) for name in sorted(topics)]
    characters = "".join(sorted(set("".join(texts))))
    numbers = {c: i for i, c in enumerate(characters)}

    def encoded(chosen: list[str]) -> np.ndarray:
        return np.array([numbers[c] for c in "\n\n".join(chosen)], np.int32)

    held_out = texts[::10]
    return Text(characters, encoded([t for i, t in enumerate(texts) if i % 10]), encoded(held_out))


def _pieces(source: np.ndarray, rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    first = rng.integers(len(source) - length, size=rows)
    return source[first[:, None] + np.arange(length)]
