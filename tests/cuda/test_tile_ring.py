"""Inputs through a ring of tiles that all lanes of a CTA share: results in the emulator at awkward shapes, planted bugs, the choice
of arrays and entries, and the machine code."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_model
from kernel_checks import sass
from kernel_checks.lint import flow, in_flight, skipped
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import layout, lower, nvrtc, tiles
from kitsune_jax.targets.cuda.arrangement import arrangement_of, kind_of
from kitsune_jax.targets.cuda.planning import planner
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.machines import H200
from kitsune_jax.targets.cuda.planning.planner import candidates
from reference.interpret import interpret
from tests.support.checks import in_float64
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_compilers import COMPILERS, folder_of
from tests.support.cuda_run import Kernel, arrangements, by_hand, kernel_cache, runner, subject
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROW = ((0,), ())
Made = tuple[TileProgram, list[np.ndarray]]


def numbers(*shape: int, dtype: str, share: float = 1.0) -> np.ndarray:
    """Small integers, of which a ``share`` is not 0: their sums are exact in every dtype."""
    rng = np.random.default_rng(len(shape) + shape[-1])
    return (rng.integers(-1, 2, shape) * (rng.random(shape) < share)).astype(jnp.dtype(dtype))


def edge_update(rows: int, widths: tuple[int, ...], dtype: str, hidden: int = 64) -> Made:
    """relu(x W) V + x[:, :hidden] of inputs side by side, the first of which is added to the result."""
    t = Tiles((rows,), tiles.TILE_ROWS)
    xs = [t.load((rows, n), dtype, ROW) for n in widths]
    w, v = t.load((sum(widths), hidden), dtype), t.load((hidden, widths[0]), dtype)
    h = t.matmul(t.concat(*xs, dimension=1) if len(xs) > 1 else xs[0], w)
    h = t.op("max", h, t.broadcast(t.literal(0.0, dtype), (hidden,), ()))
    t.store(t.op("add", t.matmul(h, v), t.again(0)), (rows, widths[0]), ROW)
    arrays = [numbers(rows, n, dtype=dtype) for n in widths]
    weights = [numbers(sum(widths), hidden, dtype=dtype, share=0.05), numbers(hidden, widths[0], dtype=dtype, share=0.1)]
    return t.program(), [*arrays, *weights]


def check(made: Made, seeds: range = range(3), **how: Any) -> None:
    program, arrays = made
    run, want = runner(program, *arrays, **how), interpret(program, arrays)
    for seed in seeds:
        for g, w in zip(run(seed), want, strict=True):
            np.testing.assert_array_equal(g, w, err_msg=f"seed {seed}")


def generated(program: TileProgram, lanes: int = 2, resident: bool = True) -> str:
    return lower.generate_kernel(program, by_hand(program, 900, lanes, 1, resident), "program").source


def ring(source: str) -> tuple[int, int] | None:
    """(entries, bytes of one) of the ring that a kernel has."""
    found = re.search(r"TileRing<(\d+), (\d+), kLanes> tiles", source)
    return found and (int(found[1]), int(found[2]))  # type: ignore[return-value]


# --- Results ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "rows, widths, dtype, lanes, resident",
    [
        (1, (64,), "bfloat16", 2, True),
        (63, (64, 40), "float16", 3, True),
        (64, (160,), "bfloat16", 1, False),
        (65, (72, 64), "float32", 2, True),
        (131, (64, 64, 64), "bfloat16", 3, False),
        (1021, (64,), "bfloat16", 3, True),  # sixteen tiles through a ring of twelve entries, by one CTA
        (1021, (128, 96), "float32", 2, False),
        (1021, (384,), "bfloat16", 3, True),  # two entries for three lanes
        (1021, (128, 256), "float16", 3, True),  # a residual that is kept in registers
        (130, (256, 128), "bfloat16", 2, True),  # one that is read from memory again
    ],
)
def test_rows_come_through_the_ring(rows: int, widths: tuple[int, ...], dtype: str, lanes: int, resident: bool) -> None:
    made = edge_update(rows, widths, dtype)
    assert ring(generated(made[0], lanes, resident)) is not None
    check(made, lanes=lanes, resident=resident, replicas=1)


@pytest.mark.parametrize("rows", [1, 67, 131])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_columns_of_boxes_are_read_beside_products(rows: int, dtype: str) -> None:
    """Single columns, in either box, and columns from a third of a box on."""
    rng = np.random.default_rng(rows)
    x, w = (jax.device_put(np.asarray(rng.standard_normal(s) * s[1] ** -0.5, dtype)) for s in ((rows, 192), (192, 64)))

    def function(x: Any, w: Any) -> Any:
        return jax.nn.relu(x @ w) * x[:, 67:68] + x[:, 33:97] * x[:, 5:6] + x[:, 128:]

    of = subject(function, x, w)
    kernel = Kernel(of, arrangements(of)["sm90-vertical-resident-lanes2"])
    source = kernel.code.kernel.source
    assert "BoxSource" in source and "box_address(ring0_row[0], 67)" in source
    want = in_float64(function, x, w)
    for seed in range(3):
        assert np.abs(kernel(seed=seed)[0].astype(np.float64) - want).max() < 2e-2 * np.abs(want).max()


@pytest.mark.parametrize("replicas", [1, 3])
def test_tiles_of_a_lane_may_be_consecutive(replicas: int) -> None:
    """Sums by sorted indices: a lane at the end of the stream has fewer tiles than others, whose entries come after."""
    rows = 64 * 7 + 5
    t = Tiles((rows,), tiles.TILE_ROWS)
    x, w = t.load((rows, 64), "bfloat16", ROW), t.load((64, 32), "bfloat16")
    t.sink_at(t.matmul(x, w, out="float32"), t.load((rows,), "int32", ((0,),)), "sum", 9, "float32", ids_sorted=True)
    index = np.sort(np.random.default_rng(0).integers(0, 9, rows)).astype(np.int32)
    made = t.program(), [numbers(rows, 64, dtype="bfloat16"), numbers(64, 32, dtype="bfloat16"), index]
    source = generated(made[0], 3)
    assert ring(source) is not None and "static_cast<i64>(rounds) + i / kLanes" in source
    check(made, lanes=3, replicas=replicas)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 131, 523])
def test_clusters_share_weights_and_not_tiles(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    shapes = ((rows, 96), (96, 128), (128, 96))
    args = [jax.device_put(np.asarray(rng.standard_normal(s) * s[0] ** -0.5, dtype)) for s in shapes]
    of = subject(lambda x, w, v: jax.nn.relu(x @ w) @ v + x, *args)
    plan = arrangements(of)["sm90-vertical-streamed-cluster2-lanes2"]
    kernel = Kernel(of, plan)
    assert ring(kernel.code.kernel.source) is not None
    want = in_float64(lambda x, w, v: jax.nn.relu(x @ w) @ v + x, *args)
    for seed in range(3):
        (got,) = kernel(seed=seed)
        assert np.abs(got.astype(np.float64) - want).max() < 2e-2 * np.abs(want).max()


# --- Planted bugs -----------------------------------------------------------------------------------------------------------------

_RELEASE = "    tiles.rd_release(entry);\n"
# JAX raises the one or the other, depending on when the call fails.
FAILED = (jax.errors.JaxRuntimeError, ValueError)
_BUGS = {
    "a read before the tile is there": (lambda s: s.replace("    tiles.rd_acquire(entry);\n", ""), "written|in flight|race"),
    "the wrong parity": (lambda s: s.replace("rd_acquire(entry)", "rd_acquire(entry + 2)"), "nothing has written|in flight|race"),
    "an entry that is free before all have read": (
        lambda s: s.replace(_RELEASE, "").replace("    tiles.rd_acquire(entry);\n", f"    tiles.rd_acquire(entry);\n{_RELEASE}"),
        "race",
    ),
    "no release": (lambda s: s.replace(_RELEASE, ""), "deadlock"),
    "fewer bytes expected than come": (
        lambda s: s.replace("tiles.begin(i, tile, kRows, 768)", "tiles.begin(i, tile, kRows, 512)"),
        "race|written|in flight|deadlock|bytes",
    ),
    "more bytes expected than come": (
        lambda s: s.replace("tiles.begin(i, tile, kRows, 768)", "tiles.begin(i, tile, kRows, 784)"),
        "deadlock",
    ),
}


_BOX_BUGS = {
    "a read before the boxes are there": (_BUGS["a read before the tile is there"][0], "written|in flight|race"),
    "boxes that are free before the product has read them": (
        lambda s: re.sub(r"(    product_\w+\.commit\(\);\n)", rf"\1{_RELEASE}", s.replace(_RELEASE, ""), count=1),
        "race|in flight",
    ),
    "fewer bytes of boxes expected than come": (
        lambda s: s.replace("tiles.begin(i, tile, kRows, 0, 49152)", "tiles.begin(i, tile, kRows, 0, 40960)"),
        "race|written|in flight|deadlock|bytes",
    ),
    "no bytes of boxes expected": (
        lambda s: s.replace("tiles.begin(i, tile, kRows, 0, 49152)", "tiles.begin(i, tile, kRows, 0)"),
        "race|written|in flight|deadlock|bytes",
    ),
    "boxes where the swizzle's pattern does not begin": (
        lambda s: s.replace("tiles.fetch_boxes(i, 0, ", "tiles.fetch_boxes(i, 128, "),
        "not aligned to 1024 bytes",
    ),
}


@pytest.mark.parametrize("bug", [*_BUGS, *_BOX_BUGS])
def test_the_emulator_finds_a_planted_bug(bug: str) -> None:
    program, arrays = edge_update(300, (384,), "bfloat16") if bug in _BOX_BUGS else edge_update(300, (192,), "float32")
    change, message = {**_BUGS, **_BOX_BUGS}[bug]
    source = generated(program)
    assert change(source) != source
    with pytest.raises(FAILED, match=message):
        run = runner(program, *arrays, lanes=2, change=change)
        for seed in range(8):
            run(seed)


@pytest.mark.parametrize(
    "planted",
    [
        ("kInBoxes", "kInRing"),  # a residual that is read as if its rows had no swizzle
        ("{ring0_boxes}", "{ring0_boxes + 128}"),  # a product that begins at the second row, with another pattern
        ("tile, 2);", "tile + 1, 2);"),  # the boxes of another tile
    ],
)
def test_numbers_tell_boxes_that_are_read_in_another_way(planted: tuple[str, str]) -> None:
    program, arrays = edge_update(300, (128, 256), "bfloat16")
    source = generated(program)
    assert source.replace(*planted) != source
    run, want = runner(program, *arrays, lanes=2, change=lambda s: s.replace(*planted)), interpret(program, arrays)
    assert not np.array_equal(run(0)[0], want[0])


def test_lanes_share_no_full_barrier() -> None:
    """Two entries for three lanes: the third lane would take the first one's barrier, which has not been passed, for passed."""
    program, arrays = edge_update(300, (384,), "bfloat16")
    shared = "TileRing<2, 49152, kLanes>"
    assert shared in generated(program, 3)
    run = runner(program, *arrays, lanes=3, change=lambda s: s.replace(shared, "TileRing<2, 49152, 1>"))
    with pytest.raises(FAILED, match="written|in flight|race"):
        for seed in range(40):
            run(seed)


