"""``python -m kitsune_jax``: what each command prints, its exit status, and messages instead of tracebacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import config, progress
from kitsune_jax.cli import bench, bugreport, doctor, folder, functions, output
from kitsune_jax.cli.main import main
from kitsune_jax.frontend import lowering
from kitsune_jax.targets.cpu import call
from kitsune_jax.targets.cpu.profile import store
from kitsune_jax.targets.cuda import runtime

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import dataclasses
import jax, jax.numpy as jnp
import kitsune_jax as kj

@dataclasses.dataclass
class Config:  # needs the module in sys.modules
    width: int = 16

SECRET = jnp.asarray([98765.0, 43210.0] * 8)

def mlp(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w) + SECRET
    return x

def mlp_args():
    return jnp.ones((16, 16)) / 16, jnp.ones((4096, 16))

pipelined = kj.pipeline(mlp, force=True)

def step(w, x):
    return jax.grad(lambda w: pipelined(w, x).sum())(w)

jitted = jax.jit(step)

def named(activation, x):
    return getattr(jnp, activation)(x) * 2

class Layer:
    @staticmethod
    def apply(x):
        return x + 1

def Layer_apply_args():
    return jnp.ones(3)

def broken(w, x):
    return x @ jnp.ones((3, 3))

ARGS = jnp.ones((16, 16)) / 16, jax.ShapeDtypeStruct((4096, 16), "float32")
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's file. Its module and its folder on ``sys.path`` are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "folder of ada" / "model.py"
    path.parent.mkdir()
    path.write_text(MODEL)
    yield path
    for name, module in [*sys.modules.items()]:
        if str(path.parent) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path / "cache"))


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints; it succeeds, and says nothing on stderr."""
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "kitsune_jax", "cache", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and json.loads(done.stdout)["kinds"].keys() == {"cuda", "profiles", "choices"}


# -- a function and its arguments


@pytest.mark.parametrize(
    ("name", "expression", "shapes"),
    [
        ("mlp", None, [(16, 16), (4096, 16)]),  # mlp_args()
        ("step", None, [(16, 16), (4096, 16)]),  # ARGS
        ("mlp", "(SECRET, jnp.ones((2, 3)))", [(16,), (2, 3)]),
        ("mlp", "np.ones(3)", [(3,)]),  # no tuple: the only argument
        ("Layer.apply", None, [(3,)]),
    ],
)
def test_where_arguments_come_from(model: Path, name: str, expression: str | None, shapes: list[tuple[int, ...]]) -> None:
    found = functions.load(f"{model}:{name}", expression)
    assert [a.shape for a in found.args] == shapes and callable(found.function) and found.name == f"model.py:{name}"


