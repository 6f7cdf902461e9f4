"""The harness on tiny sizes: what it runs is what it says, and the table is what is stored."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import store, table
from benchmarks.__main__ import README, TABLES, documents, main
from benchmarks.apps import APPS, DTYPES, make_case
from benchmarks.columns import COLUMNS, block_rows, blocked
from benchmarks.graphs.apps import GRAPH_APPS
from benchmarks.machine import machine_slug
from benchmarks.measure import Effort, _thunks, first_call, max_relative_error, measure
from benchmarks.roofline import Ceilings, floor_seconds
from benchmarks.timing import interleaved, paired_speedup, rest, summary
from scripts import code_hashes, gpu_record

TINY = Effort(rounds=3, seconds=5.0)
EMPTY_TABLES = "".join(
    "\n".join(table.markers(name)) + "\n" for name in ("training", table.DEVICES, table.PLANS, "grid", table.SUMMARY, table.PEERS)
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("app", list(APPS))
@pytest.mark.parametrize("column", list(COLUMNS))
def test_every_column_computes_the_reference(app: str, column: str) -> None:
    case = make_case(app, "f32", 37)
    assert max_relative_error(case, COLUMNS[column](case.app.function)) < 1e-5


@pytest.mark.parametrize("app", list(APPS))
def test_bfloat16_stays_near_the_reference(app: str) -> None:
    case = make_case(app, "bf16", 64)
    assert case.x.dtype == jnp.bfloat16
    error = max_relative_error(case, COLUMNS["pipeline"](case.app.function))
    assert 1e-4 < error < 0.1  # bf16 has 8 bits: an error as small as float32's would mean that it was not used


def test_error_measure_sees_one_wrong_element() -> None:
    case = make_case("swiglu", "f32", 16)

    def wrong(params: Any, x: jax.Array) -> jax.Array:
        return case.app.function(params, x).at[3, 5].add(10.0)

    assert max_relative_error(case, wrong) > 1


@pytest.mark.parametrize("app", list(APPS))
def test_app_is_rowwise_and_sized_as_the_paper_says(app: str) -> None:
    case = make_case(app, "f32", 8)
    whole = case.app.function(case.params, case.x)
    part = case.app.function(case.params, case.x[3:5])
    np.testing.assert_allclose(whole[3:5], part, rtol=1e-4, atol=1e-5)
    assert (
        case.app.flops
        == {
            "nerf": 2 * (63 * 256 + 256 * 256 * 6 + (256 + 63) * 256 + 256 * 4),
            "mgn": 2 * (384 * 128 + 128 * 128),
            "swiglu": 2 * 3 * 512 * 1408,
        }[app]
    )


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (4096, 4096), (65_536, 4096), (200_000, 4000), (4099 * 2, 4096)])
def test_block_rows(rows: int, size: int) -> None:
    assert block_rows(rows) == size


@pytest.mark.parametrize("rows", [1, 4096, 8192, 8198])
def test_blocked_is_the_function_and_really_loops(rows: int) -> None:
    def function(w: float, x: jax.Array) -> jax.Array:
        return jnp.sin(x) * w

    x = jnp.linspace(0, 1, rows * 3).reshape(rows, 3)
    np.testing.assert_allclose(jax.jit(blocked(function))(2.0, x), 2 * np.sin(x), rtol=1e-5)
    jaxpr = str(jax.make_jaxpr(blocked(function))(2.0, x))
    assert "scan" in jaxpr
    assert ("concatenate" in jaxpr) == (rows == 8198)


def test_rounds_interleave_and_rotate() -> None:
    calls: list[str] = []

    def thunk(name: str) -> Any:
        def run() -> jax.Array:
            calls.append(name)
            return jnp.zeros(2)

        return run

    times = interleaved({n: thunk(n) for n in "abc"}, rounds=3, seconds=60, warmup=1)
    assert "".join(calls) == "abc" + "aabbcc" + "bbccaa" + "ccaabb"
    assert all(len(t) == 3 and min(t) > 0 for t in times.values())


def test_a_budget_ends_after_three_rounds() -> None:
    times = interleaved({"a": lambda: jnp.zeros(2)}, rounds=50, seconds=0.0)
    assert len(times["a"]) == 3


def test_results_are_deleted() -> None:
    kept: list[jax.Array] = []

    def run() -> jax.Array:
        kept.append(jnp.ones(4) + 1)
        return kept[-1]

    interleaved({"a": run}, rounds=2, seconds=60, warmup=1)
    assert len(kept) == 5
    assert all(a.is_deleted() for a in kept)


def test_memory_that_a_call_frees_late_is_not_the_next_ones() -> None:
    """As XLA's runtime does: work goes on in a thread when the result is ready."""
    busy = threading.Event()

    def leaves_work() -> jax.Array:
        def work() -> None:
            busy.set()
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass
            busy.clear()

        threading.Thread(target=work).start()
        return jnp.zeros(2)

    seen: list[bool] = []

    def looks() -> jax.Array:
        seen.append(busy.is_set())
        return jnp.zeros(2)

    interleaved({"a": leaves_work, "b": looks}, rounds=4, seconds=60, warmup=1)
    assert seen == [False] * 9