def test_streamed_weights_need_an_entry_for_each_lane() -> None:
    """One lane's weights wait for another lane, whose tile waits for the entry of the first: with an entry less it hangs."""
    t, rows = Tiles((300,), tiles.TILE_ROWS), 300
    x = t.load((rows, 128), "bfloat16", ROW)
    first = t.matmul(x, t.load((128, 256), "bfloat16"))
    h = t.op("max", first, t.broadcast(t.literal(0.0, "bfloat16"), (256,), ()))
    for _ in range(2):
        h = t.matmul(h, t.load((256, 256), "bfloat16"))
    t.store(h, (rows, 256), ROW)
    arrays = [numbers(*s, dtype="bfloat16", share=0.05) for s in ((rows, 128), (128, 256), (256, 256), (256, 256))]
    program = t.program()
    entries, _ = ring(generated(program, 2, resident=False)) or (0, 0)
    assert entries >= 2

    def fewer(source: str) -> str:
        # The one entry is also held until the lane has multiplied with all weights.
        source = source.replace(f"TileRing<{entries}, ", "TileRing<1, ")
        at = source.index("  }\n}\n\nKITSUNE_DEVICE void load0")
        return source[:at].replace(_RELEASE, "") + _RELEASE + source[at:]

    with pytest.raises(FAILED, match="deadlock"):
        runner(program, *arrays, lanes=2, resident=False, change=fewer)(0)