def test_what_a_file_prints_is_no_part_of_the_output(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text("print('loud')\ndef f(x): print('traced'); return x + 1\ndef f_args(): print('args'); return 1.0")
    assert main(["explain", f"{model}:f", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ops_total"] == 1 and {*err.split()} == {"loud", "args", "traced"}


def test_a_file_may_be_called_as_a_module_that_is_imported(model: Path) -> None:
    path = model.with_name("json.py")
    path.write_text("def f(x): return x\nARGS = 1.0")
    assert functions.load(f"{path}:f", None).args == (1.0,) and sys.modules["json"] is json


@pytest.mark.parametrize(
    ("named", "args", "told"),
    [
        ("model.py", [], "not of the form FILE:FUNCTION"),
        ("nowhere.py:f", [], "there is no file .*nowhere.py"),
        ("model.py:mpl", [], "has no function mpl; did you mean mlp?"),
        ("model.py:SECRET", [], "SECRET in model.py is no function"),
        ("model.py:broken", [], r"line \d+: TypeError: dot_general"),
        ("model.py:mlp", ["--args", "1 / 0"], "--args cannot be evaluated: ZeroDivisionError"),
        ("model.py:mlp", ["--args", "jnp.ones(3)"], "TypeError: mlp.. missing 1 required positional argument"),
        ("text.txt:f", [], "its name must end in .py"),
        ("fails.py:f", [], "fails.py cannot be executed: line 2: NameError: name 'y'"),
        ("syntax.py:f", [], "syntax.py cannot be executed: SyntaxError"),
        ("bare.py:f", [], r"says no arguments for f: define f_args\(\) or ARGS in it, or give --args EXPR"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "bench"])
def test_wrong_use_is_a_message(
    model: Path, capsys: pytest.CaptureFixture[str], command: str, named: str, args: list[str], told: str
) -> None:
    for name, text in (("text.txt", "f"), ("fails.py", "x = 1\ny"), ("syntax.py", "def"), ("bare.py", "def f(x): return x")):
        model.with_name(name).write_text(text)
    assert main([command, str(model.with_name(named)), *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.search(told, err) and "Traceback" not in err and err.startswith(f"python -m kitsune_jax {command}: ")


@pytest.mark.parametrize("argv", [[], ["dance"], ["explain"], ["report", "model.py:f"], ["bench", "model.py:f", "--seconds", "0"]])
def test_a_wrong_command_line_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and "usage: python -m kitsune_jax" in capsys.readouterr().err


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "sizes", interrupted)
    monkeypatch.setattr(progress, "_patience", progress._patience)
    assert main(["cache"]) == 130 and progress._patience == 0.0
    assert capsys.readouterr().err == "python -m kitsune_jax cache: interrupted\n"


# -- explain


def test_explain_is_the_report(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = functions.load(f"{model}:mlp", None)
    report = kj.explain(found.function)(*found.args)
    assert shown(capsys, "explain", f"{model}:mlp") == f"{report}\n"
    assert shown(capsys, "explain", f"{model}:mlp", "--verbose") == f"{report.text(verbose=True)}\n"
    assert json.loads(shown(capsys, "explain", f"{model}:mlp", "--json")) == json.loads(json.dumps(report.to_dict()))


def test_explain_plans_for_a_gpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(shown(capsys, "explain", f"{model}:mlp", "--platform", "cuda", "--device", "h200", "--json"))
    assert told["platform"] == "cuda" and "h200" in told["machine"]


# -- bench


def test_bench_times_both_and_compares_them(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(shown(capsys, "bench", f"{model}:pipelined", "--seconds", "0.01", "--json", "--args", "mlp_args()"))
    assert told["calls"] >= 5 and told["error"] < 1e-5 and told["speed"] == told["jit"]["median"] / told["pipeline"]["median"]
    for times in (told["jit"], told["pipeline"]):
        assert 0 < times["lower"] <= times["median"] <= times["upper"] and times["median"] < times["first"]
    assert re.fullmatch(r"(\d+) of \1 operators of 1 pipelined call inside of it", told["how"])


def test_bench_turns_pipelines_off_for_jit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those inside of the function, though it was traced with them before."""
    has_calls, compiled = [], bench._compiled

    def watched(function: Any, arrays: Any) -> Any:
        has_calls.append("kitsune_cpu" in jax.jit(function).lower(*arrays).as_text())
        return compiled(function, arrays)

    monkeypatch.setattr(bench, "_compiled", watched)
    bench.measure(functions.load(f"{model}:jitted", None), 0.01)
    assert has_calls == [False, True]


def test_bench_takes_leaves_that_are_no_arrays(model: Path) -> None:
    found = bench.measure(functions.load(f"{model}:named", "('tanh', jnp.ones(8))"), 0.01)
    assert found.error == 0.0


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
        ([np.nan, 1.0], [np.nan, 2.0], 0.5),
        ([np.nan], [1.0], np.inf),
        ([np.inf], [-np.inf], np.inf),
        ([0.5], [0.0], 0.5),
        ([], [], 0.0),
    ],
)
def test_errors_are_of_the_largest_element(ours: list[float], theirs: list[float], error: float) -> None:
    assert bench._error([jnp.asarray(ours)], [jnp.asarray(theirs)]) == pytest.approx(error)


def test_shapes_become_arrays() -> None:
    shapes = (jax.ShapeDtypeStruct((3,), "bfloat16"), {"n": jax.ShapeDtypeStruct((2,), "int32")}, "word")
    x, rest, word = functions.with_arrays(shapes)
    assert x.dtype == "bfloat16" and np.std(np.asarray(x, "float32")) > 0 and not rest["n"].any() and word == "word"


# -- cache


def test_cache_counts_and_clears_its_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    (cache / "cuda").mkdir(parents=True)
    (cache / "cuda" / "kernel.cubin").write_bytes(b"x" * 1000)
    (cache / "cuda" / "link").symlink_to(tmp_path / "elsewhere")
    (cache / "holiday.jpg").touch()
    (tmp_path / "elsewhere").touch()
    assert re.search(r"compiled kernels +1  1.00 kB", shown(capsys, "cache"))
    assert main(["cache", "clear"]) == 2 and "give --yes" in capsys.readouterr().err and (cache / "cuda" / "kernel.cubin").exists()
    assert "removed: 1 file\n" in shown(capsys, "cache", "clear", "--yes")
    assert not (cache / "cuda" / "kernel.cubin").exists() and (cache / "holiday.jpg").exists() and (tmp_path / "elsewhere").exists()
    assert json.loads(shown(capsys, "cache", "--json"))["kinds"]["cuda"] == {"what": "compiled kernels", "files": 0, "bytes": 0}


# -- doctor


def test_doctor_finds_nothing_broken_here(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "doctor")
    assert config.__version__ in told and call.isa() in told and "zen5-2, shipped" in told
    assert json.loads(shown(capsys, "doctor", "--json"))["versions"]["jax"] == jax.__version__


def problem(capsys: pytest.CaptureFixture[str], status: int) -> dict[str, Any]:
    """The only problem that ``doctor`` finds."""
    assert main(["doctor", "--json"]) == status
    (found,) = json.loads(capsys.readouterr().out)["problems"]
    assert found["broken"] == bool(status) and found["advice"]
    return dict(found)


def test_doctor_without_the_extension(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(call, "_state", (None, "it is half built"))
    found = problem(capsys, 1)
    assert "half built" in found["problem"] and "pip install" in found["advice"]
    assert main(["doctor"]) == 1 and "BROKEN: no pipelines on the CPU: it is half built" in capsys.readouterr().out


def test_doctor_of_a_cache_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert "other users can write" in problem(capsys, 1)["problem"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("KITSUNE_DISABLE", "maybe", "KITSUNE_DISABLE='maybe' is not a switch: set it to 1 or 0"),
        ("KITSUNE_TUNE", "fast", "KITSUNE_TUNE='fast' is not known: use on, off, all"),
        ("KITSUNE_PROFILE", "zen9", "KITSUNE_PROFILE='zen9' is no profile: use <family> or <family>-<cores>, such as zen5"),
        ("KITSUNE_NUM_THREADS", "0", "KITSUNE_NUM_THREADS='0' is not a positive integer"),
    ],
)
def test_a_wrong_value_of_a_variable_is_told_in_a_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["explain", f"{model}:mlp"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"python -m kitsune_jax explain: {told}") and err.count("\n") == 1
    assert main(["doctor", "--json"]) == 1
    (found,) = [p for p in json.loads(capsys.readouterr().out)["problems"] if p["broken"]]
    assert found["problem"].startswith(told) and found["advice"] == f"correct {name}, or unset it"
    assert main(["doctor"]) == 1 and re.search(rf"{name} +{value}\n", capsys.readouterr().out)


def test_a_wrong_value_of_a_variable_does_not_keep_the_command_from_starting() -> None:
    """The package checks them when it is imported, which is before the command begins."""
    variables = {**os.environ, "KITSUNE_TUNE": "fast", "KITSUNE_FORCED": "1"}
    command = [sys.executable, "-m", "kitsune_jax", "cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m kitsune_jax cache: KITSUNE_TUNE='fast' is not known: use on, off, all\n"
    variables["KITSUNE_TUNE"] = "off"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=variables)
    assert done.returncode == 0 and done.stdout
    assert done.stderr.startswith("python -m kitsune_jax: the environment variable KITSUNE_FORCED has no effect")
    assert done.stderr.count("\n") == 1


def test_doctor_of_a_variable_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KITSUNE_FORCED", "1")
    assert problem(capsys, 0)["advice"] == "did you mean KITSUNE_FORCE?"


def test_doctor_of_a_gpu_that_jax_does_not_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"name": "H200", "compute_capability": 90, "multiprocessors": 132, "shared_bytes": 232448}
    info = {"version": 13000, "devices": [{**device, "l2_bytes": 50 << 20, "clock": 1.7e9, "memory_bandwidth": 4.8e12}]}
    monkeypatch.setattr(runtime, "driver_info", lambda: info)
    monkeypatch.setattr(doctor.targets.get("cuda"), "why_not", lambda: "", raising=False)
    assert "pip install 'jax[cuda13]'" in problem(capsys, 0)["advice"]
    told = shown(capsys, "doctor")
    assert "CUDA 13.0" in told and "compute capability 9.0, 132 multiprocessors" in told


def test_doctor_says_what_of_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("KITSUNE_PROFILE")
    assert "not measured yet" in shown(capsys, "doctor") and not (config.cache_dir() or Path()).exists()
    kept = store.profiles.shipped("zen5-2")
    monkeypatch.setattr(
        store, "measure", lambda workers: store.dataclasses.replace(kept, doubtful=(("touch", 1.5),), measured_at=1e9)
    )
    store.stored(config.num_threads(), again=True)
    assert re.search(r"zen5-2, measured 2001-09-0\d .*: \d+ of \d+ numbers so far, 1 of them doubtful", shown(capsys, "doctor"))


# -- report


def test_a_report_has_what_a_bug_needs_and_no_data(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_DUMP", "/home/ada lovelace/dumps")
    written = tmp_path / "report.md"
    assert "report.md is written" in shown(capsys, "report", f"{model}:mlp", "--output", str(written))
    told = written.read_text()
    for wanted in ("Function: model.py:mlp", jax.__version__, "KITSUNE_PROFILE", "dot_general", "tanh", "lambda", "JAX_DUMP"):
        assert wanted in told
    for private in ("98765", "43210", "ada", str(tmp_path), str(Path.home())):
        assert private not in told


@pytest.mark.expects_fallbacks
def test_a_report_has_the_tracebacks_of_fallbacks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("planted")

    monkeypatch.setattr(lowering, "capture", planted)
    told = bugreport.text(functions.load(f"{model}:mlp", None))
    assert "FallbackWarning: kitsune_jax could not pipeline" in told
    assert re.search(r"## Parts that fell back.*KeyError: 'planted'.*Traceback.*File \"lowering.py\"", told, re.DOTALL)


def test_a_report_of_a_function_that_fails_has_its_traceback(model: Path) -> None:
    told = bugreport.text(functions.load(f"{model}:broken", None))
    assert "TypeError: dot_general" in told and 'File "model.py"' in told and str(model.parent) not in told


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("at /usr/lib/python3/x.py:12", "at x.py:12"),
        ("--xla_dump_to=/tmp/ada/dumps,--other", "--xla_dump_to=dumps,--other"),
        ("~/models/a.py", "a.py"),
        ("13.4 us/tile, 5 GB/s, a / b, 1/2, f32[2]/f32[2]", "13.4 us/tile, 5 GB/s, a / b, 1/2, f32[2]/f32[2]"),
        ("https://docs.jax.dev/page", "https://docs.jax.dev/page"),
        ("file:///home/ada/x.py", "file://x.py"),
    ],
)
def test_of_a_path_the_last_part_stays(text: str, want: str) -> None:
    assert bugreport.without_paths(text) == want


# -- output


def test_a_terminal_gets_tables_of_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    table = output.Table("sizes", [("[red]a", "1"), ("b", "22")], ("name", "size"), right=(1,))
    output.show_tables([table, output.Table("empty", [])])
    plain = capsys.readouterr().out
    assert plain == "sizes\n  name    size\n  [red]a     1\n  b         22\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    output.show_tables([table])
    told = capsys.readouterr().out
    assert "[red]a" in told and told != plain


def test_a_terminal_without_rich_gets_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    output.show_text("a\x1b[31mb")
    assert capsys.readouterr().out == "a\\x1b[31mb\n"
