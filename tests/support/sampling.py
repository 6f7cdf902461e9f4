"""Which cases of a product of parameters are fast: a part in which their values meet as they do in the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sample(share: int, *axes: Iterable[Any], also: Callable[..., bool] = lambda *case: False) -> list[Any]:
    """The product of ``axes``, as parameters for pytest, of which one in ``share`` is fast, and those of which ``also`` says so;
    the others are marked slow.

    Every value of each axis is fast with some values of the others; of three axes every pair of values is, if the third has at
    least ``share``.
    """
    values = [list(axis) for axis in axes]
    assert share <= sorted(map(len, values))[-1], "some values would only have slow cases"
    cases = zip(itertools.product(*map(range, map(len, values))), itertools.product(*values), strict=True)
    return [pytest.param(*case, marks=() if sum(at) % share == 0 or also(*case) else pytest.mark.slow) for at, case in cases]
