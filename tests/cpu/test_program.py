"""The CPU program format between Python and C++, the executor as a module, and the custom call under ``jax.jit``."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from kitsune_jax import _cpu
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import call as emit
from kitsune_jax.targets.cpu.bytecode import encode

F32 = bc.DTYPE_CODE["float32"]


def operand(space: int, index: int, row_stride: int, *strides: int) -> bc.CpuOperand:
    return bc.CpuOperand(bc.CpuRef(space, index, 0, F32), row_stride, strides)


def two_layers(rows: int, tile_rows: int = 16, k: int = 24, n: int = 40, depth: int = 2) -> bc.CpuProgram:
    """relu(x @ w + b) -> queue -> minus its column 0, and the sum over rows of that."""
    dense = bc.Prep(bc.WEIGHT, bc.CpuRef(bc.IN, 1, 0, F32), F32, (), (), (k,), (n,), (n,), (1,))
    bias = bc.Prep(bc.DENSE, bc.CpuRef(bc.IN, 2, 0, F32), F32, (), (), (), (), (n,), (1,))
    matmul = bc.Matmul(operand(bc.IN, 0, k, 0), 1, 1, 0, 1, 1, operand(bc.QUEUE, 0, n, 0))
    load, store, sub = (bc.OPCODE[name] for name in ("load", "store", "sub"))
    code = (
        bc.Micro(load, F32, 0, 0, 0, 0, 0, 0, ()),
        bc.Micro(load, F32, 1, 1, 0, 0, 0, 0, ()),
        bc.Micro(sub, F32, 2, 0, 1, 0, 0, 0, ()),
        bc.Micro(store, F32, 0, 0, 2, 0, 0, 0, ()),
        bc.Micro(store, F32, 0, 1, 2, 0, 0, 0, ()),
    )
    tile = operand(bc.SCRATCH, 0, n, 1)
    vector = bc.CpuVector((n,), 0, (operand(bc.QUEUE, 0, n, 1), operand(bc.QUEUE, 0, n, 0)), (operand(bc.OUT, 0, n, 1), tile), code)
    return bc.CpuProgram(
        name="two layers",
        axes=(rows,),
        batch_axes=0,
        tile_rows=tile_rows,
        workers=4,
        inputs=(bc.CpuArray(F32, rows * k), bc.CpuArray(F32, k * n), bc.CpuArray(F32, n)),
        outputs=(bc.CpuArray(F32, rows * n), bc.CpuArray(F32, n)),
        preps=(dense, bias),
        sinks=(bc.Sink(bc.REDUCTIONS.index("sum"), F32, n, 1),),
        queues=(bc.Ring(0, (1,), depth, tile_rows * n * 4),),
        stages=(
            bc.CpuStage("dense", 0, (matmul,)),
            bc.CpuStage("shift", tile_rows * n * 4, (vector, bc.Accumulate(0, (n,), (), tile))),
        ),
    )


def arrays(rows: int, k: int = 24, n: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(rows)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((rows, k), (k, n), (n,))]


def expected(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = np.maximum(x.astype(np.float64) @ w + b, 0)
    y = y - y[:, :1]
    return y, y.sum(0)


def call_words(words: np.ndarray, *results: jax.ShapeDtypeStruct):
    return lambda *args: emit.call(words, args, results)


def results_of(rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return jax.ShapeDtypeStruct((rows, 40), np.float32), jax.ShapeDtypeStruct((40,), np.float32)


def call(rows: int, **options: int):
    return call_words(encode(two_layers(rows, **options)), *results_of(rows))


def test_opcodes_and_version_agree():
    assert tuple(_cpu.opcodes()) == bc.OPCODES
    assert _cpu.format_version() == bc.VERSION


@pytest.mark.parametrize("rows", [1, 16, 97, 1009])
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_run_equals_numpy(rows, threads):
    x = arrays(rows)
    y, s = np.zeros((rows, 40), np.float32), np.zeros(40, np.float32)
    _cpu.run(encode(two_layers(rows)), x, [y, s], threads)
    for got, want in zip((y, s), expected(*x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_every_isa_agrees():
    x, before = arrays(97), _cpu.isa()
    assert "generic" in _cpu.available_isas()
    try:
        for isa in _cpu.available_isas():
            assert _cpu.set_isa(isa) and _cpu.isa() == isa
            y, s = np.zeros((97, 40), np.float32), np.zeros(40, np.float32)
            _cpu.run(encode(two_layers(97)), x, [y, s], 2)
            np.testing.assert_allclose(y, expected(*x)[0], rtol=2e-5, atol=2e-5)
    finally:
        assert _cpu.set_isa(before)
    assert not _cpu.set_isa("no such instruction set")


def test_custom_call_under_jit():
    x, before = arrays(1009), _cpu.calls()
    y, s = jax.jit(call(1009))(*x)
    np.testing.assert_allclose(y, expected(*x)[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(s, expected(*x)[1], rtol=2e-5, atol=1e-2)
    assert _cpu.calls() == before + 1


def test_sixteen_concurrent_calls():
    x = arrays(4099)
    compiled = jax.jit(call(4099)).lower(*x).compile()
    first = [np.asarray(a) for a in compiled(*x)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for got in pool.map(lambda _: compiled(*x), range(48)):
            for a, b in zip(got, first, strict=True):
                assert np.asarray(a).tobytes() == b.tobytes()


def test_damaged_attribute_is_an_error_that_names_it():
    words = encode(two_layers(16))
    words[-1] ^= 1
    with pytest.raises(Exception, match="checksum mismatch: the attribute was truncated or altered"):
        jax.jit(call_words(words, *results_of(16)))(*arrays(16))


def test_wrong_buffers_are_an_error_that_names_them():
    x, w, b = arrays(16)
    with pytest.raises(Exception, match="operand 2 of the call has 39 elements"):
        jax.jit(call(16))(x, w, b[:39])
    with pytest.raises(Exception, match="2 operands and 3 results"):
        jax.jit(call(16))(x, w)


@pytest.mark.parametrize("length", [0, 3, 4, 50, -1])
def test_truncated_words(length):
    assert "truncated" in _cpu.validate(encode(two_layers(16))[:length])


def test_validate_names_the_stage_and_the_element():
    good = two_layers(16)
    assert _cpu.validate(encode(good)) == ""
    bad = dataclasses.replace(good, inputs=(bc.CpuArray(F32, 16 * 24 - 1), *good.inputs[1:]))
    message = "stage 0 'dense' instruction 0 (Matmul): x reads element 383 of input 0, which has 383"
    assert message in _cpu.validate(encode(bad))
    with pytest.raises(ValueError, match="reads element 383"):
        _cpu.run(encode(bad), [], [], 1)


def test_version_mismatch_is_said():
    words = encode(two_layers(16))
    words[1] += 1
    assert "of different builds" in _cpu.validate(words)


@pytest.mark.parametrize("broken", ["absent", "old", "refused"])
def test_missing_or_mismatched_extension_warns_once(broken):
    code = f"""
        import sys, types, warnings
        if {broken!r} == "absent":
            sys.modules["kitsune_jax._cpu"] = None
        elif {broken!r} == "refused":  # by an XLA of a later major version of the FFI
            import jax

            def refuse(*_, **__):
                raise RuntimeError("the version of the FFI is not supported")

            jax.ffi.register_ffi_target = refuse
        else:
            fake = types.ModuleType("kitsune_jax._cpu")
            fake.format_version = lambda: -1
            sys.modules["kitsune_jax._cpu"] = fake
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            from kitsune_jax.targets.cpu import call as runtime  # the package registers the target when it is imported
            assert not runtime.available() and runtime.extension() is None
            assert not runtime.available()
        seen = [w for w in seen if issubclass(w.category, RuntimeWarning) and "kitsune" in str(w.message)]
        assert len(seen) == 1 and "pip install --force-reinstall" in str(seen[0].message), seen
        print(runtime.why_not())
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    said = {"absent": "cannot be imported", "old": "different builds", "refused": "the version of the FFI is not supported"}
    assert said[broken] in result.stdout


def test_registration_before_and_after_the_backend_starts():
    for order in ("runtime.available(); jax.devices()", "jax.devices(); runtime.available()"):
        code = (
            f"import jax; from kitsune_jax.targets.cpu import call as runtime; {order}; "
            "assert runtime.available(); print(jax.jit(abs)(-2))"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0 and result.stdout.strip() == "2", result.stderr
