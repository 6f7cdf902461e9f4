"""The op table against JAX: every entry's NumPy rule in every dtype, and every dimension relation by experiment."""

from __future__ import annotations

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.extend.random import threefry2x32_p

from kitsune_jax.ops.pointwise import threefry_word
from kitsune_jax.ops.spec import DTYPES, FORMATS, ROWS, is_float, np_dtype, resolve_rows
from kitsune_jax.ops.table import OPS
from kitsune_jax.targets.cpu.bytecode import OPCODES
from reference.operators import MEANINGS
from tests.support.table_cases import sample

# XLA has no primitive for one element of an rbg key's bits: tests/cpu/test_rbg_bits.py compares them with its generator.
POINTWISE = [kind for kind, spec in OPS.items() if spec.family == "pointwise" and kind not in ("copy", "philox4x32")]
QUICK_DTYPES = ("bool", "int8", "uint32", "bfloat16", "float32")  # the slow tests take all of them
EXPENSIVE = tuple(kind for kind in POINTWISE if OPS[kind].flops >= 40 and not OPS[kind].exact)

METHODS = {"even": lax.RoundingMethod.TO_NEAREST_EVEN, "away": lax.RoundingMethod.AWAY_FROM_ZERO}
WITH_ACCURACY = ["exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "logistic", "tanh", "sin", "cos", "tan"]


@pytest.fixture(autouse=True)
def x64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def test_the_table_is_complete():
    for kind, spec in OPS.items():
        assert spec.kind == kind
        assert spec.doc and spec.flops >= (spec.family == "pointwise" and kind != "copy")
        assert set(spec.opcodes) <= set(OPCODES)
        assert set(spec.dtypes) <= set(DTYPES)
        assert spec.like is None or spec.like[0] in OPS
        assert not set(spec.names) & set(OPS)
        assert spec.cuda.keys() <= {"any", "float", "i32", "u32", "bool", "coarse"}
        assert all(text.count("(") == text.count(")") for text in spec.cuda.values() if isinstance(text, str))


def pointwise_primitives():
    """Names of primitives of jax.lax, outside the table, that map up to three real arrays of one shape to one such array."""
    outside = set(
        [
            "real",
            "imag",
            "conj",
            "complex",
            "copy",
            "stop_gradient",
            "optimization_barrier",
            "stage",
            "igamma_grad_a",
            "one_minus_square",
            "log2",
            "polynomial",
            "tie",
        ]
    )
    found = set()
    for attribute in dir(lax):
        p = getattr(lax, attribute)
        if not attribute.endswith("_p") or p.name in outside or p.name in OPS or p.multiple_results:
            continue
        for arity in (1, 2, 3):
            for dtype in ("float32", "int32", "bool"):
                try:
                    out = jax.eval_shape(p.bind, *[jax.ShapeDtypeStruct((3, 2), np_dtype(dtype))] * arity)
                except Exception:
                    continue
                if getattr(out, "shape", None) == (3, 2):
                    found.add(p.name)
    return found


def test_every_pointwise_primitive_of_lax_is_in_the_table():
    assert len(POINTWISE) > 70
    assert pointwise_primitives() == set()


# --- pointwise values ------------------------------------------------------------------------------------------------------------


@functools.cache
def jitted(kind: str, params: tuple):
    return jax.jit(by_lax(kind, params))


@functools.cache
def jitted_together(kind: str, each: tuple[tuple, ...]):
    """A function of as many tuples of arrays as there are parameters in ``each``: XLA takes longer to begin than to compile one."""
    functions = [by_lax(kind, params) for params in each]
    return jax.jit(lambda cases: [f(*arrays) for f, arrays in zip(functions, cases, strict=True)])


def by_lax(kind: str, params: tuple):
    options = dict(params)
    if kind == "round":
        options = {"rounding_method": METHODS[options["method"]]}
    if "new_dtype" in options:
        options["new_dtype"] = np_dtype(options["new_dtype"])
    if kind in WITH_ACCURACY:
        options = {"accuracy": None}
    if kind == "threefry2x32":
        return lambda *arrays: threefry_word(options["word"], *threefry2x32_p.bind(*arrays))
    primitive = getattr(lax, f"{kind}_p")
    return lambda *arrays: primitive.bind(*arrays, **options)


def assert_close(kind: str, got: np.ndarray, want: np.ndarray, what: object) -> None:
    """Equal; floats up to the inaccuracy of XLA's function that the entry states: it is XLA that is off, the table computes in
    float64. Measured on XLA's CPU backend over both supported versions and rounded up.
    """
    assert got.dtype == want.dtype and got.shape == want.shape, what
    dtype = str(want.dtype)
    if not is_float(dtype):
        np.testing.assert_array_equal(got, want, err_msg=str(what))
        return
    mantissa, least = FORMATS[dtype][1], 2 - 2 ** (FORMATS[dtype][0] - 1)
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=str(what))
    got, want = got[finite], want[finite]
    exponent = np.maximum(np.frexp(want)[1] - 1, least)
    spec, meaning = OPS[kind], MEANINGS[kind]
    coarser = 2.0 ** max(-10, 23 - mantissa) if dtype != "float64" else 2.0**-12
    allowed = (0 if spec.exact else meaning.ulps.get("xla", 5)) * np.ldexp(1.0, exponent - mantissa)
    allowed = np.where(np.abs(want) < np.ldexp(1.0, least), np.ldexp(1.0, least), allowed)  # XLA may flush subnormal numbers
    allowed = allowed + (meaning.absolute + meaning.relative * np.abs(want)) * coarser
    if dtype in ("float16", "bfloat16") and not spec.exact:
        allowed = np.maximum(allowed, 2 * np.ldexp(1.0, exponent - mantissa))
    worst = np.argmax(np.abs(got - want) - allowed) if want.size else 0
    assert want.size == 0 or np.all(np.abs(got - want) <= allowed), (what, got[worst], want[worst])


