"""``kj.timeline(..., kernels=True)``: stamped kernels in the emulator and their machine code; clocks; nothing where it is off."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kitsune_jax.profiling import kernel_timeline as kt
from kitsune_jax.profiling import timeline as tl
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc, runtime
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from tests.cuda.test_sass import COMPLAINT
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_run import Kernel, arrangements, by_hand, called, kernel_cache, subject, tiled
from tests.support.phases import clipped
from tests.support.programs import lstm

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("kernel_cache"),
    pytest.mark.filterwarnings("error:kitsune_jax could not"),  # a failure of ours that falls back is a failure here
]

ROWS = 401  # 7 tiles of 64 rows, the last with 17
TILES, STAGES = 7, 8
W = tuple(jax.random.normal(jax.random.key(k), (32, 32)) / 8 for k in range(4))
X = jax.random.normal(jax.random.key(9), (ROWS, 32))


def layers(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def emulated(f: Callable[..., Any]) -> Any:
    return jax.jit(kj.pipeline(f, force=True, strict=True, target="emulator"))


def recorded(path: pathlib.Path, f: Any, *args: Any) -> tuple[tl.Timeline, Any]:
    """The timeline of one call, and its results."""
    with kj.timeline(path / "trace.json", kernels=True) as found:
        got = jax.block_until_ready(f(*args))
    return found, got


def lanes_of(events: Iterable[kt.KernelEvent]) -> dict[tuple[int, int, int], list[kt.KernelEvent]]:
    found = collections.defaultdict(list)
    for e in events:
        if e.kind != "kernel":
            found[e.launch, e.cta, e.lane].append(e)
    return found


def check_tracks(found: tl.Timeline) -> None:
    """What a lane does is in its launch, and begins when what it did before has ended; waits for queues are in its tiles."""
    launches = {e.launch: e for e in found.kernels if e.kind == "kernel"}
    assert sorted(launches) == list(range(len(launches)))
    for (launch, _, _), events in lanes_of(found.kernels).items():
        for e in events:
            assert launches[launch].begin <= e.begin <= e.end <= launches[launch].end
        work = [e for e in events if e.kind != "queue"]
        waits = [e for e in events if e.kind == "queue"]
        for own in (work, waits):
            own = [e for e in own if e.end > e.begin]  # the emulator's clock stands still between two points of its schedule
            assert all(first.end <= second.begin for first, second in zip(own, own[1:], strict=False))
        for wait in waits:
            assert any(e.kind == "tile" and e.begin <= wait.begin and wait.end <= e.end for e in work)


def in_stages(path: pathlib.Path, arrangement: str) -> tuple[tl.Timeline, list[np.ndarray], Any]:
    """The timeline of ``layers`` as one kernel with a stage for each operator; the results without and with it; the plan."""
    of = subject(lambda x, *ws: layers(ws, x), X, *W)
    plan = arrangements(of)[arrangement]
    assert len(plan.stages) == STAGES
    (want,) = Kernel(of, plan)()
    with kj.timeline(path / "trace.json", kernels=True) as found:
        (got,) = Kernel(of, plan)()
    return found, [want, got], plan


@pytest.mark.parametrize("arrangement", ["sm90-spatial-l2-lanes1", "sm90-spatial-cluster-lanes1", "sm80-spatial-l2-lanes2"])
def test_each_stage_runs_each_tile_once_and_waits_for_its_own_queues(arrangement: str, tmp_path: pathlib.Path) -> None:
    """A stage for each of eight operators, with a queue between each two; equal ones run the same code."""
    found, (want, got), plan = in_stages(tmp_path, arrangement)
    np.testing.assert_array_equal(got, want)
    (kernel,) = [e for e in found.kernels if e.kind == "kernel"]
    assert kernel.region == "region" and kernel.device == kt.EMULATOR
    tiles = collections.Counter((e.stage, e.number) for e in found.kernels if e.kind == "tile")
    assert tiles == {(stage, tile): 1 for stage in range(STAGES) for tile in range(TILES)}
    waits = collections.Counter((e.stage, e.number) for e in found.kernels if e.kind == "queue")
    ends = {(stage, queue) for queue, q in enumerate(plan.queues) for stage in (q.producer, *q.consumers)}
    assert len(plan.queues) == STAGES - 1 and waits == dict.fromkeys(ends, TILES)
    ended = {}  # the wait of each tile for each queue
    for lane, events in lanes_of(found.kernels).items():
        order = [e.number for e in events if e.kind == "tile"]
        for queue in range(STAGES - 1):
            own = [e for e in events if e.kind == "queue" and e.number == queue]
            ended |= {(e.stage, queue, tile): (e.end, lane) for tile, e in zip(order, own, strict=False)}
    for queue, q in enumerate(plan.queues):
        for tile in range(TILES):
            written, read = ended[q.producer, queue, tile], ended[q.consumers[0], queue, tile]
            assert written[0] <= read[0] and written[1] != read[1]  # room to write comes before something to read
    assert found.dropped_records == found.unstamped == 0
    check_tracks(found)
    text = str(found)
    assert "region in the emulator: 1 call of" in text and "stage 3 waits for queue 2 in " in text
    assert "stage 0 waits for queue 1" not in text
    shares = [float(line.split(" in ")[-1].split(" %")[0]) for line in text.splitlines() if line.startswith("  stage 3 ")]
    assert 99 < sum(shares) < 100.2


def test_the_trace_has_kernels_beside_xlas_events(tmp_path: pathlib.Path) -> None:
    """The emulator's clock is the host's: XLA's event of the call holds the kernel's first moment. The function was compiled
    before, and is compiled again."""
    f = emulated(layers)
    want = f(W, X)
    found, got = recorded(tmp_path, f, W, X)
    np.testing.assert_array_equal(got, want)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    ours = [e for e in events if e.get("ph") == "X" and names.get(e["pid"]) == "kitsune_jax kernels in the emulator"]
    assert len(ours) == len(found.kernels)
    assert {e["name"] for e in ours} >= {f"stage 0 tile {tile}" for tile in range(TILES)}
    (kernel,) = [e for e in ours if e["cat"] == "kernel"]
    assert "region0" in kernel["name"] and "test_kernel_timeline.py" in kernel["name"]
    (xla,) = [e for e in events if e.get("ph") == "X" and e["name"].startswith("kitsune_region0_test_kernel_timeline_py")]
    assert xla["ts"] - 1000 <= kernel["ts"] <= xla["ts"] + xla["dur"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert {tracks[e["pid"], e["tid"]] for e in ours} >= {"launches", "CTA 0 lane 0"}


def test_a_scan_of_a_kernel_that_streams_its_weights(tmp_path: pathlib.Path) -> None:
    """Each step is a launch of its own, with each tile once; waits for the ring of weights are in the tiles."""

    def steps(ws: Any, x: Any) -> Any:
        step = kj.pipeline(layers, force=True, target="emulator")
        return jax.lax.scan(lambda x, _: (step(ws, x), None), x, None, length=3)[0]

    f = jax.jit(steps)
    found, got = recorded(tmp_path, f, W, X)
    np.testing.assert_array_equal(got, f(W, X))
    tiles = collections.Counter((e.launch, e.stage, e.number) for e in found.kernels if e.kind == "tile")
    assert tiles == {(launch, 0, tile): 1 for launch in range(3) for tile in range(TILES)}
    assert not any(e.kind == "queue" for e in found.kernels)
    streamed = [e for e in found.kernels if e.kind in ("tile", "idle")]
    assert len(streamed) > len(tiles)  # two lanes share the ring, so the one without a tile in the last round takes part
    assert all(0 <= e.weights <= e.end - e.begin for e in streamed) and any(e.weights > 0 for e in streamed)
    assert "stage 0 waits for weights in " in str(found) and "3 calls of" in str(found)
    check_tracks(found)


def test_phases_and_sums(tmp_path: pathlib.Path) -> None:
    """Four phases of several parts: lanes wait for all others between two phases, and some add up sums."""
    case = clipped(77, 27)
    operands = case.operands(np.random.default_rng(3))
    asked = tuple(by_hand(part.program, 900, 2, 2) for part in case.program.parts)
    made = lower.generate_call_kernel(tiled(case.program), asked, "program", stamped=True)
    code = lower.emulated_code(made, "program")
    with kj.timeline(tmp_path / "trace.json", kernels=True) as found:
        got = called(case.program, *operands, code=code)
    assert max(case.errors(got, operands)) < 4e-3
    phases = sorted({part.phase for part in case.program.parts})
    work = [e for e in found.kernels if e.kind in ("tile", "combine")]
    assert sorted({e.phase for e in work}) == phases == [0, 1, 2, 3] and any(e.kind == "combine" for e in work)
    for events in lanes_of(found.kernels).values():
        waits = [e for e in events if e.kind == "phase"]
        assert [e.number for e in waits] == phases[:-1]
        for e in events:
            if e.kind in ("tile", "combine"):
                assert all(wait.end <= e.begin if wait.number < e.phase else e.end <= wait.begin for wait in waits)
    assert "lanes wait for the end of a phase in " in str(found) and "stage 0 of phase 1 works on tiles in " in str(found)


def test_a_loop_over_a_cluster_waits_for_columns_of_other_ctas(tmp_path: pathlib.Path) -> None:
    """Both CTAs of the cluster run each of the three tiles, and hand over columns in each of its steps."""
    case = lstm(131, 3, 9, 64, "bfloat16")
    operands, program = case.operands(np.random.default_rng(5)), tiled(case.program).only
    assert program is not None
    asked = dataclasses.replace(by_hand(program, 900, 1, 1), spatial=True, cluster=2, split=(2,))
    made = lower.generate_kernel(program, asked, "program", stamped=True)
    code = lower.emulated_code(made, "program")
    with kj.timeline(tmp_path / "trace.json", kernels=True) as found:
        got = called(case.program, *operands, code=code)
    assert max(case.errors(got, operands)) < 2e-2
    work = [e for e in found.kernels if e.kind == "tile"]
    assert sorted((e.cta, e.number) for e in work) == [(cta, tile) for cta in range(2) for tile in range(3)]
    assert all(0 < e.columns <= e.end - e.begin for e in work)
    assert "stage 0 waits for columns of other CTAs in " in str(found)
    check_tracks(found)


def test_records_without_room_are_counted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = emulated(layers)
    whole, want = recorded(tmp_path, f, W, X)
    chunks = len(lanes_of(whole.kernels))
    monkeypatch.setattr(tl, "_MOST_CHUNKS", chunks - 1)  # of one lane there is no record
    found, got = recorded(tmp_path, f, W, X)
    np.testing.assert_array_equal(got, want)
    assert len(lanes_of(found.kernels)) == chunks - 1 and found.dropped_records > 0 == whole.dropped_records
    line = f"{found.dropped_records} records of kernels are missing: there was no more room on the device"
    assert str(found).splitlines()[-1] == line


def test_nothing_is_stamped_outside(tmp_path: pathlib.Path) -> None:
    """Before a block that records kernels and behind it, the source is the same and nothing is compiled again."""
    made, traced = list[str](), list[bool]()

    def f(w: Any, x: Any) -> Any:
        traced.append(runtime.stamps())
        return jnp.tanh(x @ w)

    real = compilers.emulated

    def seen(source: str, sm: int) -> bytes:
        if source != lower.PACKER:
            made.append(source)
        return real(source, sm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilers, "emulated", seen)
        jitted, other = emulated(f), emulated(lambda w, x: f(w, x) + 1)
        jitted(W[0], X).block_until_ready()
        with kj.timeline(tmp_path / "trace.json") as found:
            jitted(W[0], X).block_until_ready()
        assert found.unstamped == 1 and "1 call of GPU kernels without a record" in str(found) and not found.kernels
        plain = len(made), len(traced)
        assert plain[0] == 1 and set(traced) == {False}
        for _ in range(2):
            with kj.timeline(tmp_path / "trace.json", kernels=True) as found:
                jitted(W[0], X).block_until_ready()
            assert found.kernels
        assert len(made) == 2 and set(traced[plain[1] :]) == {True}
        both = len(traced)
        jitted(W[0], X).block_until_ready()
        assert len(made) == 2 and len(traced) == both
        other(W[0], X).block_until_ready()
    assert ["kitsune/timeline.h" in source for source in made] == [False, True, False]
    assert all("timeline" not in source and "stamp" not in source.lower() for source in (made[0], made[2]))


def test_a_program_compiled_before_is_told(tmp_path: pathlib.Path) -> None:
    compiled = emulated(layers).lower(W, X).compile()
    found, _ = recorded(tmp_path, compiled, W, X)
    assert found.unstamped == 1 and not found.kernels
    assert "1 call of GPU kernels without a record of their inside: compile functions in a block with kernels=True" in str(found)


# --- clocks ---------------------------------------------------------------------------------------------------------------------


def chunk(worker: int, opened: int, closed: int, clock: Callable[[int], int], records: list[tuple[int, int, int, int]]) -> Any:
    """A chunk as a kernel writes it. ``records``: begin and end in cycles, the kind of record, its number."""

    def pair(cycle: int) -> list[int]:
        return [cycle & 0xFFFFFFFF, cycle >> 32, clock(cycle) & 0xFFFFFFFF, clock(cycle) >> 32]

    rows = [[3 + len(records), 0, 0, worker], pair(opened), pair(closed)]
    rows += [[begin & 0xFFFFFFFF, end & 0xFFFFFFFF, kind << 24, number] for begin, end, kind, number in records]
    return np.array(rows + [[0] * 4] * (32 - len(rows)), np.uint32)


def test_cycles_become_nanoseconds_of_a_clock_that_ticks_each_microsecond() -> None:
    """Twenty SMs, each with cycles of its own near the end of 32 bits, at 1.755 GHz; since 1970 the clock has counted 1.7e18."""
    start, rate, lanes = 1_700_000_000_000_000_000, 1.755, range(20)
    chunks = []
    for lane in lanes:
        shift = (1 << 32) * (lane + 1) - 40_000  # the lower word wraps in the second tile

        def clock(cycle: int, shift: int = shift, lane: int = lane) -> int:
            return (start + 137 * lane + int((cycle - shift) / rate)) // 1000 * 1000

        tiles = [(shift + 30_000 * k + 100, shift + 30_000 * k + 29_000, 0, k) for k in range(3)]
        chunks.append(chunk(lane << 8, shift, shift + 90_000, clock, tiles))
    found = kt.recorded_of((0, bytes(4096), np.stack(chunks).tobytes(), 0), [b"region0"])
    tiles = [e for e in found.events if e.kind == "tile"]
    assert len(tiles) == 60
    for e in tiles:
        true = start + 137 * e.cta + (30_000 * e.number + 100) / rate
        assert abs(e.begin + found.zero_ns - true) < 1100
        assert e.end - e.begin == pytest.approx(28_900 / rate, rel=0.01)


def test_kernels_are_laid_beside_xlas_events() -> None:
    """The third and the fifth of XLA's kernels have stamps. The first launch fits in the first of them too, the second does not."""
    launches = [(1_000.0, 51_000.0), (151_000.0, 281_000.0)]
    lengths = {69e6: 60_000, 70e6: 30_000, 70.1e6: 52_000, 70.2e6: 8_000, 70.25e6: 132_000}
    kernels = [(begin, begin + length) for begin, length in lengths.items()]
    offset = kt.offset_of(launches, kernels)
    assert offset is not None and abs(offset - 70.1e6) < 1_000
    assert kt.offset_of(launches, []) is None and kt.offset_of([(0.0, 1e6)], kernels) is None