def test_lanes_that_multiply_gradients_together_need_an_entry_each() -> None:
    """They meet before x is read for the last time, which one of three cannot do while the others hold the two entries."""
    t, rows = Tiles((300,), tiles.TILE_ROWS), 300
    x, g = t.load((rows, 64), "bfloat16", ROW), t.load((rows, 32), "bfloat16", ROW)
    t.matmul_sink(t.matmul(x, t.load((64, 32), "bfloat16")), g)
    t.store(t.matmul(x, t.load((64, 32), "bfloat16")), (rows, 32), ROW)
    program, shapes = t.program(), ((rows, 64), (rows, 32), (64, 32), (64, 32))
    arrays = [numbers(*s, dtype="bfloat16", share=0.1) for s in shapes]
    entries, size = ring(generated(program, 3)) or (0, 0)
    assert entries >= 3
    check((program, arrays), lanes=3)

    def fewer(source: str) -> str:
        return source.replace(f"TileRing<{entries}, {size}", f"TileRing<2, {size}")

    with pytest.raises(FAILED, match="deadlock"):
        runner(program, *arrays, lanes=3, change=fewer)(0)


# --- The choice -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "widths, dtype, expected",
    [
        ((64,), "bfloat16", (64 * 64 * 2,)),
        ((128, 128, 128), "bfloat16", (64 * 384 * 2,)),
        ((32,), "bfloat16", None),  # rows of 64 bytes lie side by side in the accesses of a warp
        ((36,), "bfloat16", None),  # a pitch that is no multiple of 16 bytes
        ((100,), "float16", None),
        ((20,), "float32", (64 * 20 * 4,)),
        ((18,), "float32", None),
    ],
)
def test_wide_rows_of_whole_pieces_have_a_ring(widths: tuple[int, ...], dtype: str, expected: tuple[int] | None) -> None:
    found = ring(generated(edge_update(300, widths, dtype)[0]))
    assert (found and found[1:]) == expected


