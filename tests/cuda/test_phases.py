"""Calls of several phases as one kernel, in the emulator: what one phase makes, the next one reads behind the grid's barrier."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.errors import CannotLower
from kitsune_jax.program.build import assemble
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import call_layout, sources
from reference.check import verify
from tests.support.checks import in_float64
from tests.support.cuda_run import by_hand, called, code_of, generate_call_kernel, kernel_cache, run_call, tiled
from tests.support.phases import clipped, message_passing
from tests.support.programs import Case, segments
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

TOLERANCE = {"float32": 4e-3, "float16": 4e-3, "bfloat16": 3e-2}  # a float32 product is tf32; results are rounded to their dtype
RNG = np.random.default_rng(17)
ROW = ((0,), ())


def check(case: Case, **how: Any) -> list[bytes]:
    operands = case.operands(np.random.default_rng(3))
    verify(tiled(case.program))
    for program in call_layout.programs_of_call(tiled(case.program)):
        verify(program)
    dtype = case.program.arrays[0].dtype
    got = run_call(case.program, *operands, **how)
    assert max(case.errors(got, operands)) < TOLERANCE[dtype]
    return [x.tobytes() for x in got]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_of_a_graph_network(dtype: str, sm: int) -> None:
    check(message_passing(dtype=dtype), sm=sm, lanes=2, replicas=3)


@pytest.mark.parametrize(("edges", "nodes"), [(1, 1), (1, 131), (67, 7), (64, 64), (641, 257)])
def test_phases_of_few_and_of_many_tiles(edges: int, nodes: int) -> None:
    check(message_passing(edges, nodes, width=16), lanes=1, replicas=4)


def test_every_schedule_gives_the_same_bits() -> None:
    case = message_passing()
    operands = case.operands(RNG)
    code = code_of(case.program, lanes=2, replicas=3)
    found = {tuple(x.tobytes() for x in called(case.program, *operands, code=code, seed=seed)) for seed in range(6)}
    assert len(found) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize(
    ("dtype", "rows", "width"), [("float32", 77, 27), ("bfloat16", 64, 40), ("float16", 1, 3), ("float32", 13, 1)]
)
def test_numbers_and_rows_between_phases(dtype: str, rows: int, width: int, sm: int) -> None:
    """Four phases of several parts: rows of a narrow pitch come in bulk, and every row of the last phase reads a sum."""
    check(clipped(rows, width, dtype), sm=sm, lanes=2, replicas=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("how", ["sum", "max"])
def test_a_table_that_an_earlier_phase_makes(how: str, mode: str) -> None:
    check(segments(257, 32, 21, how, ids_sorted=True, mode=mode), lanes=2, replicas=2)


def test_equal_parts_are_compiled_once() -> None:
    call = tiled(clipped(copies=5).program)
    arrangements = tuple(by_hand(part.program, 900, 2, 2) for part in call.parts)
    source = generate_call_kernel(call, arrangements, "clipped").source
    assert source.count("namespace part") == 2 * 4  # opened and closed: one for each phase
    assert "for (u32 m = 0; m < 5; ++m) {" in source


def test_small_parts_run_beside_each_other() -> None:
    """Parts of one phase begin on the CTA behind those of the part before."""
    call = tiled(clipped(rows=64, width=8, copies=3).program)
    arrangements = tuple(by_hand(part.program, 900, 1, 8) for part in call.parts)
    made = generate_call_kernel(call, arrangements, "clipped")
    assert made.launch[2] == 3 and made.launch[6] == 1  # three CTAs, which are launched together


def two_phases(make: Callable[[Tiles], None]) -> Program:
    """Phase 0 makes an array [70, 32], and the next phase does with it and the operand what ``make`` says."""
    t, u = Tiles((70,), 64), Tiles((70,), 64)
    t.store(t.op("tanh", t.load((70, 32), "float32", ROW)), (70, 32), ROW)
    make(u)
    return assemble([(0, t.program(), (0,), (1,)), (1, u.program(), (0, 1), (2,))], (0,), (2,))


def weights_of_a_phase(u: Tiles) -> None:
    x, w = u.load((70, 32), "float32", ROW), u.load((70, 32), "float32")
    u.store(u.matmul(x, w, (((1,), (1,)), ((), ()))), (70, 70), ROW)


def test_what_is_refused_has_a_reason() -> None:
    call = two_phases(weights_of_a_phase)
    with pytest.raises(CannotLower, match="reads the whole of an array that an earlier phase makes"):
        code_of(call)
    call = tiled(message_passing().program)
    arrangements = tuple(by_hand(part.program, 900, 2, 2) for part in call.parts)
    with pytest.raises(CannotLower, match="without clusters"):
        generate_call_kernel(call, tuple(dataclasses.replace(a, cluster=2) for a in arrangements), "program")
    with pytest.raises(CannotLower, match="equally many lanes"):
        generate_call_kernel(call, (arrangements[0], dataclasses.replace(arrangements[1], lanes=1)), "program")


# -- planted bugs: the emulator is where a race would be seen

PLANTED = {
    "no barrier between phases": (
        "    red_add_release(arrived, 1);\n    wait_ge(arrived, (phase + 1) * grid_size());\n",
        "    (void)arrived, (void)phase;\n",
        "race: ",
    ),
    "a barrier that waits for the phase before": ("(phase + 1) * grid_size()", "phase * grid_size()", "race: "),
    "a CTA goes on when the first other one arrives": ("(phase + 1) * grid_size()", "phase * grid_size() + 2", "race: "),
    "the other consumers do not wait": (
        "  bar_sync(kAllLanes, Lanes * kGroupThreads);\n#if",
        "#if",
        "race: |not released and acquired",
    ),
    "what was written is not fenced for bulk copies": (
        "  fence_proxy_async_global();  // and read what they have written\n",
        "",
        "without fence_proxy_async_global between",
    ),
    "what was written is not fenced by who copies it": (
        "#if KITSUNE_SM >= 900\n  fence_proxy_async_global();\n#endif",
        "",
        "without fence_proxy_async_global between",
    ),
    "the next part begins before all have ended this one": (
        "  bar_sync(kWholeCta, (1 + Lanes) * kGroupThreads);\n",
        "",
        "race: |without fence_proxy|nothing has written|in flight",
    ),
}


def planted(case: Case, right: str, wrong: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the emulator says of ``case`` under eight schedules, with ``wrong`` in the place of ``right``; "" for nothing."""
    headers, emulator = sources.include_dirs("emulator")
    shutil.copytree(headers, folder / "include")
    file = folder / "include" / "kitsune" / "phases.h"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    include = folder / "include"
    monkeypatch.setattr(sources, "include_dirs", lambda part: (include, emulator) if part == "emulator" else (include,))
    code = code_of(case.program, lanes=2, replicas=4, change=lambda source: f"// planted: {(right, wrong)!r}\n{source}")
    operands, found = case.operands(RNG), []
    for seed in range(8):
        try:
            called(case.program, *operands, code=code, seed=seed)
            found.append("")
        except jax.errors.JaxRuntimeError as e:
            found.append(str(e))
    return found


