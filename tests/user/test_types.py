"""Types: strict type checkers accept a user's program and refuse wrong calls; completion shows the user's own function.

mypy reads the cache that ``make lint`` leaves; pyright runs where it is installed (``pip install pyright``; it needs Node).
"""

from __future__ import annotations

import inspect
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from tests.user import typing_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM, ERRORS = "tests/user/typing_program.py", "tests/user/typing_errors.py"


def refused(command: list[str], error: str) -> dict[str, set[int]]:
    """The lines with errors of each of the two programs. ``error``: a regular expression of a message: its file and its line."""
    done = subprocess.run([*command, PROGRAM, ERRORS], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    found: dict[str, set[int]] = {PROGRAM: set(), ERRORS: set()}
    for file, line in re.findall(error, done.stdout, re.MULTILINE):
        found[Path(file).relative_to(ROOT).as_posix() if Path(file).is_absolute() else file].add(int(line))
    assert done.returncode == 1, done.stdout + done.stderr  # the checker ran and found errors
    return found


def mypy() -> dict[str, set[int]]:
    pytest.importorskip("mypy", reason="`make lint` installs it")
    return refused([sys.executable, "-m", "mypy"], r"^(.+?):(\d+): error:")


def pyright() -> dict[str, set[int]]:
    program = shutil.which("pyright", path=Path(sys.executable).parent) or shutil.which("pyright")
    if program is None or shutil.which("node") is None:
        pytest.skip("needs pyright and Node: pip install pyright")
    return refused([program, "--pythonpath", sys.executable], r"^ *(.+?):(\d+):\d+ - error:")


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_type_checkers_accept_a_program_and_refuse_wrong_calls(checker: Any) -> None:
    lines = enumerate((ROOT / ERRORS).read_text().splitlines(), 1)
    assert checker() == {PROGRAM: set(), ERRORS: {number for number, line in lines if line.endswith("  # refused")}}


def test_the_typed_program_runs() -> None:
    typing_program.main()


def test_a_pipeline_shows_the_function_itself() -> None:
    layer = typing_program.layer
    assert layer.__doc__ == inspect.getdoc(layer) == "One layer."
    assert "One layer." in pydoc.render_doc(layer)
    assert str(inspect.signature(layer)) == str(inspect.signature(layer.__wrapped__))
    assert layer.__name__ == "layer" and layer.__module__ == typing_program.__name__


def test_explain_shows_the_function_itself() -> None:
    explained = kj.explain(typing_program.layer)
    assert explained.__doc__ == "One layer."
    assert inspect.signature(explained) == inspect.signature(typing_program.layer)
    assert explained.__wrapped__ is typing_program.layer


def test_completion_shows_the_public_names_alone() -> None:
    assert {name for name in dir(kj) if not name.startswith("__")} == set(kj.__all__)
    assert {"__doc__", "__version__"} <= set(dir(kj))
    assert all(hasattr(kj, name) for name in dir(kj))


def double(x: Any, by: Any = 2, *, name: str = "") -> Any:
    return {"y": jnp.sin(x) * by}


X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


@pytest.fixture(params=[False, True], ids=["on", "off"])
def switched(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the package, and with ``KITSUNE_DISABLE``."""
    with kj.config.override(disable=request.param):
        yield


@pytest.mark.usefixtures("switched")
@pytest.mark.parametrize("options", [{}, {"static_argnames": "by"}], ids=["arrays", "static"])
def test_shapes_traces_and_programs_are_those_of_jit(options: dict[str, Any]) -> None:
    ours, jits = kj.pipeline(double, **options), jax.jit(double, **options)
    assert ours.eval_shape(X, by=3) == jits.eval_shape(X, by=3) == {"y": X}
    assert ours.trace(X, by=3).out_info == jits.trace(X, by=3).out_info
    assert ours.trace(X, by=3).jaxpr.in_avals == jits.trace(X, by=3).jaxpr.in_avals
    assert ours.trace(X, by=3).lower().out_info == ours.lower(X, by=3).out_info == jits.lower(X, by=3).out_info
    assert ours.lower(X, by=3).args_info == jits.lower(X, by=3).args_info
    x = jnp.ones(X.shape)
    given = {} if options else {"by": 3}  # a compiled function takes no static arguments
    for compiled in (ours.trace(X, by=3).lower().compile(), ours.lower(X, by=3).compile()):
        assert jnp.allclose(compiled(x, **given)["y"], double(x, 3)["y"])


def test_leaves_that_are_not_arrays_are_static_in_traces() -> None:
    ours = kj.pipeline(double)
    assert ours.eval_shape(X, name="a") == {"y": X}
    assert ours.trace(X, name="a").out_info == {"y": X}
    x = jnp.ones(X.shape)
    for compiled in (ours.trace(X, name="a").lower().compile(), ours.lower(X, name="a").compile()):
        assert jnp.allclose(compiled([], [x])["y"], double(x)["y"])  # donated arrays, and the others


@pytest.mark.parametrize(("wrapper", "arguments"), [(jax.jit, {}), (kj.pipeline, {}), (kj.pipeline, {"name": "a"})])
def test_a_cleared_cache_traces_again(wrapper: Any, arguments: dict[str, str]) -> None:
    traces = 0

    def counted(x: Any, name: str = "") -> Any:
        nonlocal traces
        traces += 1
        return jnp.sin(x)

    fn = wrapper(counted)
    x = jnp.ones(X.shape)
    counts = []
    for clear in (False, False, True, False):
        if clear:
            fn.clear_cache()
        fn(x, **arguments)
        counts.append(traces)
    assert counts == [1, 1, 2, 2]


def test_explain_without_arguments_says_how_it_is_called() -> None:
    words = "call it with arguments: explain(double)(*args)"
    assert words in str(kj.explain(double)) and words in repr(kj.explain(kj.pipeline(double)))
    with pytest.raises(TypeError, match=re.escape(words)):
        kj.explain(double, X)  # type: ignore[arg-type]
    assert "explain(fn)(*args)" in str(kj.explain(lambda x: x))


@pytest.mark.parametrize(("device", "platform"), [("h200", "cuda"), ("l4", "cuda"), ("h100-114-227", "cuda"), ("zen5-2", "cpu")])
def test_a_device_alone_means_its_platform(device: str, platform: str) -> None:
    report = kj.explain(double, device=device)(X)
    assert (report.platform, report.machine) == (platform, device)


def test_a_device_that_is_not_known_is_told_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="device='tpu' is not known: GPUs are h200, .*a100, .*zen5, ") as error:
        kj.explain(double, device="tpu")
    assert "platform" not in str(error.value)


@pytest.mark.parametrize(
    ("device", "near"), [("h2000", "h200"), ("H10", "h100"), ("zen6-8", "zen5-8"), ("zen4", "zen4-3"), ("avx-16", "avx2-16")]
)
def test_the_nearest_device_is_named(monkeypatch: pytest.MonkeyPatch, device: str, near: str) -> None:
    monkeypatch.setenv("KITSUNE_NUM_THREADS", "3")
    for options in ({}, {"platform": "cpu"}, {"platform": "cuda"}):
        with pytest.raises(ValueError, match=rf"device='{device}' is not known \(did you mean '{near}'\?\)"):
            kj.explain(double, device=device, **options)
    kj.explain(double, device=near)


@pytest.mark.parametrize(("device", "platform", "other"), [("h200", "cpu", "cuda"), ("zen5-2", "gpu", "cpu")])
def test_a_device_of_another_platform_is_refused(device: str, platform: Any, other: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' is one of platform='{other}', not of '{platform}'"):
        kj.explain(double, device=device, platform=platform)