def check_pointwise(kind: str, dtypes, seed: int, n: int = 257) -> None:
    rng = np.random.default_rng(seed)
    spec = OPS[kind]
    cases = [(dtype, params) for dtype in spec.dtypes if dtype in dtypes for params in MEANINGS[kind].samples(dtype)]
    drawn = [[sample(rng, kind, k, dtype, n) for k in range(spec.arity or 0)] for dtype, _ in cases]
    wanted = jitted_together(kind, tuple(tuple(params.items()) for _, params in cases))(drawn)
    for (dtype, params), arrays, want in zip(cases, drawn, map(np.asarray, wanted), strict=True):
        got = MEANINGS[kind].numpy(params, *arrays, out_dtype=str(want.dtype))
        assert_close(kind, got, want, (kind, dtype, params))


@pytest.mark.parametrize("kind", POINTWISE)
def test_pointwise_equals_jax(kind):
    check_pointwise(kind, ("float32",) if kind in EXPENSIVE else QUICK_DTYPES, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", POINTWISE)
def test_pointwise_equals_jax_in_every_dtype(kind):
    for seed in range(4):
        check_pointwise(kind, DTYPES, seed=seed)


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 2.5, -2.5, 3.4e38, -3.4e38, 1e-37])
UNEQUAL_AT = {  # where XLA's own versions or platforms disagree with one another
    "digamma": SPECIAL != 0,
    "lgamma": np.abs(SPECIAL) < 1e30,
    "integer_pow": np.abs(SPECIAL) != 1e-37,
    "sign": np.ones(SPECIAL.size, bool),
}


@pytest.mark.parametrize("kind", [k for k in POINTWISE if OPS[k].arity == 1 and "float32" in OPS[k].dtypes])
def test_special_values_of_unary_ops(kind):
    x = SPECIAL[UNEQUAL_AT.get(kind, np.ones(SPECIAL.size, bool))].astype(np.float32)
    for params in MEANINGS[kind].samples("float32"):
        want = np.asarray(jitted(kind, tuple(params.items()))(x))
        assert_close(kind, MEANINGS[kind].numpy(params, x, out_dtype=str(want.dtype)), want, (kind, params))