@pytest.mark.parametrize(
    "widths, dtype, lanes, boxes",
    [
        ((64,), "bfloat16", 2, ["BoxSource<Bf16, 64>"]),
        ((128, 256), "float16", 3, ["BoxSource<F16, 128>", "BoxSource<F16, 256>"]),
        ((64, 40), "float16", 2, ["BoxSource<F16, 64>"]),  # the other comes in rows, to the same entry
        ((96,), "bfloat16", 2, []),  # half of the second box would be empty
        ((128,), "float32", 2, []),  # tf32 is rounded on the way
    ],
)
def test_tensor_maps_bring_whole_boxes(widths: tuple[int, ...], dtype: str, lanes: int, boxes: list[str]) -> None:
    program, _ = edge_update(300, widths, dtype)
    made = lower.generate_kernel(program, by_hand(program, 900, lanes, 1), "program")
    assert re.findall(r"BoxSource<\w+, \d+>", made.source) == boxes
    assert made.source.count("TensorMap map") == len(boxes)
    places = [made.launch[len(made.launch) - 3 * len(boxes) :][3 * k : 3 * k + 3] for k in range(len(boxes))]
    assert places == [(k, widths[k], 300) for k in range(len(boxes))], "pointer, columns and rows"
    assert made.launch[6] == 4 * len(boxes)


