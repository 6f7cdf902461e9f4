"""Random networks as CUDA kernels in the emulator: forward, gradients and vmap, against plain JAX in float64.

What the target has no code for runs as plain HLO beside the kernels; what is a kernel must be right. The planner picks the
arrangement, so these programs meet whatever it makes of odd widths, concatenations, heads and reductions.
"""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.targets.cuda import runtime
from tests.support.checks import in_float64
from tests.support.cuda_run import kernel_cache
from tests.support.trust_programs import Network, networks
from tests.trust.test_trust_random import EPSILON, MODES, _error

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("kernel_cache"),
    pytest.mark.filterwarnings("error:kitsune_jax could not"),  # a failure of ours that falls back is a failure here
]

TF32 = 2.0**-11  # what a float32 operand of a product is rounded to


def check(network: Network, mode: str, seed: int = 1) -> int:
    """Compares, and returns how many kernels were launched."""
    args = network.arguments()
    pipelined = jax.jit(MODES[mode](network, functools.partial(kj.pipeline, force=True, target="emulator"))).lower(*args).compile()
    plain = MODES[mode](network, lambda f: f)
    runtime.set_emulator_seed(seed)
    before = runtime.calls()
    got = pipelined(*args)
    jax.block_until_ready(got)
    launched = runtime.calls() - before
    want_plain, want = jax.jit(plain)(*args), in_float64(plain, *args)
    epsilon = max(EPSILON[network.dtype], EPSILON["bfloat16"] if any(name == "cast" for name, _, _ in network.ops) else TF32)
    assert jax.tree.structure(got) == jax.tree.structure(want_plain)
    for g, p, w in zip(*map(jax.tree.leaves, (got, want_plain, want)), strict=True):
        assert g.dtype == p.dtype and g.shape == p.shape
        limit = 64 * epsilon + 4 * _error(p, w)
        assert _error(g, w) <= limit, f"{g.dtype}{g.shape} is off by {_error(g, w):.3g}, plain JAX by {_error(p, w):.3g}"
    return launched


settings = functools.partial(hypothesis.settings, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
quick = settings(max_examples=2, derandomize=True, phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink])
thorough = settings(max_examples=60)


@pytest.mark.parametrize("mode", ["forward", "grad", "vmap"])
@quick
@hypothesis.given(network=networks(4))
def test_random_networks(mode: str, network: Network) -> None:
    check(network, mode)


def test_networks_do_become_kernels() -> None:
    """The comparison above would also hold if everything fell back."""
    ops = (("dense", 0, 7), ("activation", 0, 0), ("concat", 0, 0), ("dense", 0, 5), ("norm", 0, 0))
    for dtype in ("float32", "bfloat16"):
        assert check(Network(dtype, (97,), 12, ops), "forward") >= 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@thorough
@hypothesis.given(network=networks(8))
def test_many_random_networks(mode: str, network: Network) -> None:
    check(network, mode)


def test_the_same_bits_under_any_schedule() -> None:
    network = Network("bfloat16", (97,), 12, (("dense", 0, 7), ("activation", 0, 1), ("norm", 0, 1), ("dense", 0, 4)))
    args = network.arguments()
    pipelined: Any = jax.jit(kj.pipeline(network, force=True, target="emulator", strict=True)).lower(*args).compile()
    results = []
    for seed in (1, 2, 3):
        runtime.set_emulator_seed(seed)
        results.append([np.asarray(x).tobytes() for x in jax.tree.leaves(pipelined(*args))])
    assert results[0] == results[1] == results[2]