OFTEN = (
    "no barrier between phases",
    "the other consumers do not wait",
    "what was written is not fenced for bulk copies",
)


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in OFTEN else pytest.mark.slow) for bug in PLANTED])
def test_the_emulator_sees_a_missing_barrier(bug: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, told = PLANTED[bug]
    found = planted(clipped(rows=193, copies=2), right, wrong, tmp_path, monkeypatch)
    assert sum(map(bool, found)) >= 6, found
    assert all(re.search(told, why) for why in found if why), found


def test_a_load_that_may_be_cached_is_seen() -> None:
    """Loads of a kernel of one phase go through a cache that does not see what the kernel writes."""
    case = message_passing()
    code = code_of(case.program, change=lambda source: source.replace("#define KITSUNE_PHASES 1", ""))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ld_global"):
        called(case.program, *case.operands(RNG), code=code)


def message_passing_steps(params: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
    for w_edge, w_node in params:
        edges = edges + jnp.tanh(edges @ w_edge + nodes[senders] + nodes[receivers])
        summed = jax.ops.segment_sum(edges, receivers, num_segments=nodes.shape[0])
        nodes = nodes + jnp.tanh(summed @ w_node)
    return nodes, edges


@pytest.mark.parametrize(("dtype", "steps", "kernels"), [("float32", 1, 1), ("bfloat16", 2, 1), ("float32", 3, 2)])
def test_edges_and_nodes_of_a_network_are_phases_of_one_kernel(dtype: str, steps: int, kernels: int) -> None:
    """As many phases as the target takes: edges, nodes, edges again."""
    n, e, d = 37, 301, 32
    params = [
        tuple(jax.device_put(np.asarray(RNG.standard_normal((d, d)) / d**0.5, dtype)) for _ in range(2)) for _ in range(steps)
    ]
    nodes, edges = (jax.device_put(np.asarray(RNG.standard_normal((rows, d)), dtype)) for rows in (n, e))
    senders, receivers = (jax.device_put(np.asarray(RNG.integers(n, size=e), jnp.int32)) for _ in range(2))
    args = params, nodes, edges, senders, receivers
    lowered = jax.jit(kj.pipeline(message_passing_steps, force=True, strict=True, target="emulator")).lower(*args)
    assert lowered.as_text().count("@kitsune_cuda") == kernels
    got = lowered.compile()(*args)
    want = in_float64(message_passing_steps, *args)
    for found, wanted in zip(got, want, strict=True):
        assert np.max(np.abs(np.asarray(found, np.float64) - wanted)) < 3 * TOLERANCE[dtype] * np.max(np.abs(wanted))