def test_a_product_behind_the_release_reads_no_boxes() -> None:
    """It would need the entry to the end: x is read again from memory by the second product, so both read rows."""
    t, rows = Tiles((300,), tiles.TILE_ROWS), 300
    x = t.load((rows, 384), "bfloat16", ROW)
    h = t.matmul(x, t.load((384, 64), "bfloat16"))
    h = t.op("max", h, t.broadcast(t.literal(0.0, "bfloat16"), (64,), ()))
    g = t.matmul(h, t.load((64, 64), "bfloat16"))
    t.store(t.op("mul", g, t.matmul(x, t.load((384, 64), "bfloat16"))), (rows, 64), ROW)
    program = t.program()
    shapes = ((rows, 384), (384, 64), (64, 64), (384, 64))
    arrays = [numbers(*s, dtype="bfloat16", share=0.05) for s in shapes]
    source = generated(program, 3)
    assert ("BoxSource" in source) == ("in0_row" not in source)
    check((program, arrays), lanes=3)


@pytest.mark.parametrize(
    "widths, dtype, where",
    [
        ((64, 64), "bfloat16", "ring"),
        ((128, 256), "bfloat16", "registers"),
        ((256, 128), "bfloat16", "memory"),
        ((64, 128), "float32", "memory"),
    ],
)
def test_a_residual_stays_on_the_chip_if_there_is_room(widths: tuple[int, ...], dtype: str, where: str) -> None:
    """Otherwise it is read again, so that the entry is free for the next tile while the lane works on."""
    source = generated(edge_update(300, widths, dtype, 64)[0])
    body, boxed = source[source.index("void consume0") : source.index("void load0")], dtype == "bfloat16"
    front, back = body.split("tiles.rd_release(entry);")
    assert ("BoxSource" if boxed else "kInRing") in front and "kInRing" not in back and "kInBoxes" not in back
    assert ("in0_row[h]" in back) == (where == "memory") and "in1_row" not in body
    assert ("kept0[b]" in back) == (where == "registers")
    assert ("product_9.feed" in front) == (where == "ring")
    assert source.count("tiles.fetch_boxes(" if boxed else "tiles.fetch(") == 2 and "prefetch_tile" not in source


def test_no_room_means_rows_are_read_where_they_lie() -> None:
    program, _ = edge_update(300, (384,), "bfloat16")
    made = layout.lay_out(program, dataclasses.replace(by_hand(program, 900, 2, 1), shared_bytes=160 << 10), "program")
    assert made.ring is None and made.shared_bytes <= 160 << 10
    assert ring(lower.generate_kernel(program, by_hand(program, 800, 2, 1), "program").source) is None, "sm_80 has no bulk copies"


# --- The model --------------------------------------------------------------------------------------------------------------------


