"""``kj.timeline``: each tile once, on the same axis as XLA's events, in words; nothing is left behind."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.profiling import timeline as tl
from kitsune_jax.targets.cpu import call as cpu_call
from kitsune_jax.targets.cpu.bytecode import encode
from tests.cpu.test_program import arrays, two_layers

pytestmark = pytest.mark.skipif(not cpu_call.available(), reason="the extension is not built")
W, X = jnp.ones((32, 32)) / 32, jnp.arange(5003 * 32, dtype=jnp.float32).reshape(5003, 32) / 1e5


def layers(w: Any, x: Any) -> Any:
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return x


@pytest.fixture(scope="module")
def compiled() -> Any:
    f = jax.jit(kj.pipeline(layers, force=True))
    f(W, X).block_until_ready()
    return f


def test_each_tile_of_each_call_is_recorded_once(compiled: Any, tmp_path: pathlib.Path) -> None:
    want = compiled(W, X)
    with kj.timeline(tmp_path / "trace.json") as found:
        for _ in range(3):
            got = compiled(W, X).block_until_ready()
    np.testing.assert_array_equal(got, want)
    (region,) = kj.explain(layers, force=True)(W, X).regions
    kinds = collections.Counter(e.kind for e in found.events)
    assert kinds["call"] == 3 and found.dropped == 0
    tiles = collections.Counter((e.region, e.stage, e.number) for e in found.events if e.kind == "tile")
    assert set(tiles.values()) == {3}
    assert [number for _, _, number in sorted(tiles)] == list(range(region.tiles))
    for e in found.events:
        assert "region0" in e.region and "test_timeline.py" in e.region and e.begin <= e.end


def test_what_a_thread_does_does_not_overlap(compiled: Any, tmp_path: pathlib.Path) -> None:
    with kj.timeline(tmp_path / "trace.json") as found:
        compiled(W, X).block_until_ready()
    calls = [e for e in found.events if e.kind == "call"]
    assert len(calls) == 1
    by_thread = collections.defaultdict(list)
    for e in found.events:
        if e.kind != "call":
            # A thread that waits learns that the call has ended when it has.
            assert calls[0].begin <= (e.begin if e.kind == "wait" else e.end) <= calls[0].end and calls[0].begin <= e.begin
            by_thread[e.thread].append(e)
    for events in by_thread.values():
        assert all(first.end <= second.begin for first, second in zip(events, events[1:], strict=False))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_workers_and_xla_are_on_one_axis(compiled: Any, tmp_path: pathlib.Path, name: str) -> None:
    """XLA's event of the call has its name, and holds our call."""
    path = tmp_path / name
    with kj.timeline(path) as found:
        compiled(W, X).block_until_ready()
    assert found.with_xla
    read = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    events = [e for e in json.loads(read)["traceEvents"] if e.get("ph") == "X"]
    (ours,) = [e for e in events if e.get("cat") == "call"]
    (xla,) = [e for e in events if e["name"].startswith("kitsune_region0_test_timeline_py")]
    slack = 1000  # us
    assert xla["ts"] - slack <= ours["ts"] and ours["ts"] + ours["dur"] <= xla["ts"] + xla["dur"] + slack
    assert any(e["name"] == f"{e['args']['stage']} tile 0" for e in events if e.get("cat") == "tile")
    assert list(tmp_path.iterdir()) == [path]


