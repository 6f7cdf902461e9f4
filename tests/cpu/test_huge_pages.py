"""Large results of a call lie in huge pages, where the kernel gives them."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj

BYTES = 64 << 20
PAGE = 4096


def faults(work: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def touch_huge_pages() -> None:
    with mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:  # not shared: that would be a file in memory
        fresh.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, BYTES, PAGE):
            fresh[at] = 1


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_a_large_result_takes_few_page_faults() -> None:
    if faults(touch_huge_pages) > BYTES // PAGE // 8:
        pytest.skip("this kernel has no huge pages to give")
    x = jnp.ones((BYTES // 4 // 64, 64))
    pipelined = jax.jit(kj.pipeline(lambda x: jnp.tanh(x) + 1, force=True))
    jax.block_until_ready(pipelined(x))
    assert faults(lambda: jax.block_until_ready(pipelined(x))) < BYTES // PAGE // 4
