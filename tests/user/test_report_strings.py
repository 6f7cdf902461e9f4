"""Whatever a name, a file or an error message holds, reports, logs and warnings are printable text, and HTML is escaped."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
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