def test_stages_and_their_queues(tmp_path: pathlib.Path) -> None:
    """A program of two stages, which the planner makes for no CPU: (stage, tile) once each, and the second after the first."""
    rows = 400
    program = two_layers(rows)
    inputs = arrays(rows)
    outputs = [np.zeros((rows, 40), np.float32), np.zeros(40, np.float32)]
    extension = cpu_call.extension()
    with kj.timeline(tmp_path / "trace.json") as found:
        extension.run(encode(program), inputs, outputs, 3)
    ran = {(e.stage, e.number): e for e in found.events if e.kind == "tile"}
    assert sorted(ran) == [(stage, tile) for stage in ("dense", "shift") for tile in range(rows // 16)]
    for tile in range(rows // 16):
        assert ran["dense", tile].end <= ran["shift", tile].begin
    for e in found.events:
        assert e.kind != "wait" or e.number in (-1, 0)
    assert any(e.kind == "prepare" for e in found.events) and any(e.kind == "combine" for e in found.events)


def event(kind: str, begin: float, end: float, thread: int = 0, stage: str = "", number: int = -1) -> tl.WorkerEvent:
    return tl.WorkerEvent(thread, begin, end, kind, "region0 (a.py:1)", stage, number)


def test_the_summary_says_where_the_time_went() -> None:
    events = (
        event("call", 0.0, 1.0),
        event("tile", 0.0, 0.5, stage="s3", number=0),
        event("wait", 0.5, 0.9, stage="s3", number=2),
        event("tile", 0.0, 1.0, thread=1, stage="s1", number=0),
        event("tile", 1.5, 2.0, thread=1, stage="s1", number=0),  # outside of the call
    )
    lines = tl.summary(tl.Timeline(pathlib.Path("x"), events))
    assert lines == [
        "region0 (a.py:1): 1 call of 1.00 s, 2 workers",
        "   50.0 %  tiles of stage s1",
        "   25.0 %  tiles of stage s3",
        "   20.0 %  stage s3 waits for queue 2",
        "    5.0 %  starting threads, taking jobs, memory",
    ]


def test_nothing_ran(tmp_path: pathlib.Path) -> None:
    with kj.timeline(tmp_path / "trace.json") as found:
        pass
    assert str(found) == "no pipeline call ran on the CPU inside of the timeline"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_events_beyond_the_most_are_counted() -> None:
    extension = cpu_call.extension()
    rows = 400
    outputs = [np.zeros((rows, 40), np.float32), np.zeros(40, np.float32)]
    extension.start_timeline(5)
    extension.run(encode(two_layers(rows)), arrays(rows), outputs, 1)
    names, events, dropped = extension.stop_timeline()
    assert len(tl.events_of(names, events, 0)) == 5 and dropped >= 2 * rows // 16 - 5
    assert extension.stop_timeline() == ([], b"", 0)
    extension.run(encode(two_layers(rows)), arrays(rows), outputs, 1)  # nobody asks
    assert extension.stop_timeline() == ([], b"", 0)


def test_errors_leave_nothing_behind(compiled: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError), kj.timeline(tmp_path / "no folder" / "trace.json"):
        pytest.fail("the block must not run")
    with kj.timeline(tmp_path / "a.json"):
        with pytest.raises(RuntimeError, match="end its with block"), kj.timeline(tmp_path / "b.json"):
            pytest.fail("the block must not run")
        compiled(W, X).block_until_ready()
    with pytest.raises(ZeroDivisionError), kj.timeline(tmp_path / "c.json") as found:
        compiled(W, X).block_until_ready()
        _ = 1 / 0
    assert any(e.kind == "tile" for e in found.events)  # the trace of a program that failed is wanted most
    assert json.loads((tmp_path / "c.json").read_text())["traceEvents"]


def test_the_users_own_trace_goes_on(compiled: Any, tmp_path: pathlib.Path) -> None:
    with jax.profiler.trace(str(tmp_path / "users")):
        with kj.timeline(tmp_path / "trace.json") as found:
            compiled(W, X).block_until_ready()
        compiled(W, X).block_until_ready()
    assert not found.with_xla and any(e.kind == "tile" for e in found.events)
    assert list((tmp_path / "users").rglob("*.xplane.pb"))


def test_a_worker_without_work_waits_for_a_queue() -> None:
    """The second stage waits for what the first one makes. Seldom no worker has to: so it is tried several times."""
    extension = cpu_call.extension()
    rows, k, n = 64, 512, 512
    outputs = [np.zeros((rows, n), np.float32), np.zeros(n, np.float32)]
    for _ in range(50):
        extension.start_timeline(1 << 16)
        extension.run(encode(two_layers(rows, k=k, n=n)), arrays(rows, k, n), outputs, 3)
        names, events, _ = extension.stop_timeline()
        waits = {(e.stage, e.number) for e in tl.events_of(names, events, 0) if e.kind == "wait"}
        assert waits <= {("shift", 0), ("dense", 0), ("", -1)}
        if ("shift", 0) in waits:
            return
    pytest.fail("no wait of the second stage for its queue was recorded")
