"""What XLA's reductions take with what its library computes in front of them, and what is chosen by that."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax.planning.cost import left_region
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import cpu_of
from kitsune_jax.targets.cpu.planning.xla import arrays, of_ops
from kitsune_jax.targets.cpu.profile import profile as shipped
from kitsune_jax.targets.cpu.profile import store
from kitsune_jax.targets.cpu.profile.profile import Profile, numbers_of
from tests.support.graphs import graph_of

PROFILE = shipped.shipped("zen4-2")
MIB = 1 << 20
AXES = {"row": ((4001, 256), (1,)), "column": ((4001, 256), (0,)), "middle": ((61, 67, 256), (1,)), "all": ((4001, 256), (0, 1))}


def changed(key: str, factor: float) -> Profile:
    """The profile with the number ``key`` multiplied."""
    known = dict(PROFILE.numbers)
    return dataclasses.replace(PROFILE, numbers=numbers_of({**known, key: factor * known[key]}))


def seconds(function: Any, *shapes: tuple[int, ...], dtype: str = "float32", profile: Profile = PROFILE) -> float:
    """Modelled, of XLA."""
    graph = graph_of(function, *(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    return of_ops(graph, range(len(graph.ops)), cpu_of(profile))


def chosen(function: Any, *specs: tuple[tuple[int, ...], str], device: str) -> int:
    """How many operators of ``function`` are pipelined."""
    args = [jax.ShapeDtypeStruct(*spec) for spec in specs]
    return int(kj.explain(function, platform="cpu", device=device)(*args).to_dict()["ops_pipelined"])


# --- what XLA takes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", list(AXES))
def test_a_sum_of_squares_takes_what_was_measured(which: str, dtype: str) -> None:
    shape, axes = AXES[which]
    profile = changed(f"xla/squares/{which}/{dtype}", 3.0)
    found = seconds(lambda x: (x * x).sum(axes), shape, dtype=dtype, profile=profile)
    assert found == pytest.approx(math.prod(shape) * profile.seconds(f"xla/squares/{which}/{dtype}"), rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fused_operation_costs_its_own_time_and_no_passage_of_the_array(dtype: str) -> None:
    shape = AXES["column"][0]
    beyond = seconds(lambda x: abs(x).sum(0), shape, dtype=dtype) - seconds(lambda x: x.sum(0), shape, dtype=dtype)
    each = PROFILE.seconds(f"xla/absolute/{dtype}") - PROFILE.seconds(f"xla/reduce/all/{dtype}")
    assert beyond == pytest.approx(math.prod(shape) * each)


def test_an_operation_beside_memory_takes_no_time() -> None:
    slow = changed("copy/dram", 30.0)
    plain, absolute = (seconds(f, (1 << 16, 1024), profile=slow) for f in (lambda x: x.sum(0), lambda x: abs(x).sum(0)))
    assert plain == absolute


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: (x * x).sum(0), 0),
        (lambda x: jnp.tanh(x * 2 + 1).sum(), 0),
        (lambda x: abs(x - x.mean(0)).max(0), 0),
        (lambda x: jnp.where(x > 0, x, 0.0).sum(0), 1),
        (lambda x: jax.lax.clamp(0.0, x, 1.0).sum(0), 1),
        (lambda x: ((x[1:] - x[:-1]) ** 2).sum(), 2),
        (lambda x: (lambda y: (y.sum(0), y.sum(1)))(x * 2), 1),
    ],
)  # fmt: skip
def test_which_arrays_lie_in_front_of_a_reduction(function: Any, count: int) -> None:
    """As many as JAX compiles loops that write arrays of this size."""
    spec = jax.ShapeDtypeStruct((4097, 256), "float32")
    text = jax.jit(function).lower(spec).compile().as_text() or ""
    if "ynn" not in text:
        pytest.skip("this jaxlib has no YNNPACK here")
    large = re.findall(r"= f32\[409[67],256\]\S* fusion\(", text[text.index("ENTRY") :])
    graph = graph_of(function, spec)
    cost = CpuCost(graph, left_region(graph, range(len(graph.ops))), cpu_of(PROFILE))
    found = [v for v in arrays(cost) if graph.values[v].size > 1 << 19]
    assert (len(found), len(large)) == (count, count)


# --- what is chosen


@pytest.mark.parametrize("device", ["zen4-2", "avx2-2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [MIB, 8 * MIB, 64 * MIB])
def test_sums_of_what_is_cheap_are_left_to_xla(size: int, dtype: str, device: str) -> None:
    """Its library took 0.2 to 0.95 of what a pipeline of them did, on a Zen 3 and a Zen 4."""
    shape = (size // (256 * jnp.dtype(dtype).itemsize), 256)
    one, two = ((shape, dtype),), ((shape, dtype),) * 2
    assert chosen(lambda x: (x * x).mean(0), *one, device=device) == 0
    assert chosen(lambda x: x.var(0), *one, device=device) == 0
    assert chosen(lambda x: abs(x).sum(0), *one, device=device) == 0
    assert chosen(lambda x, y: ((x - y) ** 2).sum(), *two, device=device) == 0


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_large_difference_of_neighbours_takes_its_slices_into_the_pipeline(axis: int) -> None:
    """XLA writes both slices, 64 MB each, and reads them again: 2.7 to 5.8 times as long on a Zen 3."""

    def squared(x: Any) -> Any:
        return jnp.sum((jax.lax.slice_in_dim(x, 1, None, axis=axis) - jax.lax.slice_in_dim(x, 0, -1, axis=axis)) ** 2)

    report = kj.explain(squared, platform="cpu", device="avx2-2")(jax.ShapeDtypeStruct((256,) * 3, "float32"))
    (region,) = report.regions
    assert region.bytes_in == pytest.approx(4 * 256**3, rel=0.01)


# --- doubtful numbers


def gelu(x: Any, a: Any, b: Any) -> Any:
    return jax.nn.gelu(x * a + b)


@pytest.mark.parametrize(("spread", "pipelined"), [(None, True), (1.05, True), (6.0, False)])
def test_no_pipeline_is_chosen_by_a_doubtful_number(
    spread: float | None, pipelined: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the numbers themselves it is 3 times as fast as XLA's loop."""
    known = shipped.shipped("amx-2")
    doubtful = [(key, spread) for key, _ in known.numbers if spread and key.startswith("xla/") and key.endswith("bfloat16")]
    profile = dataclasses.replace(known, name="measured-here-2", doubtful=numbers_of(dict(doubtful)))
    monkeypatch.delenv("KITSUNE_PROFILE")
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "_known", {})
    monkeypatch.setattr(store, "measure", lambda workers: profile)
    report = kj.explain(gelu)(*(jnp.zeros(s, "bfloat16") for s in ((2003, 128), (128,), (128,))))
    assert "measured-here-2" in str(report)
    assert (report.to_dict()["ops_pipelined"] > 0) == pipelined


def test_our_own_doubtful_numbers_change_no_time_of_xla() -> None:
    ours = dataclasses.replace(PROFILE, doubtful=numbers_of({"vector/tanh": 3.0}))
    assert seconds(jnp.tanh, (2003, 128), profile=ours) == seconds(jnp.tanh, (2003, 128))