@pytest.mark.parametrize(
    "kind",
    [
        "add",
        "sub",
        "mul",
        "div",
        "rem",
        "max",
        "min",
        "pow",
        "atan2",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "eq_to",
        "lt_to",
        "le_to",
        "nextafter",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_special_values_of_binary_ops(kind, dtype):
    x, y = (a.ravel().astype(np_dtype(dtype)) for a in np.meshgrid(SPECIAL, SPECIAL))
    if kind == "nextafter":  # the neighbours of zero are subnormal: XLA and NumPy agree on them in these dtypes
        x, y = x[np.isfinite(x)], y[np.isfinite(x)]
    want = np.asarray(jitted(kind, ())(x, y))
    assert_close(kind, MEANINGS[kind].numpy({}, x, y, out_dtype=str(want.dtype)), want, kind)


@pytest.mark.parametrize("low,high", [(0.0, 1.0), (2.0, 1.0), (np.nan, 1.0), (0.0, np.nan)])
def test_clamp_and_select_take_scalars(low, high):
    x = SPECIAL.astype(np.float32)
    want = lax.clamp(np.float32(low), x, np.float32(high))
    np.testing.assert_array_equal(MEANINGS["clamp"].numpy({}, np.float32(low), x, np.float32(high), out_dtype="float32"), want)
    for which in (True, False):
        got = MEANINGS["select_n"].numpy({}, np.asarray(which), x, -x, out_dtype="float32")
        np.testing.assert_array_equal(got, lax.select_n(which, x, -x))


@pytest.mark.parametrize("source", DTYPES)
def test_conversions(source):
    rng = np.random.default_rng(1)
    x = sample(rng, "", 0, source, 65)
    if is_float(source):
        with np.errstate(over="ignore"):  # float16: to infinity, on purpose
            x = np.concatenate([x, (x.astype(np.float64) * 1e9).astype(x.dtype), SPECIAL.astype(x.dtype)])
    targets = DTYPES if source in ("float32", "int32") else QUICK_DTYPES
    converted = jax.jit(lambda x: [lax.convert_element_type(x, np_dtype(target)) for target in targets])(x)
    for target, want in zip(targets, map(np.asarray, converted), strict=True):
        got = MEANINGS["convert_element_type"].numpy({"new_dtype": target}, x, out_dtype=target)
        assert got.dtype == want.dtype
        wide = np.float64 if is_float(target) else np_dtype(target)  # bfloat16 has no NaN-aware comparison
        np.testing.assert_array_equal(got.astype(wide), want.astype(wide), err_msg=f"{source} to {target}")


@hypothesis.given(
    st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1), st.sampled_from([8, 16, 32, 64]), st.booleans()
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_integer_division_is_euclids_where_it_is_defined(a, b, bits, signed):
    dtype = f"{'int' if signed else 'uint'}{bits}"
    x, y = (np.asarray(v, np.int64).astype(dtype) for v in (a, b))
    quotient = int(MEANINGS["div"].numpy({}, x, y, out_dtype=dtype))
    rest = int(MEANINGS["rem"].numpy({}, x, y, out_dtype=dtype))
    if int(y) == 0:
        assert quotient == (-1 if signed else 2**bits - 1) and rest == int(x)
    else:
        assert (quotient * int(y) + rest - int(x)) % 2**bits == 0
        assert abs(rest) < abs(int(y)) and (rest == 0 or (rest < 0) == (int(x) < 0))
    high = int(MEANINGS["mulhi"].numpy({}, x, y, out_dtype=dtype))
    assert high == (int(x) * int(y)) >> bits


def test_resolve_rows():
    params = {"shape": (ROWS, 4), "dims": (0, 1), "limit": (ROWS, 2), "low": (-1, 0), "new_sizes": (2, ROWS)}
    expected = {"shape": (5, 4), "dims": (0, 1), "limit": (5, 2), "low": (-1, 0), "new_sizes": (2, 5)}
    assert resolve_rows(params, 5) == expected
    assert resolve_rows(tuple(params.items()), 5) == expected


# --- reductions and friends ----------------------------------------------------------------------------------------------------

REDUCE = ("sum", "prod", "max", "min", "and", "or", "xor")


@pytest.mark.parametrize("kind", [f"reduce_{how}" for how in REDUCE] + ["argmax", "argmin"])
def test_reductions_equal_jax(kind):
    rng = np.random.default_rng(3)
    for dtype in OPS[kind].dtypes:
        if dtype not in QUICK_DTYPES:
            continue
        x = sample(rng, kind, 0, dtype, 3 * 5 * 7).reshape(3, 5, 7)
        if is_float(dtype):
            x[0, 1, 2] = np.nan
        if kind.startswith("arg"):
            params, options = {"axis": 1}, {"axes": (1,), "index_dtype": np.dtype(np.int32)}
        else:
            params, options = {"axes": (0, 2)}, {"axes": (0, 2)}
        want = np.asarray(
            getattr(lax, f"{kind}_p").bind(jnp.asarray(x), **options, **({"out_sharding": None} if "sum" in kind else {}))
        )
        got = MEANINGS[kind].numpy(params, x, out_dtype=str(want.dtype))
        assert got.dtype == want.dtype
        tolerance = {"bfloat16": 0.06, "float32": 1e-5}.get(dtype, 0)
        if tolerance:
            np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind,identity", [("sum", 0.0), ("prod", 1.0), ("max", -np.inf), ("min", np.inf)])
def test_a_reduction_of_nothing_is_its_identity(kind, identity):
    got = MEANINGS[f"reduce_{kind}"].numpy({"axes": (1,)}, np.zeros((3, 0), np.float32), out_dtype="float32")
    np.testing.assert_array_equal(got, np.full(3, identity, np.float32))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype,axis", [("int32", 0), ("float32", 1), ("float32", 2), ("bfloat16", 1)])
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_cumulative_ops_equal_jax(kind, dtype, axis):
    if kind == "cumlogsumexp" and dtype == "int32":
        assert dtype not in OPS[kind].dtypes
        return
    x = sample(np.random.default_rng(4), kind, 0, dtype, 60).reshape(3, 5, 4)
    for reverse in (False, True):
        want = np.asarray(getattr(lax, kind)(jnp.asarray(x), axis=axis, reverse=reverse))
        got = MEANINGS[kind].numpy({"axis": axis, "reverse": reverse}, x, out_dtype=dtype)
        assert got.dtype == want.dtype
        tolerance = {"bfloat16": 0.06, "float32": 2e-5}.get(dtype, 0)
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance)


DOTS = [  # lhs shape, rhs shape, contract, batch
    ((4, 3), (3, 5), ((1,), (0,)), ((), ())),
    ((3, 4), (5, 3), ((0,), (1,)), ((), ())),
    ((2, 4, 3), (5, 3, 2), ((2,), (1,)), ((0,), (2,))),
    ((2, 3, 4), (3, 4, 2), ((1, 2), (0, 1)), ((), ())),
    ((7,), (7,), ((0,), (0,)), ((), ())),
    ((4, 0), (0, 5), ((1,), (0,)), ((), ())),
]


@pytest.mark.parametrize("lhs,rhs,contract,batch", DOTS)
@pytest.mark.parametrize(
    "dtype,out", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("int8", "int32")]
)
def test_dot_general_equals_jax(lhs, rhs, contract, batch, dtype, out):
    rng = np.random.default_rng(5)
    x, y = (rng.integers(-4, 5, s).astype(np_dtype(dtype)) for s in (lhs, rhs))
    want = lax.dot_general(jnp.asarray(x), jnp.asarray(y), (contract, batch), preferred_element_type=np_dtype(out))
    params = {
        "lhs_contract": contract[0],
        "rhs_contract": contract[1],
        "lhs_batch": batch[0],
        "rhs_batch": batch[1],
        "accumulate": "float32" if is_float(out) else out,
    }
    got = MEANINGS["dot_general"].numpy(params, x, y, out_dtype=out)
    assert str(got.dtype) == out
    np.testing.assert_array_equal(got.astype(float), np.asarray(want).astype(float))  # small integers: no rounding anywhere
