"""Attention whose queries start at an argument, and its gradient: as kernels in the emulator, planted bugs, and the machine code.

Where the queries lie among the keys is known when the kernels run. The kernel by queries guards rows that see nothing, the one by
keys queries that see nothing of any row: each has bugs of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import Routed, RouteOptions, route
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import walk
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from reference import standalone
from tests.support.checks import in_float64
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

TOLERANCE = {"float32": 4e-3, "bfloat16": 3e-2, "float16": 8e-3}  # of the largest number: products round to tf32 or 16 bits


def placed(q: Any, k: Any, v: Any, place: Any, hidden: float = -1e30) -> Any:
    """Queries from ``place`` on of a text whose keys are in ``k``: [h, t, d]."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k).astype(jnp.promote_types(q.dtype, jnp.float32)) * q.shape[-1] ** -0.5
    seen = place + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(jnp.where(seen, scores, hidden), -1).astype(q.dtype), v)


def gradients(q: Any, k: Any, v: Any, do: Any, place: Any) -> Any:
    return jax.vjp(lambda *args: placed(*args, place=place), q, k, v)[1](do)


def drawn(dtype: str, queries: int = 576, keys: int = 704, dim: int = 16) -> list[jax.Array]:
    """q, k, v and the result's cotangent."""
    rng = np.random.default_rng(3)
    return [jax.device_put(np.asarray(rng.standard_normal((2, n, dim)), dtype)) for n in (queries, keys, keys, queries)]


def error(args: list[jax.Array], place: int, got: tuple[Any, ...]) -> float:
    """The largest one, in multiples of the largest number of its array (where that is 0, as if it were 1)."""
    want = in_float64(lambda *args: gradients(*args, place=jnp.int32(place)), *args)
    assert [g.shape for g in got] == [w.shape for w in want]
    pairs = [(np.asarray(g, np.float64), np.asarray(w)) for g, w in zip(got, want, strict=True)]
    return float(np.max([np.abs(g - w).max() / (np.abs(w).max() or 1.0) for g, w in pairs]))  # NaN where one is


def routed(function: Callable[..., Any], *args: Any, target: str = "cuda", **options: Any) -> tuple[Captured, Routed]:
    """The function as it is captured for the CUDA target, and its regions on an H200."""
    jaxpr = jax.make_jaxpr(function)(*args, jax.ShapeDtypeStruct((), "int32"))
    captured = capture(
        jaxpr,
        context=RewriteContext(TargetCapabilities(divides_gradients=True, runs_loops=True, sums_online=True, sums_by_batch=False)),
    )
    return captured, route(captured.graph, target, RouteOptions(device="h200", **options))


