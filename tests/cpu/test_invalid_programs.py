"""The net under the code generators: what the extension would refuse at run time is found where the code is generated.

And the defect that it was woven for: matrix products with a constant, which the gradient of an L2 penalty is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import targets
from kitsune_jax.ops.graph import Op, Value, make_params
from kitsune_jax.program.build import assemble
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cpu import bytecode
from kitsune_jax.targets.cpu import lower as cpu_lower
from kitsune_jax.targets.cpu.bytecode import name_bytes
from kitsune_jax.targets.cpu.lower import lower_program
from kitsune_jax.targets.cuda import lower as cuda_lower
from kitsune_jax.targets.cuda import runtime as cuda_runtime
from tests.support.lowered import ROW
from tests.support.programs import CASES
from tests.support.tiles import Tiles

_cpu = pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
RNG = np.random.default_rng(5)


def small() -> Tiles:
    t = Tiles((12,), 4)
    x = t.load((12, 3), "float32", ROW)
    t.store(t.matmul(x, t.load((3, 5))), (12, 5), ROW)
    return t


def break_lowering(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The code generator as it would be with a defect: weights are taken from an array that they do not fit into."""

    def wrong(*program: Any) -> bytecode.CpuProgram:
        code = lower_program(*program)
        preps = tuple(dataclasses.replace(p, source=dataclasses.replace(p.source, offset=1)) for p in code.preps)
        return dataclasses.replace(code, preps=preps)

    monkeypatch.setattr(name, wrong)


def test_a_program_that_the_extension_refuses_is_not_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lowering(monkeypatch, "kitsune_jax.targets.cpu.lower.lower_program")
    with pytest.raises(targets.InvalidProgram, match="prepared operand 0: source reads element 15 of input 1, which has 15"):
        cpu_lower.generate(Program.of(small().program()), "small")


def test_nor_are_the_phases_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small().program()
    call = assemble([(0, program, (0, 1), (2,)), (0, program, (0, 1), (3,))], (0, 1), (2, 3))
    assert cpu_lower.generate(call, "fine").dtype == np.int64
    break_lowering(monkeypatch, "kitsune_jax.targets.cpu.lower.lower_program")
    with pytest.raises(targets.InvalidProgram, match="prepared operand 0: source reads element 15"):
        cpu_lower.generate(call, "small")


@pytest.mark.expects_fallbacks
def test_a_refused_program_costs_the_pipeline_and_not_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lowering(monkeypatch, "kitsune_jax.targets.cpu.lower.lower_program")
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in ((12, 3), (3, 5)))
    with pytest.warns(RuntimeWarning, match="InvalidProgram: kitsune program: prepared operand 0"):
        got = jax.jit(kj.pipeline(lambda x, w: jnp.tanh(x @ w), force=True))(x, w)
    np.testing.assert_allclose(got, np.tanh(x @ w), rtol=1e-5, atol=1e-6)


def test_launch_words_are_checked_where_a_kernel_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kitsune_jax._cuda", reason="the extension is not built: pip install -e .")
    assert "grid" in cuda_runtime.check((6, 900, 0, 384, 1, 1024, 0, 0, 2, 3, 64))

    class Broken:
        launch = (6, 900, 0, 384, 1, 1024, 0, 0, 2, 3, 64)
        source = "never compiled"

    monkeypatch.setattr("kitsune_jax.targets.cuda.lower._cached_kernel", lambda *_: Broken())
    for target in ("cuda", "emulator"):
        with pytest.raises(targets.InvalidProgram, match="the grid is 0"):
            cuda_lower.generate(target, Program.of(small().program()), [], "small")


@pytest.mark.parametrize("side", [0, 1])
def test_a_product_with_a_constant_is_refused_with_a_reason(side: int) -> None:
    values = [Value((4,), "float32"), Value((), "float32", 1.0)]
    op = Op("dot_general", (0, 1), (2,), make_params(accumulate="float32"))
    reason = targets.get("cpu").supports(op, values if side else values[::-1], [Value((4,), "float32")])
    assert reason is not None and "constant" in reason
    t = Tiles((12,), 4)
    t.store(t.matmul(t.load((12,), "float32", ((0,),)), t.literal(2.0), dims=(((), ()), ((), ()))), (12,), ((0,),))
    with pytest.raises(targets.CannotLower, match="constant"):
        lower_program(t.program(), "outer")