def test_threads_that_never_rest_are_waited_for_with_a_limit() -> None:
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    began = time.perf_counter()
    rest(0.1)
    waited = time.perf_counter() - began
    ends.set()
    thread.join()
    assert 0.1 <= waited < 5


def test_statistics() -> None:
    s = summary([4.0, 1.0, 3.0, 2.0, 10.0])
    assert (s["median"], s["min"], s["max"], s["q1"], s["q3"], s["n"]) == (3.0, 1.0, 10.0, 2.0, 4.0, 5)
    # The clock halves its speed in the second round; the ratio within each round does not care.
    assert paired_speedup([2.0, 4.0], [1.0, 2.0])["median"] == 2.0


@pytest.mark.slow
def test_first_call_compiles_anew_each_time() -> None:
    first = first_call(make_case("mgn", "f32", 64), repeats=1)
    for when in ("cold", "warm"):
        assert min(first[when]["jit"], first[when]["pipeline"]) > 1e-3
        assert first[when]["overhead"] == first[when]["pipeline"] - first[when]["jit"]


def test_run_store_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One real run through the command line, huge pages and first call in a process of their own."""
    results, readme = tmp_path / "results", tmp_path / "README.md"
    run = ["run", "--app", "mgn", "--dtype", "f32", "--rows", "256", "--rounds", "3", "--seconds", "1", "--results", str(results)]
    assert main(run) == 0
    (path,) = results.glob("*.json")
    store.save(json.loads(path.read_text())["cases"][0], results)  # replaces, does not append
    content = json.loads(path.read_text())
    assert path.name.startswith(machine_slug(content["machine"]))
    (record,) = content["cases"]
    assert set(record["columns"]) == {"jit", "blocked", "pipeline", "jit_hugepages", "pipeline_hugepages"}
    assert set(record["speedup"]) == {"jit", "blocked", "jit_hugepages"}
    assert record["versions"]["jax"] == jax.__version__
    assert 0 <= record["explain"]["coverage"] <= 1
    assert record["first_call"]["cold"]["pipeline"] > 0

    begin, end = table.markers("benchmarks")
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n{EMPTY_TABLES}")
    command = ["table", "--results", str(results), "--readme", str(readme), "--tables", str(readme)]
    assert main(command) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert "\nafter\n" in text
    assert "old" not in text
    assert f"{1e3 * record['columns']['pipeline']['median']:.1f} ms" in text
    assert f"float32 | {record['speedup']['jit']['median']:.2f}x |" in text
    assert main(command) == 0
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "model", "design"), [(25, 1, "zen-3-"), (25, 0x21, "zen-3-"), (25, 0x11, "zen-4-"), (26, 2, "zen-5-"), (23, 49, "")]
)
def test_cpus_of_one_name_are_told_apart_by_their_design(family: int, model: int, design: str) -> None:
    machine = {"cpu": "AMD EPYC", "cores": 2, "family": family, "model": model}
    assert machine_slug(machine) == f"amd-epyc-{design}2c"
    assert machine_slug({"cpu": "AMD EPYC", "cores": 2}) == "amd-epyc-2c"  # records of before tell no model


def test_newest_record_of_a_case_wins(tmp_path: Path) -> None:
    machine = {"cpu": "Some(R) CPU @ 2 GHz", "cores": 2}
    assert machine_slug(machine) == "some-2c"
    assert machine_slug({**machine, "isa": ["avx2", "amx_tile"]}) == "some-2c-amx"
    record = {"platform": "cpu", "app": "nerf", "mode": "infer", "rows": 8, "dtype": "f32"}
    for date, tag in (("2025-01-02", "new"), ("2025-01-01", "old")):
        other = {**record, "dtype": "bf16", "tag": tag} if tag == "old" else None
        cases = [{**record, "tag": tag}] + ([other] if other else [])
        (tmp_path / f"some-2c-{date}.json").write_text(json.dumps({"format": 1, "machine": machine, "date": date, "cases": cases}))
    ((_, records),) = store.newest(tmp_path)
    assert [(r["dtype"], r["tag"], r["date"]) for r in records] == [("f32", "new", "2025-01-02"), ("bf16", "old", "2025-01-01")]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        store.newest(tmp_path)


@pytest.mark.parametrize("part", [table.SUMMARY, table.PEERS, *table.PARTS, table.DEVICES, table.PLANS])
def test_documents_hold_the_tables_of_what_is_stored(part: str) -> None:
    wanted = {name: made for document in documents() for name, made in document.items()}
    assert _between_markers(README if part in (table.SUMMARY, table.PEERS) else TABLES, part) == wanted[part].strip()


def test_the_table_of_families_on_a_gpu_is_that_of_the_records() -> None:
    assert _between_markers(gpu_record.VERIFIED, gpu_record.FAMILIES) == gpu_record.families()


def test_the_table_of_families_tells_how_many_kernels_changed_since(tmp_path: Path) -> None:
    ran = {"family": "mlp", "dtype": "float32", "programs": 3, "right": 3}
    machine = {"gpu": {"name": "NVIDIA H200"}}
    record = {"format": store.FORMAT, "date": "2026-12-01", "commit": "abc", "machine": machine, "programs": [ran], "cases": []}
    (tmp_path / "h200" / "record-2026-12-01").mkdir(parents=True)
    (tmp_path / "h200" / "2026-12-01.json").write_text(json.dumps(record))
    assert gpu_record.families(tmp_path).splitlines()[-1].endswith("| - | - | 3 of 3 | ? |")
    before = {"cuda/mlp/float32/one": "1", "cuda/mlp/float32/two": "2", "cuda/loss/float32/one": "3"}
    found = gpu_record.changed(before, {"cuda/mlp/float32/one": "1", "cuda/mlp/float32/two": "4", "cuda/new/float32/one": "5"})
    assert found == {"mlp": {"kernels": 2, "changed": 1}, "loss": {"kernels": 1, "changed": 1}}
    (tmp_path / "h200" / "record-2026-12-01" / "changed.json").write_text(json.dumps({"families": found}))
    assert gpu_record.families(tmp_path).splitlines()[-1].endswith("| - | - | 3 of 3 | 1 of 2 |")


def test_a_kernel_is_another_one_if_a_header_behind_its_headers_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cuda" / "include" / "kitsune"
    folder.mkdir(parents=True)
    (folder / "a.h").write_text('#include "kitsune/b.h"\n')
    (folder / "b.h").write_text("one")
    monkeypatch.setattr(code_hashes, "__file__", str(tmp_path / "scripts" / "code_hashes.py"))
    source = b'#include "kitsune/a.h"\n#include <cuda.h>\n'
    before = code_hashes.with_headers(source)
    (folder / "b.h").write_text("two")
    assert code_hashes.with_headers(source) != before
    (folder / "b.h").write_text("one  // a comment\n\n")
    assert code_hashes.with_headers(source) == before


def _between_markers(path: Path, name: str) -> str:
    text, (begin, end) = path.read_text(), table.markers(name)
    return text[text.index(begin) + len(begin) : text.index(end)].strip()


def test_the_record_of_a_gpu_is_what_the_run_wrote() -> None:
    """Every number is the run's, losses included; what it did not measure has no entry."""
    kernel = {"kernel": "kitsune_region", "op": "", "details": "", "calls": 2.0, "us": 500.0}
    regions = [{"arrangement": "vertical", "seconds": 4e-4, "baseline": 9e-4}]
    pipeline = {"ms": 1.25, "min_ms": 1.0, "speedup": 0.8, "regions": regions, "coverage": 1.0, "differs_from_jit": 0.01}
    jit = {"ms": 1.0, "min_ms": 0.9, "speedup": 1.0}
    plan = {"modelled_ms": 0.4, "replicas": 132, "lanes": 3, "cubins": ["a.cubin"], "ms": 0.5, "min_ms": 0.4, "kernels": [kernel]}
    measured = {
        "about": {"nvidia_smi": "NVIDIA H200, 580.159.04, 1980 MHz, 1980 MHz, 700.00 W", "jax": "0.11.2", "jaxlib": "0.11.2"},
        "cases": {
            "gat f32 1000000": {"columns": {"pipeline": {**pipeline, "kernels": [kernel]}, "jit": jit}, "flops": 0.0},
            "train nerf bf16 262144": {"columns": {"pipeline": pipeline, "network": jit, "jit": jit}, "flops": 1.0},
            "plans mgn bf16 200000": {"columns": {"sm90-vertical-resident-lanes3 cluster1 stages1 split1": plan, "jit": jit}},
            "attention 4096 128 causal": {"columns": {"jit": {"error": "it did not run"}}, "flops": 1.0},
        },
        "torch": {"cases": {"nerf bf16 262144": {"eager_ms": 3.0, "train_eager_ms": 6.0}}, "gemm_tflops": 700.0},
        "correctness": {
            "mlp bfloat16 1 planned": {"ok": True, "equal_bits": True},
            "mlp bfloat16 333 sm90-vertical-resident-lanes1": {"ok": False, "error": "a hang"},
            "portable mlp bfloat16 1 planned": {"ok": True, "equal_bits": True},
        },
    }
    measured["about"] |= {"nvrtc": "13.0", "commit": "abc"}
    found = gpu_record.converted(measured, "2026-11-28")
    gat, train = found["cases"]
    assert (gat["app"], gat["mode"], train["app"], train["mode"]) == ("gat", "infer", "nerf", "train")
    assert gat["speedup"]["jit"]["median"] == pytest.approx(0.8)  # losses are kept
    assert gat["kernels"]["pipeline"] == [{"kernel": "kitsune_region", "calls": 2.0, "seconds": 5e-4}]
    assert train["columns"]["torch"] == {"median": 6e-3} and train["speedup"]["network"]["jit"]["median"] == 1.0
    (plans,) = found["plans"].values()
    assert (plans[0]["modelled"], plans[0]["kernel"], plans[0]["lanes"]) == (4e-4, 1e-3, 3)
    assert found["library"] == {"gemm_flops": 7e14} and found["machine"]["gpu"]["name"] == "NVIDIA H200"
    (mlp,) = found["programs"]
    assert (mlp["programs"], mlp["right"], mlp["outside"]) == (2, 1, ["mlp bfloat16 333 sm90-vertical-resident-lanes1"])