def dense(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.relu(x @ w) @ v


@pytest.mark.parametrize("width, dtype", [(128, "bfloat16"), (384, "bfloat16"), (384, "float32"), (100, "bfloat16")])
def test_the_planner_counts_with_the_rings_that_kernels_have(width: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = subject(dense, *(jnp.zeros(s, dtype) for s in ((20_000, width), (width, 128), (128, 128))))
    found, choose = dict[str, tuple[bool, bool]](), planner._ring

    def chosen(cost: GpuCost, ops: Any, lanes: int, weights: Any, free: int) -> Any:
        made = choose(cost, ops, lanes, weights, free)
        name = f"{'resident' if weights.resident else f'streamed-cluster{weights.cluster}'}-lanes{lanes}"
        found[name] = bool(made.values), bool(made.boxed)
        return made

    monkeypatch.setattr(planner, "_ring", chosen)
    for plan in candidates(GpuCost(of.graph, of.region, H200)):
        name, program = kind_of(plan, False).removeprefix("sm90-vertical-"), of.program(plan)
        if name in found and lower.check(program, plan, "program") is None:
            source = lower.generate_kernel(program, arrangement_of(plan, program), "program").source
            assert found.pop(name) == (ring(source) is not None, "BoxSource" in source), name
    assert len(found) <= 3, "most plans have a kernel"


def test_a_ring_shortens_the_time_of_memory() -> None:
    """Of the edge update of a graph network: its rows come in pieces without a ring, and a third of them twice."""
    function, args = gpu_model._of_rows("mgn", jnp.bfloat16, 200_000)
    graph, regions = gpu_model._regions(function, args)
    region = max(regions, key=lambda r: len(r.ops))
    machines = (H200, dataclasses.replace(H200, tile_rings=False))
    rings, pieces = (candidates(GpuCost(graph, region, machine))[0] for machine in machines)
    assert pieces.bound == "dram" and rings.seconds < 0.8 * pieces.seconds


def test_boxes_shorten_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the edge update: its lanes load a third of the bytes that they loaded, the residual's, and no two rows from the same
    banks."""
    function, args = gpu_model._of_rows("mgn", jnp.bfloat16, 200_000)
    graph, regions = gpu_model._regions(function, args)
    region = max(regions, key=lambda r: len(r.ops))
    boxes = candidates(GpuCost(graph, region, H200))[0]
    monkeypatch.setattr(planner, "_reads_in_boxes", lambda *_: 0)
    rows = candidates(GpuCost(graph, region, H200))[0]
    assert boxes.bound == rows.bound != "dram" and boxes.seconds < 0.97 * rows.seconds


# --- Machine code -----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("lanes", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_machine_code(lanes: int, compiler: str) -> None:
    """Tensor maps bring a tile, the tensor core reads it in place, and the residual is kept, without a spill or a hazard."""
    t = Tiles((300,), tiles.TILE_ROWS)
    x, e = (t.load((300, n), "bfloat16", ROW) for n in (128, 256))
    h = t.matmul(t.concat(x, e, dimension=1), t.load((384, 128), "bfloat16"))
    h = t.op("max", h, t.broadcast(t.literal(0.0, "bfloat16"), (128,), ()))
    t.store(t.op("add", t.matmul(h, t.load((128, 128), "bfloat16")), x), (300, 128), ROW)
    source = generated(t.program(), lanes)
    assert "kept0[b]" in source
    made = compilers.cubin(source, "sm_90a", folder_of(compiler))
    code = sass.disassemble(made.cubin, "kitsune_region")
    assert not code.has_local_memory and "C75" not in made.log
    assert code.count("UBLKCP.S.G") == 2, "two weights"
    assert code.count("UTMALDG.2D") == 6, "boxes of 64 columns"
    assert code.count("LDS.128") == 2 * 128 // 32, "of the residual"
    assert code.count("WARPGROUP.DEPBAR") == {2: 2, 3: 3}[lanes], "a product waits for its end, not for its loads"
    assert code.count("LDG") == 0
    paths = flow(code.instructions)
    assert not in_flight(paths).hazards and not skipped(paths)


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_products_of_boxes_with_streamed_weights_are_not_serialised(compiler: str) -> None:
    """With two chunks of columns in flight ptxas would wait after each of the 64 instructions (C7518)."""
    of = subject(FAMILIES["wide"].function, *FAMILIES["wide"].shapes(2003, "bfloat16"))
    plan = arrangements(of)["sm90-vertical-streamed-cluster2-lanes1"]
    program = of.program(plan)
    source = lower.generate_kernel(program, arrangement_of(plan, program), "program").source
    assert "BoxSource" in source
    made = compilers.cubin(source, "sm_90a", folder_of(compiler))
    code = sass.disassemble(made.cubin, "kitsune_region")
    assert "C75" not in made.log and code.count("WARPGROUP.DEPBAR") == 4 and not code.has_local_memory


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
def test_machine_code_of_rows() -> None:
    """float32: one bulk copy brings a tile, and a product loads its rows from shared memory, without a spill or a hazard."""
    program, _ = edge_update(300, (128, 64), "float32")
    code = sass.disassemble(compilers.cubin(generated(program, 2), "sm_90a").cubin, "kitsune_region")
    assert not code.has_local_memory
    assert code.count("UBLKCP.S.G") == 4, "two weights, and the tile of each input"
    assert code.count("LDS.128") >= 2 * 192 // 16 and code.count("UTMALDG") == 0
    paths = flow(code.instructions)
    assert not in_flight(paths).hazards and not skipped(paths)