@pytest.mark.parametrize("name", ["segment_sum", "attention_grouped", "nested", "interaction", "computed_weights"])
def test_structured_programs_survive_any_damage(name: str) -> None:
    """Altered words are refused in a sentence, or run within their arrays. ``cpu/tests/test_fuzz.cc`` looks closer."""
    case = CASES[name]()
    rng = np.random.default_rng(11)
    operands = case.operands(rng)
    words = cpu_lower.generate(case.program, name)
    n = case.program.operands
    results = [np.empty(a.shape, a.dtype) for a in case.program.arrays[n : n + case.program.results]]
    refused = 0
    for _ in range(400):
        damaged = words.copy()
        change = rng.choice([-1, 1, 2, 1 << 20, 1 << 40, -(1 << 62)])
        damaged[rng.integers(4, len(words))] += change
        assert "checksum" in _cpu.validate(damaged)
        damaged[3] = zlib.crc32(damaged[4:].astype("<i8").tobytes())
        wrong = _cpu.validate(damaged)
        if wrong:
            refused += 1
            assert wrong.startswith("kitsune program") and len(wrong) > 30
        elif change < 3 and _cpu.memory_bytes(damaged) < 1 << 22:  # not so many more iterations that it runs for ever
            with contextlib.suppress(ValueError):  # arrays of another size
                _cpu.run(damaged, operands, results, 2)
    assert refused > 200


def test_a_name_that_is_not_utf8_travels_as_utf8() -> None:
    """The path of a source file may hold any byte; Python keeps it as lone surrogates."""
    name = "region0 (caf\udce9/\u00e9.py:3 (f))"
    words = cpu_lower.generate(Program.of(small().program()), name)
    travelled = bytes(words[5 : 5 + words[4]].astype(np.uint8)).decode()
    assert travelled == "region0 (caf?/\u00e9.py:3 (f))"
    assert len(name_bytes("\u00e9" * 2**16)) == bytecode.MAX_NAME_BYTES


def test_a_weight_whose_sides_are_too_long_for_its_tables_is_refused() -> None:
    t = Tiles((12,), 4)
    x = t.load((12, 2), "float32", ROW)
    t.store(t.matmul(x, t.load((2, 2**24))), (12, 2**24), ROW)
    with pytest.raises(targets.CannotLower, match="sides add up to 16777219"):
        lower_program(t.program(), "wide")


PENALTIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "vdot": lambda p: jnp.vdot(p["w1"], p["w1"]),
    "dot": lambda p: jnp.dot(p["b1"], p["b1"]),
    "einsum": lambda p: jnp.einsum("ij,ij->", p["w1"], p["w1"]),
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_training_step_with_an_l2_penalty(penalty: str, force: bool) -> None:
    """The gradient of such a penalty is a product of the literal 1.0 and a vector, without contraction."""

    def loss(p: Any, x: Any, y: Any, numpy: Any) -> Any:
        hidden = numpy.maximum(x @ p["w1"] + p["b1"], 0)
        return ((hidden @ p["w2"] + p["b2"] - y) ** 2).mean()

    def step(p: Any, x: Any, y: Any) -> Any:
        gradient = jax.grad(lambda p: loss(p, x, y, jnp) + 0.01 * PENALTIES[penalty](p))(p)
        return {k: p[k] - 0.1 * gradient[k] for k in p}

    shapes = {"w1": (13, 33), "b1": (33,), "w2": (33, 5), "b2": (5,)}
    params = {k: RNG.standard_normal(s).astype(np.float32) / 4 for k, s in shapes.items()}
    x, y = (RNG.standard_normal((259, n)).astype(np.float32) for n in (13, 5))
    got = jax.jit(kj.pipeline(step, force=force))(params, x, y)

    wide = {k: v.astype(np.float64) for k, v in params.items()}
    before = x @ wide["w1"] + wide["b1"]
    hidden = np.maximum(before, 0)
    error = 2 * (hidden @ wide["w2"] + wide["b2"] - y) / (259 * 5)
    back = (error @ wide["w2"].T) * (before > 0)
    want = {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}
    squared = "b1" if penalty == "dot" else "w1"
    want[squared] = want[squared] + 0.02 * wide[squared]
    for k in params:
        np.testing.assert_allclose(got[k], wide[k] - 0.1 * want[k], rtol=1e-5, atol=1e-6, err_msg=k)