def test_a_column_that_no_record_of_a_gpu_has_is_left_out() -> None:
    machine = {"gpu": {"name": "NVIDIA H200", "driver_version": "580.1"}}
    record = {
        **{"title": "a", "rows": 8, "dtype": "f32", "mode": "infer", "date": "2026-11-26", "commit": "37c0be6", "modified": None},
        **{"columns": {"jit": {"median": 1e-3}, "pipeline": {"median": 2e-3}}, "speedup": {"jit": {"median": 0.5}}},
        **{"explain": {"coverage": 0.5, "regions": []}, "versions": {"jax": "0.11.2"}, "note": "while other processes compiled"},
    }
    text = table.devices([(machine, [record])])
    assert text.splitlines()[-3:] == [
        "| application | `jax.jit` | pipeline | vs `jax.jit` | modelled | operators pipelined |",
        "|---|---:|---:|---:|---:|---:|",
        "| a, 8 rows, float32 * | 1.000 ms | 2.000 ms | **0.50x** | left to XLA | 50 % |",
    ]
    assert "other processes used the device" in text


def test_the_summary_has_the_largest_size_of_each_application() -> None:
    """A column for each machine and mode; what was not measured there is told."""

    def record(title: str, rows: int, ratio: float, mode: str = "infer") -> dict[str, Any]:
        speedup: Any = {"jit": {"median": ratio}}
        return {
            "title": title,
            "rows": rows,
            "dtype": "f32",
            "mode": mode,
            "speedup": speedup if mode == "infer" else {"whole": speedup},
        }

    first = {"cpu": "Some(R) Processor", "cores": 2, "isa": ["avx2", "avx512f"]}
    second = {"cpu": "Other", "cores": 4, "isa": ["avx512f", "amx_tile"]}
    results = [(first, [record("a", 8, 3.0), record("a", 64, 2.0), record("b", 8, 1.25, "train")]), (second, [record("b", 8, 0.5)])]
    assert table.summary(results).splitlines() == [
        "| application | Some, 2 cores, AVX-512: inference | Some, 2 cores, AVX-512: training step "
        "| Other, 4 cores, AMX: inference |",
        "|---|---:|---:|---:|",
        "| a, float32 | 2.00x | - | - |",
        "| b, float32 | - | 1.25x | 0.50x |",
    ]


