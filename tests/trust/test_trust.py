"""A pipelined function can be trusted: whatever its shapes, values, dtypes, effects and threads, it does what plain JAX does.

Every function is forced through the pipeline and compared with plain ``jax.jit``: equal NaN and infinities, in equal places.
"""

from __future__ import annotations

import concurrent.futures
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import kitsune_jax as kj
from kitsune_jax import _cpu
from kitsune_jax.targets.cpu import call
from kitsune_jax.targets.cpu.bytecode import DTYPES
from tests.support.checks import count, enable_x64, in_float64, isa
from tests.support.trust_cases import CASES, FLOATS, TOLERANCE, integers, normal

__all__ = ["isa"]  # a fixture

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here


def forced(f: Any) -> Any:
    return kj.pipeline(f, force=True)


def assert_same(got: Any, want: Any, tol: float) -> None:
    """Same tree, shapes, dtypes and weak types; the same NaN, infinities and, for ``tol`` 0, the same values and signs of zero."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype, g.weak_type) == (w.shape, w.dtype, w.weak_type)
        if not jnp.issubdtype(w.dtype, jnp.floating):
            np.testing.assert_array_equal(g, w)
            continue
        a, b = np.asarray(g, np.float64), np.asarray(w, np.float64)
        if tol:
            np.testing.assert_allclose(a, b, rtol=tol, atol=tol)
            continue
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a)[~np.isnan(b)], np.signbit(b)[~np.isnan(b)])


def check(f: Any, *args: Any, tol: float = 2e-5, pipelined: bool = True) -> None:
    compiled = jax.jit(forced(f)).lower(*args).compile()
    assert (count(compiled.as_text()) > 0) == pipelined
    assert_same(compiled(*args), jax.jit(f)(*args), tol)


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_jax(name: str) -> None:
    case = CASES[name]
    check(case.f, *case.args, tol=case.tol, pipelined=case.pipelined)


# --- dtypes ----------------------------------------------------------------------------------------------------------------------


def pointwise(x: Any) -> Any:
    if x.dtype == jnp.bool:
        return x ^ jnp.flip(x, 1), jnp.where(x, 3, 4)
    return (x + x) * 3 - 1, jnp.maximum(x, 2), jnp.where(x > 1, x, -x), x.astype(jnp.float32) * 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    with enable_x64():
        x = normal(31, 5) * 3 if "float" in dtype else np.zeros(155) if dtype == "bool" else integers(dtype, 155)
        check(pointwise, jnp.asarray(x).reshape(31, 5).astype(dtype), tol=TOLERANCE.get(dtype, 0.0))


def test_float64() -> None:
    with enable_x64():
        args = normal(131, 19, dtype="float64"), normal(19, 13, dtype="float64"), normal(13, dtype="float64")

        def f(x: Any, w: Any, b: Any) -> Any:
            return jnp.mean(jax.nn.gelu(x @ w + b) ** 2) + jnp.sum(jnp.exp(-x))

        check(f, *args, tol=1e-12)
        check(jax.value_and_grad(f, (0, 1, 2)), *args, tol=1e-12)
        check(lambda x, w: (jnp.tanh(x) @ w.astype(jnp.float32).astype(x.dtype)).astype(jnp.float32), *args[:2], tol=1e-6)


def _products() -> Iterator[Any]:
    """(instruction set, dtype, rows, m, n): odd numbers, and such that fill no vector; the whole matrix is slow."""
    best = _cpu.isa()
    for name in _cpu.available_isas():
        for i, shape in enumerate([(1, 1, 1), (5, 33, 7), (97, 12, 32), (131, 13, 33), (64, 37, 65), (257, 3, 1)]):
            for k, dtype in enumerate((*FLOATS, "float64")):
                often = (name == best and (i + k) % 2 == 0) or (shape == (131, 13, 33) and dtype in ("float32", "bfloat16"))
                yield pytest.param(name, dtype, *shape, marks=() if often else pytest.mark.slow)


PRODUCTS = list(_products())


def check_products(f: Any, *args: np.ndarray) -> None:
    """Off by no more, relative to the largest value of each result, than its dtype explains."""
    limit = {"float32": 2e-6, "bfloat16": 0.02, "float16": 3e-3, "float64": 1e-14}
    with enable_x64():
        compiled = jax.jit(forced(f)).lower(*args).compile()
        assert count(compiled.as_text()) > 0
        for got, exact in zip(compiled(*args), in_float64(f, *args), strict=True):
            error = np.max(np.abs(np.asarray(got, np.float64) - exact)) / max(np.max(np.abs(exact)), 0.1)
            assert error <= limit[str(args[0].dtype)] * (1 + args[0].shape[0] ** 0.5 / 4), error


@pytest.mark.parametrize("isa,dtype,rows,m,n", PRODUCTS, indirect=["isa"])
def test_weight_gradients(isa: str, dtype: str, rows: int, m: int, n: int) -> None:
    """Products that contract the rows: both orders, batches, crossed dimensions, and a second contracted dimension."""

    def f(x: Any, y: Any, z: Any) -> Any:
        a, b, c = jnp.sin(x), jnp.cos(y), z * 2
        by_head = jnp.einsum("rhi,rhj->hij", c, jnp.stack([b, -b, b * b], 1))
        inner = jnp.einsum("rtm,rtn->nm", c, jnp.stack([b, b + 1, -b], 1))
        crossed = jnp.einsum("rht,rkt->hk", c, c * c), jnp.einsum("rhi,rj->jih", c, b)
        wide = jnp.einsum("rm,rn->mn", a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
        return a.T @ b, b.T @ a, a.T @ a, by_head, inner, *crossed, wide

    check_products(f, *(normal(*s, dtype=dtype) for s in ((rows, m), (rows, n), (rows, 3, m))))


@pytest.mark.parametrize("isa,dtype,rows,k,n", PRODUCTS, indirect=["isa"])
def test_products(isa: str, dtype: str, rows: int, k: int, n: int) -> None:
    """Products with a stationary operand, with the epilogues that are folded into them."""

    def f(x: Any, w: Any, b: Any) -> Any:
        y = x @ w
        return y, jax.nn.relu(x @ w + b), jnp.tanh(y + b) @ w.T, jax.nn.relu(jnp.einsum("rk,kn->nr", x, w))

    check_products(f, *(normal(*s, dtype=dtype) for s in ((rows, k), (k, n), (n,))))


# --- effects ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_debug_print(ordered: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        jax.debug.print("first {}", h.sum().astype(int) * 0, ordered=ordered)
        y = jnp.sin(h) * 2
        jax.debug.print("second {}", (y.sum() > 1e9).astype(int), ordered=ordered)
        return y

    check(f, normal(19, 5), normal(5, 7))
    jax.effects_barrier()
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert sorted(lines) == ["first 0"] * 2 + ["second 0"] * 2
    if ordered:
        assert lines == ["first 0", "second 0"] * 2


def test_callbacks_keep_their_order() -> None:
    seen: list[tuple[str, float]] = []

    def note(name: str, x: Any) -> None:
        seen.append((name, round(float(x), 3)))

    def f(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        io_callback(lambda v: note("a", v), None, h[0, 0], ordered=True)
        y = jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(h.shape, h.dtype), jnp.sin(h))
        z = jnp.cos(y) + 1
        io_callback(lambda v: note("b", v), None, z[0, 0], ordered=True)
        io_callback(lambda v: note("c", v), None, z[1, 0], ordered=True)
        return z

    check(f, normal(19, 5), normal(5, 7))
    jax.effects_barrier()
    assert [name for name, _ in seen] == ["a", "b", "c"] * 2
    assert seen[:3] == seen[3:]


# --- the same every time, from every thread --------------------------------------------------------------------------------------


def training_step(x: Any, w: Any, v: Any) -> Any:
    def loss(w: Any, v: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ w) @ v) ** 2)

    return jax.value_and_grad(loss, (0, 1))(w, v)


def test_bits_are_reproducible() -> None:
    f = jax.jit(forced(training_step))
    args = normal(2003, 19), normal(19, 33), normal(33, 5)
    first = jax.tree.map(np.asarray, f(*args))
    for _ in range(10):
        jax.tree.map(np.testing.assert_array_equal, first, f(*args))


def test_many_threads_call_one_function() -> None:
    f = jax.jit(forced(training_step))
    inputs = [(normal(517, 19), normal(19, 33), normal(33, 5)) for _ in range(16)]
    want = [jax.tree.map(np.asarray, f(*args)) for args in inputs]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            got = list(pool.map(lambda args: jax.tree.map(np.asarray, f(*args)), inputs))
            jax.tree.map(np.testing.assert_array_equal, got, want)


# --- a damaged program -----------------------------------------------------------------------------------------------------------


def _call(words: np.ndarray, *arrays: Any, out: tuple[int, ...] = (37, 7)) -> Any:
    (result,) = jax.jit(lambda *a: call.call(words, a, [jax.ShapeDtypeStruct(out, jnp.float32)]))(*arrays)
    return np.asarray(result)


@pytest.fixture(scope="module")
def program() -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """A program's words, taken from the compiled call of a network, and arrays to call it on."""
    taken: list[np.ndarray] = []
    x, w = normal(37, 5), normal(5, 7)

    def f(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    with pytest.MonkeyPatch.context() as patch:
        real = call.call
        patch.setattr(call, "call", lambda words, *rest: taken.append(words) or real(words, *rest))
        jax.jit(forced(f)).lower(x, w)
    (words,) = taken
    np.testing.assert_allclose(_call(words, x, w), np.tanh(x @ w), rtol=1e-5, atol=1e-6)
    return words, (x, w)


def resealed(words: np.ndarray) -> np.ndarray:
    """With the length and the checksum that the damaged words would have."""
    words = words.copy()
    words[2] = len(words)
    words[3] = zlib.crc32(words[4:].tobytes())
    return words


def test_a_truncated_program_is_named(program: Any) -> None:
    words, args = program
    for n in (0, 1, 3, 4, len(words) // 2, len(words) - 1):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"kitsune program: (\d+ words|.*the header)"):
            _call(words[:n], *args)
    for n in (4, len(words) // 3, len(words) - 1):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"kitsune program: .*(the words end here|does not fit|is not in)"):
            _call(resealed(words[:n]), *args)


def test_a_flipped_bit_is_named(program: Any) -> None:
    words, args = program
    rng = np.random.default_rng(0)
    said = {0: "magic number", 1: "format version", 2: "header says", 3: "checksum"}
    for word in [0, 1, 2, 3, *rng.integers(4, len(words), 8)]:
        damaged = words.copy()
        damaged[word] ^= np.int64(1) << np.int64(rng.integers(0, 62))
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"kitsune program: .*{said.get(int(word), 'checksum')}"):
            _call(damaged, *args)


def test_a_forged_program_never_crashes(program: Any) -> None:
    """Damage under a valid checksum: the validator's word, or a result of the right shape."""
    words, args = program
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(40):
        damaged = words.copy()
        damaged[rng.integers(4, len(words))] = rng.choice([-1, 0, 1, 2, 7, 255, 2**31, 2**62, -(2**63)])
        try:
            assert _call(resealed(damaged), *args).shape == (37, 7)
        except jax.errors.JaxRuntimeError as error:
            assert "kitsune" in str(error)
            refused += 1
    assert refused > 10


def test_a_program_for_other_arrays_is_refused(program: Any) -> None:
    words, (x, w) = program
    with pytest.raises(jax.errors.JaxRuntimeError, match="operand 0 of the call has 180 elements .* wants 185 of float32"):
        _call(words, x[:36], w)
    with pytest.raises(jax.errors.JaxRuntimeError, match="operand 1 .* wants 35 of float32"):
        _call(words, x, w.astype(np.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="result 0 of the call has 252 elements"):
        _call(words, x, w, out=(36, 7))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the call has 1 operands and 2 results, .* wants 2 and 2"):
        _call(words, x)