def test_the_gradient_of_a_piece_of_a_text() -> None:
    """Both kernels leave out what the place hides. In front of all keys the first rows see nothing: every key has one weight."""
    args = drawn("bfloat16")
    bodies = [
        part.program.stages[0].body for r in routed(gradients, *args, force=True, code=False)[1].regions for part in r.program.parts
    ]
    shifted = [{i["shifted"][1:3] for i in walk(body) if i.get("shifted") is not None} for body in bodies]
    assert sorted(shifted, key=str) == [{(-1, "elements")}, {(1, "rows")}]
    compiled = jax.jit(kj.pipeline(gradients, target="emulator", force=True))
    for seed, place in enumerate((0, 100, -20)):
        runtime.set_emulator_seed(seed)
        before = runtime.calls()
        got = jax.block_until_ready(compiled(*args, jnp.int32(place)))
        assert runtime.calls() == before + 2
        assert error(args, place, got) < TOLERANCE["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("queries, keys, dim", [(70, 1500, 16), (577, 701, 24), (1010, 430, 40)])
def test_gradients_of_awkward_pieces(dtype: str, queries: int, keys: int, dim: int) -> None:
    """Equal bits under every schedule; also where the piece is behind all keys, so that it sees them all."""
    args = drawn(dtype, queries, keys, dim)
    compiled = jax.jit(kj.pipeline(gradients, target="emulator", force=True))
    for place in (0, 1, keys - queries, keys + 5, -33, -keys - queries, 2**30 + 1):
        results = []
        for seed in range(2):
            runtime.set_emulator_seed(seed)
            results.append(jax.block_until_ready(compiled(*args, jnp.int32(place))))
        assert error(args, place, results[0]) < TOLERANCE[dtype], place
        assert len({tuple(np.asarray(g).tobytes() for g in got) for got in results}) == 1


# (the kernel's guard, what is found, what stands there instead, the place of the queries)
PLANTED = {
    "by queries: the place is another one": ("kRows", r"(kRows, [^;]*, 1, )from_word[^;]*;", r"\g<1>64);", 0),
    "by queries: the place is subtracted": ("kRows", r"(kRows, [^;]*), 1, from_word", r"\g<1>, -1, from_word", 100),
    "by queries: the loader knows no place": ("kRows", r"(?s)^(.*kRows, [^;]*, 1, )from_word[^;]*;", r"\g<1>0);", 100),
    "by queries: a place in front of all keys is taken for 0": (
        "kRows",
        r"(kRows, [^;]*, 1, )(from_word[^;]*)\);",
        r"\1\2 < 0 ? 0 : \2);",
        -200,
    ),  # fmt: skip
    "by keys: the place is another one": ("kElements", r"(kElements, [^;]*, -1, )from_word[^;]*;", r"\g<1>64);", 0),
    "by keys: the place is added": ("kElements", r"(kElements, [^;]*), -1, from_word", r"\g<1>, 1, from_word", -100),
    "by keys: the loader knows no place": ("kElements", r"(?s)^(.*kElements, [^;]*, -1, )from_word[^;]*;", r"\g<1>0);", 300),
    "by keys: queries that see nothing add to no key": ("kElements", "SeenBlocks::kElements", "SeenBlocks::kRows", -100),
}


OFTEN = (
    "by queries: the loader knows no place",
    "by queries: a place in front of all keys is taken for 0",
    "by keys: the place is added",
)


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in OFTEN else pytest.mark.slow) for bug in PLANTED])
def test_a_bug_in_the_place_of_a_gradient_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, found, instead, place = PLANTED[bug]
    args, emulated, planted = drawn("bfloat16"), compilers.emulated, list[str]()
    args[3] = args[3].at[:, 0].multiply(64)  # what sees nothing adds as much to every key

    def right() -> bool:
        runtime.set_emulator_seed(1)
        captured, planned = routed(gradients, *args, target="emulator", force=True)
        got = jax.jit(lambda *given: standalone.run(captured, planned.regions, given))(*args, jnp.int32(place))
        return error(args, place, got) < TOLERANCE["bfloat16"]

    def change(source: str, sm: int) -> bytes:
        if f"SeenBlocks::{guard}" not in source:
            return emulated(source, sm)
        changed = re.sub(found, instead, source)
        assert changed != source
        planted.append(guard)
        return emulated(changed, sm)

    monkeypatch.setattr(compilers, "emulated", change)
    try:
        assert not right()
    except jax.errors.JaxRuntimeError as e:
        assert "deadlock" in str(e), e
    assert planted == [guard]


# (heads, queries, keys, head size, dtype, bytes of a thread that the gradients by queries and by keys spill)
SIZES = {
    "a piece": (16, 1024, 4096, 64, "bfloat16", (0, 56)),
    "a whole text": (16, 4096, 4096, 64, "bfloat16", (0, 56)),
    "heads of 128": (16, 1024, 4096, 128, "bfloat16", (0, 0)),
    "tf32": (16, 1024, 4096, 64, "float32", (36, 0)),
}


@pytest.mark.slow
@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", SIZES)
def test_the_machine_code_of_planned_kernels(name: str, compiler: str) -> None:
    """Forward, by queries and by keys: no wgmma is serialised, nobody touches the registers of one in flight, and few are spilled,
    by the first none. By the model, which no device has confirmed, each is faster than XLA's kernels."""
    heads, queries, keys, dim, dtype, spilled = SIZES[name]
    args = [jax.ShapeDtypeStruct((heads, n, dim), dtype) for n in (queries, keys, keys, queries)]
    checked = 0
    for function, given in ((placed, args[:3]), (gradients, args)):
        captured, planned = routed(function, *given, code=False)
        for region in planned.regions:
            program = build(captured.graph, region.region, region.plan)
            source = lower.generate_kernel(program, arrangement_of(region.plan, program), "test").source
            assert region.plan.blocks is not None and "SeenBlocks::shifted" in source
            assert region.plan.seconds < region.plan.baseline_seconds
            made = compilers.cubin(source, "sm_90a", folder_of(compiler))
            assert not re.search(r"\(C7\d\d\d\)", made.log), made.log
            by_keys = "SeenBlocks::kElements" in source
            most = spilled[by_keys] if function is gradients else 0
            assert sass.resources(made.log, made.cubin).spill_bytes <= most
            paths = flow(sass.disassemble(made.cubin, "kitsune_region").instructions)
            assert not in_flight(paths).hazards and not skipped(paths)
            checked += 1
    assert checked == 3
