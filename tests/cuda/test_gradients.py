"""Bugs planted in the header of weight gradients: the emulator must find each of them under every schedule.

A kernel is compiled with one place of ``gradient.h`` changed. Its launch must then fail and name the cause, or, where nothing is
out of order, give a wrong result.
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import hostcc
from tests.support.cuda_run import Kernel, Subject, arrangements, kernel_cache, subject
from tests.support.cuda_training_cases import integers, relu_step, relu_step_of_integers
from tests.support.planted import Bug

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.usefixtures("kernel_cache"),
]

HEADER = "kitsune/stage/gradient.h"
SEEDS = (1, 2, 3)
ROWS = 257  # five tiles for two lanes; of the last one's rows only one is in the stream
BARRIER = r"bar_sync\(kAllLanes, Lanes \* kGroupThreads\);"


BUGS = {
    "no barrier in front of the products": Bug(rf"{BARRIER}(?=\s*if constexpr)", "", "race: wgmma reads"),
    "no barrier behind the products": Bug(rf"(?<=\n    \}}\n    ){BARRIER}", "", "race: (st_shared writes|wgmma reads)"),
    "no fence between stores and products": Bug(r"fence_proxy_async\(\);", "{}", "without fence_proxy_async"),
    "no wait for the products": Bug(r"wgmma_wait<0>\(\);", "", "wgmma"),
    "nothing in the columns beyond a tile": Bug(r"\(W \+ 63\) / 64 \* kPanelBlock / 16", "0", "which nothing has written"),
    "rows beyond the stream count": Bug(r"valid\[h\] \? (pairs\[2 \* j \+ h\]) : 0", r"\1"),
}


@pytest.fixture(scope="module")
def of() -> Subject:
    return subject(relu_step, *(jnp.asarray(a, "bfloat16") for a in integers(ROWS, seed=0)))


@pytest.fixture(scope="module")
def want() -> list[np.ndarray]:
    return relu_step_of_integers(*integers(ROWS, seed=0))


def kernel(of: Subject) -> Kernel:
    return Kernel(of, arrangements(of)["sm90-vertical-resident-lanes2"])


def is_right(got: list[np.ndarray], want: list[np.ndarray]) -> bool:
    return all(np.array_equal(g, w.astype(g.dtype)) for g, w in zip(got, want, strict=True))


@pytest.mark.usefixtures("kernel_cache")
def test_without_a_bug_every_schedule_is_right(of: Subject, want: list[np.ndarray]) -> None:
    correct = kernel(of)
    assert all(is_right(correct(seed=seed), want) for seed in SEEDS)


OFTEN = "no barrier in front of the products", "no fence between stores and products", "rows beyond the stream count"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in BUGS])
def test_a_planted_bug_is_found(
    name: str, of: Subject, want: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = BUGS[name]
    compilers.emulator_library()  # the emulator itself is the real one
    bug.plant(HEADER, tmp_path, monkeypatch)
    planted = kernel(of)
    for seed in SEEDS:
        if bug.found:
            with pytest.raises(Exception, match=bug.found):
                planted(seed=seed)
        else:
            assert not is_right(planted(seed=seed), want), f"seed {seed} gives the right result"
