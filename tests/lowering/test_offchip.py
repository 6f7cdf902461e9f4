"""Counting off-chip bytes, without valgrind: what is read from its files, the arithmetic, and which steps are counted."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import offchip, store, table
from kitsune_jax import config
from tests.support import checks

EVENTS = "Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw ILdmr DLdmr DLdmw"


def dump(summary: str, totals: str | None = None, events: str = EVENTS) -> str:
    """As callgrind writes it."""
    head = f"# callgrind format\nversion: 1\ncmd: python\nevents: {events}\nsummary: {summary}\n"
    return f"{head}fn=(1) step\n12 3 4\ntotals: {totals or summary}\n"


def column(loss: float, missed: int, written_back: int, modelled: int) -> dict[str, Any]:
    counted = {"read": missed // 2, "written": missed - missed // 2, "written_back": written_back, "missed": missed}
    return {"loss": loss, "modelled": modelled, "counted": counted}


def test_lines_are_counted_by_what_moved_them() -> None:
    counts = offchip.parse(dump("1000 500 300 7 60 50 2 30 20 1 4 8"))
    assert counts == offchip.Counts(read=64 * 32, written=64 * 20, written_back=64 * 13)
    assert counts.missed == 64 * 52


def test_zeros_that_callgrind_leaves_out_are_zeros() -> None:
    assert offchip.parse(dump("1000 500 300 7 60 50 2 30")) == offchip.Counts(read=64 * 32, written=0, written_back=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (dump("1 2 3", events="Ir Dr Dw"), "--cache-sim=yes"),
        (dump("1 2 3 4 5 6 7 8 9", events="Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw"), "ILdmr, DLdmr, DLdmw"),
        (f"events: {EVENTS}\nsummary: 5 4 3 2 1 1 1 1 1 1 1 1\n", "no totals"),
        ("", "not a file of callgrind"),
    ],
)
def test_a_file_without_the_events_is_an_error(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        offchip.parse(text)


def test_events_booked_under_each_others_names_do_not_change_the_sum() -> None:
    summary, totals = "90 80 70 6 5 4 33 9554 4358 7 2509 1992", "91 80 63 7 5 4 956 9552 3437 630 2509 1369"
    counts = offchip.parse(dump(summary, totals))
    assert counts == offchip.Counts(read=64 * (33 + 9554), written=64 * 4358, written_back=64 * (7 + 2509 + 1992))


def test_a_summary_that_the_costs_contradict_is_an_error() -> None:
    with pytest.raises(ValueError, match="counting was stopped"):
        offchip.parse(dump("90 80 70 6 5 4 33 9554 4358 7 2509 1992", "90 80 70 6 5 4 33 9354 4358 7 2509 1992"))


def test_caches_are_whole_powers_of_two_of_sets() -> None:
    assert offchip.cache_options(2 << 20) == ["--I1=32768,8,64", "--D1=32768,8,64", "--LL=2097152,16,64"]
    for size in (0, 1000, 3 << 20, (2 << 20) + 64):
        with pytest.raises(ValueError, match="power of two"):
            offchip.cache_options(size)


def test_savings_are_shares_of_what_jit_moves() -> None:
    got = offchip.summarise({"jit": column(0.5, 1000, 800, 2000), "pipeline": column(0.5, 250, 600, 100)})
    assert got == pytest.approx({"counted": 0.75, "counted_written_back": 0.25, "modelled": 0.95})


def test_columns_of_different_losses_are_not_compared() -> None:
    with pytest.raises(ValueError, match="losses differ"):
        offchip.summarise({"jit": column(0.5, 1000, 800, 2000), "pipeline": column(0.501, 250, 600, 100)})


def test_without_valgrind_nothing_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offchip.main(["--valgrind", str(tmp_path / "none"), "--results", str(tmp_path)]) == 2
    assert "install valgrind" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", ["jit", "pipeline"])
def test_the_second_step_is_what_is_counted(name: str, tmp_path: Path) -> None:
    """A gate that only writes down its calls stands in for valgrind's."""
    calls = "".join(f"void count_{word}(void) {{ calls[used++] = '{word[2]}'; }}\n" for word in ("start", "dump", "stop"))
    (tmp_path / "gate.c").write_text(f"char calls[16];\nstatic int used;\n{calls}")
    gate = tmp_path / "gate.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "gate.c"), "-o", str(gate)], check=True)
    with config.override(force=True):  # so few rows would be left to XLA
        found = offchip.child(name, 61, gate)
    assert ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(gate)), "calls"))) == b"ammo"
    function, args = offchip.value_and_gradient(61)
    assert found["loss"] == pytest.approx(float(jax.jit(function)(*args)[0]), rel=1e-5)
    assert found["modelled"] > 0


def test_both_columns_are_what_they_are_called() -> None:
    function, args = offchip.value_and_gradient(61)
    with config.override(force=True):
        text = {name: offchip.compiled(name, function, args).as_text() for name in ("jit", "pipeline")}
    assert {name: checks.count(t) > 0 for name, t in text.items()} == {"jit": False, "pipeline": True}


def test_stored_savings_follow_from_the_stored_counts() -> None:
    record = offchip.newest()
    assert record["reduction"] == pytest.approx(offchip.summarise(record["columns"]))
    for found in record["columns"].values():
        assert found["counted"]["missed"] == found["counted"]["read"] + found["counted"]["written"]


def test_the_counter_sees_a_copy_of_known_size() -> None:
    copy = offchip.newest()["columns"]["copy"]
    assert copy["modelled"] == 2 * offchip.COPY_BYTES
    assert copy["counted"]["missed"] == pytest.approx(copy["modelled"], rel=0.01)


def test_the_page_shows_the_newest_record() -> None:
    begin, end = table.markers("offchip")
    inside = offchip.DOCUMENT.read_text().split(begin)[1].split(end)[0]
    assert inside.strip() == offchip.markdown(offchip.newest()).strip()


def test_counts_are_no_timings(tmp_path: Path) -> None:
    (tmp_path / "offchip-x-2020-01-01.json").write_text(json.dumps({"format": offchip.FORMAT, "date": "2020-01-01"}))
    assert store.newest(tmp_path) == []
    assert offchip.newest(tmp_path)["date"] == "2020-01-01"
