"""Functions that are exported with symbolic shapes and ``export="calls"``: pipelines are planned where the sizes are known."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import kitsune_jax as kj
from kitsune_jax import _compat, config
from kitsune_jax.frontend import lowering
from tests.support.checks import arrays, close, count, in_float64
from tests.support.transform_cases import loss, mlp

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax")  # a fall-back to plain HLO is a failure here

REGION = "kitsune_region (import kitsune_jax)"
ALLOWED = [export.DisabledSafetyCheck.custom_call(name) for name in (REGION, "kitsune_cpu")]
W1, W2, SQUARE = arrays(0, (8, 16), (16, 8), (8, 8))
TABLE = arrays(1, (20, 8))[0]


def sized(*shape: Any, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return arrays(2, shape)[0].astype(dtype)


def exported(f: Any, *specs: Any, strict: bool = True, **options: Any) -> Any:
    fn = jax.jit(kj.pipeline(f, force=True, strict=strict, export="calls"))
    return export.export(fn, disabled_checks=ALLOWED, **options)(*specs)


def received(f: Any, *specs: Any, vjp_order: int = 0) -> Any:
    return export.deserialize(exported(f, *specs).serialize(vjp_order=vjp_order))


def pipelines(call: Any, *args: Any) -> tuple[int, Any]:
    """(how many pipelines ``call`` of ``args`` has, its result)."""
    compiled = jax.jit(call).lower(*args).compile()
    return count(compiled.as_text()), compiled(*args)


(B,) = export.symbolic_shape("b")
MLP = (sized(B, 8), W1, W2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_export_has_pipelines_for_every_batch(dtype: Any) -> None:
    weights = [w.astype(dtype) for w in (W1, W2)]
    program = received(mlp, sized(B, 8, dtype=dtype), *weights)
    for n in (1, 2, 7, 300):
        args = rows(n, 8, dtype=dtype), *weights
        calls, got = pipelines(program.call, *args)
        assert calls == 1 and got.dtype == dtype
        close(got, in_float64(mlp, *args), 2e-4 if dtype == "float32" else 3e-2)


def test_it_runs_without_jit_and_inside_of_other_functions() -> None:
    program = received(mlp, *MLP)
    close(program.call(rows(5, 8), W1, W2), in_float64(mlp, rows(5, 8), W1, W2))
    twice = lambda x: program.call(program.call(x, W1, W2) + x, W1, W2)  # noqa: E731
    calls, got = pipelines(twice, rows(5, 8))
    assert calls == 2
    close(got, in_float64(lambda x: mlp(mlp(x, W1, W2) + x, W1, W2), rows(5, 8)))


def test_the_plan_is_that_of_the_function_with_these_shapes() -> None:
    args = rows(64, 8), W1, W2
    loaded = jax.jit(received(mlp, *MLP).call).lower(*args).as_text()
    direct = jax.jit(kj.pipeline(mlp, force=True)).lower(*args).as_text()

    def program(text: str) -> str:
        (line,) = (line for line in text.splitlines() if "@kitsune_cpu" in line)
        return line.split("program = ")[1].split(">")[0][-400:]  # its head holds names

    assert program(loaded) == program(direct)


B2, S2 = export.symbolic_shape("b, s", constraints=["b >= 2", "mod(s, 4) == 0", "s <= 64"])
B3, S3 = export.symbolic_shape("b, s")


def attention(x: Any, w: Any) -> Any:
    q, k, v = (x @ (w * i) for i in (1, 2, 3))
    n = x.shape[1]
    seen = jnp.tril(jnp.ones((n, n), bool))
    scores = jnp.where(seen, jnp.einsum("bqd,bkd->bqk", q, k) / 3, -1e30)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores, -1), v)


def recurrent(x: Any, w: Any) -> Any:
    def step(c: Any, now: Any) -> Any:
        c = jnp.tanh(now @ w + c @ w)
        return c, c

    return jax.lax.scan(step, jnp.zeros((x.shape[0], 8), x.dtype), jnp.swapaxes(x, 0, 1))


def normed(x: Any, w: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return jax.nn.gelu(((x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)).reshape(-1, 8) @ w)


def batch_gradient(x: Any, w: Any) -> Any:
    return jax.value_and_grad(lambda x, w: jnp.mean(jnp.tanh(x @ w) ** 2), 1)(x, w)


def between_sorts(x: Any, w: Any) -> Any:
    return jnp.sort(jnp.tanh(jnp.sort(jnp.tanh(x @ w), axis=0) @ w), axis=0)


def sorted_steps(x: Any, w: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(jnp.sort(c, 0) @ w), x)


def halves(x: Any, w: Any) -> Any:
    n = x.shape[0]
    return jnp.tanh(x[: n // 2] @ w).sum(0), jnp.concatenate([jnp.tanh(x[::2] @ w), x])[1:] @ w


def counted(x: Any, w: Any) -> Any:
    return (jnp.tanh(x @ w) * jnp.arange(x.shape[0], dtype=x.dtype)[:, None]) @ w


def most(x: Any, w: Any) -> Any:
    """The first 70 000 rows, or all; so many that no sample tells min(b, 70000) from b unless it is asked to."""
    return jnp.tanh(x[:70_000] @ w).sum(0), jnp.tanh(x[2:] @ w), jnp.tanh(x[:3] @ w)


def looked_up(ids: Any, table: Any, w: Any) -> Any:
    return jnp.tanh(table[ids] @ w).sum(1)


def dropped(x: Any, w: Any) -> Any:
    kept = jax.random.uniform(jax.random.key(0), x.shape, np.float32) < 0.5
    return jnp.where(kept, jnp.tanh(x @ w), 0) @ w


IDS = np.arange(30, dtype=np.int32).reshape(6, 5) % 20
CASES: dict[str, tuple[Any, tuple[Any, ...], list[tuple[Any, ...]], int]] = {
    "attention": (attention, (sized(B3, S3, 8), SQUARE), [(rows(2, 3, 8), SQUARE), (rows(3, 16, 8), SQUARE)], 1),
    "with constraints": (attention, (sized(B2, S2, 8), SQUARE), [(rows(2, 4, 8), SQUARE), (rows(5, 64, 8), SQUARE)], 1),
    "a loop": (recurrent, (sized(B3, S3, 8), SQUARE), [(rows(1, 1, 8), SQUARE), (rows(3, 9, 8), SQUARE)], 1),
    "merged dimensions": (normed, (sized(B3, S3, 8), SQUARE), [(rows(1, 2, 8), SQUARE), (rows(4, 9, 8), SQUARE)], 1),
    "a gradient": (batch_gradient, (sized(B, 8), SQUARE), [(rows(1, 8), SQUARE), (rows(33, 8), SQUARE)], 1),
    "between operators of XLA": (between_sorts, (sized(B, 8), SQUARE), [(rows(1, 8), SQUARE), (rows(33, 8), SQUARE)], 2),
    "in a loop of XLA": (sorted_steps, (sized(B, 8), SQUARE), [(rows(1, 8), SQUARE), (rows(33, 8), SQUARE)], 1),
    "quotients of sizes": (halves, (sized(B, 8), SQUARE), [(rows(2, 8), SQUARE), (rows(33, 8), SQUARE)], 2),
    "bounds of sizes": (most, (sized(B, 8), SQUARE), [(rows(n, 8), SQUARE) for n in (1, 2, 3, 100, 70_001)], 1),
    "counted rows": (counted, (sized(B, 8), SQUARE), [(rows(1, 8), SQUARE), (rows(33, 8), SQUARE)], 1),
    "a table": (looked_up, (sized(B, 5, dtype=np.int32), TABLE, SQUARE), [(IDS, TABLE, SQUARE)], 1),
    "random bits": (dropped, (sized(B, 8), SQUARE), [(rows(1, 8), SQUARE), (rows(33, 8), SQUARE)], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function(name: str) -> None:
    f, specs, calls, least = CASES[name]
    program = received(f, *specs)
    for args in calls:
        found, got = pipelines(program.call, *args)
        assert found >= least
        close(got, in_float64(f, *args))


@pytest.mark.parametrize("name", ["attention", "a loop", "between operators of XLA"])
def test_the_gradient_of_an_exported_function_has_pipelines(name: str) -> None:
    f, specs, calls, least = CASES[name]
    program = received(f, *specs, vjp_order=1)

    def total(g: Any) -> Any:
        return lambda *args: sum(jnp.sum(y**2) for y in jax.tree.leaves(g(*args)))

    for args in calls:
        found, got = pipelines(jax.grad(total(program.call), (0, 1)), *args)
        assert found > least  # of the forward and the backward pass
        close(got, in_float64(jax.grad(total(f), (0, 1)), *args), 1e-3)


def test_the_scores_of_an_attention_are_no_residuals_with_symbolic_shapes() -> None:
    step = jax.grad(lambda x: jnp.sum(kj.pipeline(attention, force=True)(x, SQUARE) ** 2))

    def calls(jaxpr: Any) -> Any:
        for eqn in _compat.open_parts(jaxpr)[0].eqns:
            if eqn.primitive.name == lowering.PRIMITIVE_NAME:
                yield [v.aval.shape for v in eqn.outvars]
            else:
                for inner in _compat.inner_jaxprs(eqn):
                    yield from calls(inner)

    forward, backward = calls(jax.jit(step).trace(sized(B3, S3, 8)).jaxpr)
    assert (B3, S3, 8) in forward and backward == [(B3, S3, 8)]
    assert not any(shape.count(S3) == 2 for shape in forward)


def test_an_export_is_plain_by_default() -> None:
    sent = export.export(jax.jit(kj.pipeline(mlp, force=True)))(*MLP).serialize(vjp_order=1)
    program = export.deserialize(sent)
    assert "kitsune" not in program.mlir_module()
    for n in (1, 9):
        close(program.call(rows(n, 8), W1, W2), in_float64(mlp, rows(n, 8), W1, W2))
        grads = jax.jit(jax.grad(loss(program.call), (0, 1, 2)))(rows(n, 8), W1, W2)
        close(grads, in_float64(jax.grad(loss(mlp), (0, 1, 2)), rows(n, 8), W1, W2))


def test_an_export_inside_of_an_export_waits_for_the_sizes_of_the_outer_one() -> None:
    program = received(mlp, *MLP)
    outer = export.export(jax.jit(lambda x: program.call(jnp.concatenate([x, x]), W1, W2)), disabled_checks=ALLOWED)
    for spec in (sized(B3, 8), sized(6, 8)):
        again = export.deserialize(outer(spec).serialize())
        assert REGION in again.mlir_module()
        calls, got = pipelines(again.call, rows(6, 8))
        assert calls == 1
        close(got, in_float64(lambda x: mlp(jnp.concatenate([x, x]), W1, W2), rows(6, 8)))


def test_for_several_platforms_each_has_its_call() -> None:
    program = export.deserialize(exported(mlp, *MLP, platforms=("cpu", "tpu"), strict=False).serialize())
    assert program.mlir_module().count(REGION) == 1
    calls, got = pipelines(program.call, rows(6, 8), W1, W2)
    assert calls == 1
    close(got, in_float64(mlp, rows(6, 8), W1, W2))


def test_switched_off_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    program = received(mlp, *MLP)
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    calls, got = pipelines(program.call, rows(6, 8), W1, W2)
    assert calls == 0
    close(got, in_float64(mlp, rows(6, 8), W1, W2))


@pytest.mark.expects_fallbacks
@pytest.mark.parametrize("strict", [False, True])
def test_a_failure_where_it_is_called(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = export.deserialize(exported(mlp, *MLP, strict=strict).serialize())

    def planted(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(lowering, "planned_function", planted)
    if strict:
        with pytest.raises(RuntimeError, match="planted"):
            program.call(rows(6, 8), W1, W2)
        return
    with pytest.warns(Warning, match="kitsune_jax could not pipeline"):
        got = program.call(rows(6, 8), W1, W2)
    close(got, in_float64(mlp, rows(6, 8), W1, W2))
    (fallback,) = kj.fallbacks()
    assert fallback.reason == "RuntimeError: planted" and fallback.function.startswith("mlp (transform_cases.py:")


def spread(x: Any, w: Any) -> Any:
    """Random bits are numbered by products of three sizes, which are no multiple of two."""
    return jax.random.uniform(jax.random.key(0), x.shape) * (x @ w)


FOUR = export.symbolic_shape("a, b, c, d")
UNFIT: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "nothing to stream": (lambda x: jnp.tanh(x) + 1, (sized(B, 8),), "no operator in it has anything to stream"),
    "numbers": (spread, (sized(*FOUR, 8), SQUARE), "a number in its operators is no multiple of its sizes"),
    "constraints": (
        lambda x: jnp.tanh(x @ W1),
        (sized(export.symbolic_shape("b", constraints=["b >= 40", "b <= 42"])[0], 8),),
        "values that satisfy the constraints of its sizes were not found",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_the_reason_why_a_function_is_exported_as_plain_hlo(name: str) -> None:
    f, specs, why = UNFIT[name]
    with pytest.raises(kj.NotPipelined, match=f"nothing was pipelined: shapes are symbolic, and .*{why}"):
        exported(f, *specs)
    assert REGION not in exported(f, *specs, strict=False).mlir_module()


def test_a_jax_that_calls_exported_programs_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "resolves", lambda _: False)
    with pytest.raises(kj.NotPipelined, match="this version of JAX"):
        exported(mlp, *MLP)
    assert REGION not in exported(mlp, *MLP, strict=False).mlir_module()


def test_an_export_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = received(mlp, *MLP)
    monkeypatch.setattr(config, "__version__", "9.9.9")
    with pytest.raises(ValueError, match="exported with kitsune_jax .*, and this is 9.9.9: export it again"):
        program.call(rows(6, 8), W1, W2)


RECEIVER = """
    import sys, numpy as np
    {first}
    from jax import export
    program = export.deserialize(open(sys.argv[1], "rb").read())
    print(float(np.sum(program.call(np.ones((6, 8), np.float32), np.ones((8, 16), np.float32), np.ones((16, 8), np.float32)))))
"""


@pytest.mark.parametrize("imported", [True, False])
def test_another_process(imported: bool, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "exported"
    file.write_bytes(exported(mlp, *MLP).serialize())
    script = textwrap.dedent(RECEIVER).format(first="import kitsune_jax" if imported else "")
    ran = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=120, check=False)
    if imported:
        assert float(ran.stdout) == pytest.approx(48.0)  # tanh of 128 is 1, 6 x 8 times
    else:
        assert ran.returncode == 1
        assert "import kitsune_jax" in ran.stderr