def test_markers_are_required(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("no markers")
    with pytest.raises(ValueError, match="needs one"):
        table.update(path, "x")


def test_names_agree() -> None:
    assert tuple(table.PARTS.values()) == store.MODE_NAMES
    assert tuple(APPS) == store.ROW_APP_NAMES
    assert tuple(GRAPH_APPS) == store.GRAPH_APP_NAMES
    assert tuple(DTYPES) == store.DTYPE_NAMES


def test_measure_without_a_child_needs_no_process() -> None:
    record = measure("mgn", "infer", "f32", "cpu", 128, TINY, child=False)
    assert set(record["columns"]) == set(COLUMNS)
    assert record["flops"] == 128 * APPS["mgn"].flops


def test_gpu_records_have_a_folder_and_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"cpu": "Some(R) CPU", "cores": 16, "isa": ["avx2"]}
    device = {**machine, "gpu": {"name": "NVIDIA H200", "driver_version": "580.1"}}
    assert (machine_slug(machine), machine_slug(device)) == ("some-16c", "h200")
    record = measure("mgn", "infer", "f32", "cpu", 64, TINY, child=False)
    monkeypatch.setattr(store, "describe_machine", lambda: machine)
    store.save(record, tmp_path)
    floors = {"model": {"machine": "h200", "seconds": 1e-9}, "measured": {"seconds": 2e-9}}
    columns = {c: {**record["columns"][c], "median": m} for c, m in (("jit", 4e-4), ("pipeline", 1e-4))}
    monkeypatch.setattr(store, "describe_machine", lambda: device)
    path = store.save({**record, "platform": "cuda", "columns": columns, "roofline": floors}, tmp_path)
    assert path.parent == tmp_path / "h200"
    text = table.markdown(store.newest(tmp_path))
    assert text.count("| application") == 2
    assert text.count("blocked by hand") == 1  # a column of CPUs only
    assert "NVIDIA H200, driver 580.1" in text
    assert "0.400 ms | 0.100 ms" in text


def test_calls_on_a_gpu_take_turns_with_their_rows() -> None:
    case = make_case("mgn", "f32", 32)
    seen: list[int] = []
    thunks = _thunks({"a": lambda params, x: seen.append(id(x))}, case, rotated_bytes=2 * case.x.nbytes)
    for _ in range(6):
        thunks["a"]()
    assert len(set(seen)) == 3
    assert seen[:3] == seen[3:]


def test_a_floor_is_arithmetic_or_bytes_whichever_is_longer() -> None:
    case = make_case("mgn", "f32", 1000)
    flops = 1000 * case.app.flops
    weights = sum(a.size for a in case.params.values())
    moved = 4 * (weights + 1000 * (384 + 128))
    assert floor_seconds(case, Ceilings(1e12, 1e30)) == flops / 1e12
    assert floor_seconds(case, Ceilings(1e30, 1e9)) == moved / 1e9


def test_a_missing_cuda_device_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--app", "mgn", "--platform", "cuda"]) == 2
    assert "not a cuda device" in capsys.readouterr().out
