"""Whatever a name, a file or an error message holds, reports, logs and warnings are printable text, and HTML is escaped."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax import config
from kitsune_jax.frontend import lowering
from kitsune_jax.report.data import Rejected

HOSTILE = "\x1b[31mred\x07\u202e<script>alert(1)</script>&"


def _hostile_function() -> Any:
    """A function whose name and file hold escape sequences, HTML and a bidirectional override."""
    code = compile(
        "def f(x, w):\n    return jnp.fft.fft(jnp.tanh(x @ w)).real\n", f"/nowhere/{HOSTILE.replace('/', '-')}.py", "exec"
    )
    scope: dict[str, Any] = {"jnp": jnp}
    exec(code, scope)
    f = scope["f"]
    f.__code__ = f.__code__.replace(co_name=HOSTILE, co_qualname=HOSTILE)
    f.__name__ = f.__qualname__ = HOSTILE
    return f


def _printable(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def test_escape_characters_do_not_reach_the_report(caplog: pytest.LogCaptureFixture) -> None:
    report = kj.explain(_hostile_function(), force=True)(jnp.ones((16, 8)), jnp.ones((8, 8)))
    text, page, stored = str(report), report._repr_html_(), json.dumps(report.to_dict(), ensure_ascii=False)
    assert all(map(_printable, (text, page, stored)))
    assert r"\x1b[31mred\x07\u202e" in text
    assert "<script" not in page and "&lt;script&gt;" in page
    with caplog.at_level("DEBUG", logger="kitsune_jax"):
        jax.jit(kj.pipeline(_hostile_function(), force=True)).lower(jnp.ones((16, 8)), jnp.ones((8, 8)))
    assert "pipelined" in caplog.text and _printable(caplog.text)


def test_names_and_reasons_of_any_kind_are_written_out() -> None:
    report = kj.explain(lambda x, w: jnp.tanh(x @ w), force=True)(jnp.ones((16, 8)), jnp.ones((8, 8)))
    hostile = HOSTILE + "\ud800"  # half a character, as in a file name that is not UTF-8
    rejected = Rejected(f"op {hostile}", f"line {hostile}", f"two\nlines\tand {hostile}")
    report = dataclasses.replace(
        report,
        rejected=(rejected,),
        notes=(f"note {hostile}",),
        obstacles=(f"because {hostile}",),
        machine=hostile,
        platform=hostile,
    )
    text, page = str(report), report._repr_html_()
    assert _printable(text) and _printable(page) and "<script" not in page
    assert "two lines and" in text.replace("\n", " ")
    assert max(map(len, text.split("\n"))) <= 120


def test_the_name_of_a_primitive_is_escaped() -> None:
    primitive = jax.extend.core.Primitive(f"mine {HOSTILE}")
    primitive.def_abstract_eval(lambda x: x)
    report = kj.explain(lambda x: primitive.bind(jnp.tanh(x)), force=True)(jnp.ones((16, 8)))
    assert any(r"mine \x1b[31m" in r.op and r.op in r.reason for r in report.rejected)
    assert all(map(_printable, (str(report), report._repr_html_(), json.dumps(report.to_dict(), ensure_ascii=False))))


@pytest.mark.expects_fallbacks
def test_escape_characters_do_not_reach_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError(HOSTILE)

    lowering._routed.cache_clear()
    monkeypatch.setattr(lowering, "route", broken)
    with pytest.warns(RuntimeWarning, match="kitsune_jax could not") as told:
        jax.jit(kj.pipeline(_hostile_function(), force=True)).lower(jnp.ones((16, 8)), jnp.ones((8, 8)))
    assert _printable(str(told[0].message))
    assert all(_printable(f.function) and _printable(f.reason) for f in kj.fallbacks())


# --- cells of notebooks -----------------------------------------------------------------------------------------------------------

CELLS = (
    "import jax, jax.numpy as jnp, kitsune_jax as kj",
    "def mlp(w, x):\n    return jnp.sort(jnp.tanh(x @ w), 0)\n",
    """
w, x = jnp.ones((16, 8)), jnp.ones((512, 16))
fn = kj.pipeline(mlp, force=True)
report = kj.explain(fn)(w, x)
jax.block_until_ready(fn(w, x))
with kj.timeline("trace.json") as found:
    jax.block_until_ready(fn(w, x))
chains = kj.profile(mlp, batches=(), repeats=1)(w, x).chains
shown = {
    "text": str(report),
    "page": report._repr_html_(),
    "timeline": " ".join({e.region for e in found.events}),
    "profile": " ".join({line for c in chains for line in c.sources}),
}
calls = open("trace.json").read()
""",
)


def test_lines_of_a_notebook_are_those_of_its_cells(tmp_path: Path) -> None:
    """IPython names the code of a cell by a hash, which no reader knows."""
    pytest.importorskip("IPython")
    script = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {CELLS!r}:
    shell.run_cell(cell, store_history=True).raise_error()
names = shell.user_ns
for what, text in names["shown"].items():
    assert "cell [2]:2 (mlp)" in text and "ipython" not in text.lower(), (what, text)
assert "kitsune_region0_cell_2_2" in names["calls"]
"""
    variables = {
        **os.environ,
        "IPYTHONDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
    }
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_without_cells_a_line_is_that_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        initialized = instance = staticmethod(lambda: 1 / 0)

    module = types.ModuleType("IPython.core.interactiveshell")
    for attributes in ({}, {"InteractiveShell": Odd}):
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert config.shown_file("/tmp/ipykernel_5/123.py") == "123.py"