def test_events_of_a_device_are_on_xlas_axis_and_without_them_end_with_the_block() -> None:
    event = kt.KernelEvent(1, "region0", 0, -1, -1, 500.0, 40_500.0, "kernel")
    found = kt.Recorded(1, 10**18, (event,), 0, 3_000_000)
    pids = {1: 100.0, 2: 200.0, 11: 300.0}  # of GPUs 0, 1 and 10: when the kernel began
    meta: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"/device:GPU:{pid - 1} Chip"}} for pid in pids
    ]
    meta += [{"ph": "M", "pid": pid, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7(Compute)"}} for pid in pids]
    runs = [{"ph": "X", "pid": pid, "tid": 7, "ts": ts, "dur": 42.0, "name": "kitsune_region"} for pid, ts in pids.items()]
    (e,) = kt.on_axis(found, 1_000_000, [*meta, *runs])
    assert e.begin == pytest.approx(201e-6) and e.end == pytest.approx(241e-6)
    (e,) = kt.on_axis(found, 1_000_000, [])
    assert e.end == pytest.approx(2e-3) and e.end - e.begin == pytest.approx(40e-6)


# --- machine code ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("arrangement", ["sm90-vertical-streamed-cluster2-lanes2", "sm90-spatial-cluster-lanes1"])
def test_stamps_cost_no_spill_and_no_product(arrangement: str) -> None:
    """NeRF's kernel: every product is as asynchronous with stamps as without, and nothing lives in local memory."""
    of = subject(FAMILIES["nerf"].function, *FAMILIES["nerf"].shapes(2000, "bfloat16"))
    plan = arrangements(of)[arrangement]
    program = of.program(plan)
    codes = []
    for stamped in (False, True):
        made = lower.generate_kernel(program, arrangement_of(plan, program), "region", stamped=stamped)
        result = compilers.cubin(made.source, "sm_90a")
        code = sass.disassemble(result.cubin, "kitsune_region")
        assert not code.has_local_memory and sass.resources(result.log, result.cubin).spill_bytes == 0
        assert not [line for line in result.log.splitlines() if COMPLAINT.search(line)]
        codes.append(code)
    for opcode in ("HGMMA.", "WARPGROUP.DEPBAR", "SYNCS.PHASECHK"):
        assert codes[0].count(opcode) == codes[1].count(opcode)
    assert codes[1].count("CS2R") > codes[0].count("CS2R") + 10  # clocks
