"""The report: what ``build_report`` counts, and that text and HTML say all of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
import xml.etree.ElementTree

import pytest

from kitsune_jax.ops.graph import Graph, Op, Value, make_params
from kitsune_jax.planning.plan import GpuPlan, Plan, Queue, Stage
from kitsune_jax.planning.streams import Region, StreamSpace
from kitsune_jax.report.build import build_report
from kitsune_jax.report.data import MeasuredTimes, Rejected, byte_text, percent_text, time_text
from kitsune_jax.report.picture import regions_svg
from kitsune_jax.report.render import Report, merge_body_reports, repeated, with_measured
from kitsune_jax.report.text import WIDTH, _repeats, short_operators
from kitsune_jax.targets import get

ROW = ((0,), ())
GPU, CPU = get("cuda").machine("h200"), get("cpu").machine("avx512-2")


@dataclasses.dataclass(frozen=True)
class Planned:
    name: str
    region: Region
    plan: Plan
    number: int = 0

    @property
    def phases(self) -> tuple[Planned, ...]:
        return (self,)


def two_layer_graph() -> Graph:
    """x[4096,64] -> dot -> max 0 -> dot -> sort over rows, twice, from the same line."""
    dot = make_params(lhs_contract=(1,), rhs_contract=(0,), lhs_batch=(), rhs_batch=())
    return Graph(
        values=(
            Value((4096, 64), "bfloat16"),
            Value((64, 96), "bfloat16"),
            Value((96, 32), "bfloat16"),
            Value((), "bfloat16", 0.0),
            Value((4096, 96), "bfloat16"),
            Value((4096, 96), "bfloat16"),
            Value((4096, 32), "bfloat16"),
            Value((4096, 32), "bfloat16"),
            Value((4096, 32), "bfloat16"),
        ),
        inputs=(0, 1, 2),
        outputs=(8,),
        ops=(
            Op("dot_general", (0, 1), (4,), dot, "model.py:7 (mlp)", label="dot_general"),
            Op("max", (4, 3), (5,), (), "model.py:7 (mlp)", label="max"),
            Op("dot_general", (5, 2), (6,), dot, "model.py:8 (mlp)", label="dot_general"),
            Op("opaque", (6,), (7,), (), "model.py:9 (mlp)", "orders all rows <at once>", "sort"),
            Op("opaque", (7,), (8,), (), "model.py:9 (mlp)", "orders all rows <at once>", "sort"),
        ),
    )


def two_stage_plan() -> GpuPlan:
    return GpuPlan(
        machine="two CTAs",
        arrangement="spatial",
        tile_rows=96,
        tiles=43,
        stages=(
            Stage("dot0", (0, 1), "tensor", 1, 12.5e-6),
            Stage("dot1", (2,), "tensor", 1, 6.25e-6),
        ),
        queues=(Queue(5, 0, (1,), 2, 96 * 96 * 2, "l2"),),
        replicas=1,
        seconds=0.5e-3,
        baseline_seconds=1.0e-3,
        bytes_moved=800_000,
        baseline_bytes=3_200_000,
        bound="dot0",
        lanes=1,
    )


@pytest.fixture
def report() -> Report:
    region = Region(
        StreamSpace((4096,)),
        ops=(0, 1, 2),
        labels=((0, ROW), (4, ROW), (5, ROW), (6, ROW)),
        inputs=(0, 1, 2),
        outputs=(6,),
    )
    graph = two_layer_graph()
    graph.validate()
    rejected = ((3, graph.ops[3].reason), (4, graph.ops[4].reason))
    return build_report(graph, (Planned("region0", region, two_stage_plan()),), rejected, GPU)


def test_counts_and_bytes(report: Report) -> None:
    assert (report.ops_total, report.ops_pipelined, report.coverage) == (5, 3, 0.6)
    sorts = 2 * 2 * 4096 * 32 * 2  # two ops, each one operand and one result of bf16
    assert report.traffic_bulk_sync == 3_200_000 + sorts
    assert report.traffic_pipeline == 800_000 + sorts
    assert report.bytes_saved == 2_400_000
    (region,) = report.regions
    assert (region.rows, region.tile_rows, region.tiles, region.workers) == (4096, 96, 43, 2)
    assert region.bytes_in == 2 * (4096 * 64 + 64 * 96 + 96 * 32)
    assert region.bytes_out == 2 * 4096 * 32
    assert region.stages[0].ops == ("dot_general", "max")
    assert region.stages[0].microseconds == pytest.approx(12.5)
    (queue,) = region.queues
    assert (queue.value, queue.producer, queue.consumers, queue.bytes) == ("bfloat16[96,96]", "dot0", ("dot1",), 2 * 96 * 96 * 2)


def test_equal_rejections_are_one_entry(report: Report) -> None:
    (rejected,) = report.rejected
    assert (rejected.op, rejected.count, rejected.source) == ("sort", 2, "model.py:9 (mlp)")


def test_text_says_what_runs_where_and_why_not(report: Report) -> None:
    text = str(report)
    for fact in (
        "3 of 5 operators pipelined (60 %)",
        "region0: 3 operators over 4 096 rows, 43 tiles of 96 rows",
        "spatial, 1 lane, weights resident, on 2 CTAs in 1 instance",
        "bottleneck: matrix products of stage dot0",
        "saves 2.40 MB",
        "dot0 -> dot1",
        "bfloat16[96,96]",
        "dot_general, max",
        "model.py:9 (mlp)",
        "sort x2",
        "orders all rows <at once>",
    ):
        assert fact in text, f"{fact!r} is not in:\n{text}"
    assert max(map(len, text.splitlines())) <= WIDTH


def test_long_names_wrap_and_lose_nothing(report: Report) -> None:
    reason = "the reason is long " * 20 + "END"
    source = "a_module_with_a_rather_long_name/and_folders/model.py:1234 (a_function_with_a_rather_long_name.<locals>.inner)"
    long = dataclasses.replace(
        report,
        rejected=(dataclasses.replace(report.rejected[0], reason=reason, source=source, op="o" * 70),),
        regions=(
            dataclasses.replace(
                report.regions[0],
                stages=(dataclasses.replace(report.regions[0].stages[0], ops=tuple(f"mul{i}" for i in range(40)), name="s" * 70),),
            ),
        ),
        notes=("a note " * 40,),
    )
    assert max(map(len, str(long).splitlines())) <= WIDTH
    text = long.text(verbose=True)
    assert max(map(len, text.splitlines())) <= WIDTH
    squeezed = "".join(text.split())
    assert "END" in text
    assert squeezed.count("mul") == 40
    assert squeezed.count("reason") == 20 + 1  # and the head of the table


def test_repeated_operators_are_written_once() -> None:
    layer = ("dot_general", "add", "max")
    assert (
        _repeats(layer * 4 + ("concatenate",) + layer * 4) == "(dot_general, add, max) x4, concatenate, (dot_general, add, max) x4"
    )
    assert _repeats(("mul", "mul", "add")) == "mul x2, add"
    assert _repeats(("mul", "add", "mul", "sub")) == "mul, add, mul, sub"
    assert _repeats(()) == ""


def test_views_are_not_operators() -> None:
    """A bias made a row is no work: it is neither covered nor rejected."""
    graph = Graph(
        values=(Value((8,), "float32"), Value((1, 8), "float32"), Value((1, 8), "float32")),
        inputs=(0,),
        outputs=(2,),
        ops=(
            Op("reshape", (0,), (1,), make_params(shape=(1, 8)), label="broadcast_in_dim"),
            Op("neg", (1,), (2,), label="neg"),
        ),
    )
    report = build_report(graph, (), ((0, "stationary"), (1, "stationary")), CPU)
    assert report.ops_total == 1
    assert [r.op for r in report.rejected] == ["neg"]
    assert report.traffic_bulk_sync == 2 * 8 * 4


def test_nothing_pipelined() -> None:
    graph = two_layer_graph()
    report = build_report(graph, (), [(i, "too small") for i in range(5)], CPU)
    assert report.coverage == 0.0
    assert report.traffic_bulk_sync == report.traffic_pipeline > 0
    assert "nothing is pipelined" in str(report)
    assert str(report).count("too small") == 1
    assert report.text(verbose=True).count("too small") == 4  # two of the five stand on one line


def test_function_without_operators() -> None:
    report = build_report(Graph((Value((2,), "float32"),), (0,), (0,), ()), (), (), CPU)
    assert report.coverage == 0.0
    assert "no operators" in str(report)
    assert report._repr_html_().startswith("<div>")


def test_html_is_escaped_and_balanced(report: Report) -> None:
    html = report._repr_html_()
    assert "orders all rows &lt;at once&gt;" in html
    assert "<at once>" not in html
    for tag in ("div", "table", "tr", "td", "th", "p", "b"):
        assert html.count(f"<{tag}>") + html.count(f"<{tag} ") == html.count(f"</{tag}>")


def test_dictionary_survives_json_and_report_survives_pickle(report: Report) -> None:
    d = report.to_dict()
    assert json.loads(json.dumps(d)) == d
    assert (d["coverage"], d["expected_speedup"]) == (0.6, None)  # the time of the sorts was not asked for
    assert d["regions"][0]["queues"][0]["place"] == "l2"
    assert pickle.loads(pickle.dumps(report)) == report
    assert repr(report).startswith("<Report: ") and "3 of 5 operators" in repr(report) and "\n" not in repr(report)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (byte_text(0), "0 B"),
        (byte_text(999), "999 B"),
        (byte_text(999_900), "1.00 MB"),
        (byte_text(1_030_000_000), "1.03 GB"),
        (byte_text(-2_500), "-2.50 kB"),
        (time_text(0.042), "42.0 ms"),
        (time_text(1.5e-7), "150 ns"),
        (percent_text(996, 1000), "99.6 %"),
        (percent_text(1, 1), "100 %"),
        (percent_text(1, 0), "0 %"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


def test_the_verdict_stands_first(report: Report) -> None:
    """How much faster the whole function is, and how that is known."""
    timed = dataclasses.replace(report, rejected=tuple(dataclasses.replace(r, seconds=1e-3) for r in report.rejected))
    assert timed.unknown == 2
    # 0.5 ms of the region and 1 ms of the sorts, instead of 1 ms and 1 ms
    assert timed.expected_speedup == pytest.approx(2 / 1.5)
    assert str(timed).startswith(
        "expected at most 1.33x as fast as jax.jit, modelled (1.50 ms instead of 2.00 ms, without the time of 2"
    )
    assert str(dataclasses.replace(timed, unknown=0)).startswith("expected 1.33x as fast as jax.jit, modelled (1.50 ms instead of")
    measured = dataclasses.replace(timed, measured=MeasuredTimes(2e-3, 5e-3))
    assert measured.expected_speedup == 2.5
    assert str(measured).startswith("2.50x as fast as jax.jit, measured on this machine (2.00 ms instead of 5.00 ms); 3 of 5")
    left = dataclasses.replace(measured, regions=(), ops_pipelined=0, measured=MeasuredTimes(2e-3, 1e-3, busy=True))
    assert left.expected_speedup == 1.0
    told = " ".join(str(left).split())
    assert "measured as no faster (2.00 ms with pipelines, 1.00 ms with jax.jit, while other programs ran)" in told


def test_a_modelled_gain_has_a_likely_range_and_a_measured_one_has_none(report: Report) -> None:
    """A user must see how far a ratio can be trusted: the model's with its range, a measured one with both its times."""
    assert report.gain_band is None and "likely" not in str(report)  # nothing is known of an H200
    timed = dataclasses.replace(
        report, gain_band=(0.5, 1.5), rejected=tuple(dataclasses.replace(r, seconds=1e-5) for r in report.rejected)
    )
    for text in (str(timed), timed._repr_html_()):
        assert "estimate: 500 us, with jax.jit 1.00 ms (2.00x, likely 1x to 3x)" in text
    assert "likely 0.99x to 3x: in 8 of 10 programs the measured gain is 0.5 to 1.5 times the modelled one" in str(timed)
    measured = with_measured(timed, MeasuredTimes(1e-3, 1.5e-3))
    for text in (str(measured), measured._repr_html_()):
        assert "measured: 1.00 ms, with jax.jit 1.50 ms (1.50x); modelled: 500 us and 1.00 ms" in text
        assert "likely" not in text
    assert "both measured" in regions_svg(measured.regions, measured.bandwidth)
    assert "both modelled" in regions_svg(timed.regions, timed.bandwidth)


def test_the_times_of_a_function_are_those_of_a_region_that_does_almost_all_of_it(report: Report) -> None:
    times = MeasuredTimes(1e-3, 1.5e-3)
    (region,) = report.regions  # 0.5 ms

    def with_left(seconds: float | None, **changes: int) -> MeasuredTimes | None:
        rejected = tuple(dataclasses.replace(r, seconds=seconds) for r in report.rejected)
        of = dataclasses.replace(report, rejected=rejected, regions=(dataclasses.replace(region, **changes),))
        return with_measured(of, times).regions[0].measured

    assert with_left(5e-5) == times
    assert with_left(6e-5) is None
    assert with_left(None) is None
    assert with_left(1e-5, times=3) is None
    two = with_measured(dataclasses.replace(report, regions=(region, region)), times)
    assert [r.measured for r in two.regions] == [None, None]


def test_times_of_a_loop_are_those_of_all_steps(report: Report) -> None:
    timed = dataclasses.replace(report, rejected=tuple(dataclasses.replace(r, seconds=1e-3) for r in report.rejected))
    looped = repeated(timed, 10)
    assert looped.expected_speedup == pytest.approx(timed.expected_speedup)
    assert (looped.seconds, looped.left_seconds, looped.ops_total) == (pytest.approx(5e-3), pytest.approx(10e-3), timed.ops_total)
    whole = merge_body_reports([dataclasses.replace(timed, regions=(), ops_pipelined=0, ops_total=2), looped])
    assert whole.expected_speedup == pytest.approx((1 + 10 + 10) / (1 + 10 + 5))
    assert "in each of 10 steps" in " ".join(str(whole).split())


def left(reason: str, seconds: float, source: str = "model.py:1 (f)", op: str = "add", count: int = 1) -> Rejected:
    return Rejected(op, source, reason, count, seconds)


def test_reasons_are_grouped_by_cause_and_those_that_cost_most_are_shown(report: Report) -> None:
    few = [left(f"a gain of {k} us against {k + 1}.5 ms is too little", k * 1e-2, f"model.py:{k} (f)") for k in range(1, 40)]
    others = [left("cause " + name, seconds, count=2) for name, seconds in zip("abcdef", (5, 4, 3, 2, 1, 1e-9), strict=True)]
    many = dataclasses.replace(report, rejected=(*few, *others))
    short, whole = many.text(), many.text(verbose=True)
    assert short.count("is too little") == 1 and "a gain of 39 us against 40.5 ms" in " ".join(short.split())
    assert "model.py:39 (f), model.py:38" in " ".join(short.split()) and "and 37 more lines" in " ".join(short.split())
    assert [name for name in "abcdef" if f"cause {name}" in short] == list("abcd")
    assert "and 4 operators for 2 more reasons" in short
    assert whole.count("is too little") == 39 and "cause f" in whole
    assert len(short.splitlines()) < len(whole.splitlines()) / 2


def test_a_long_list_of_operators_is_cut_and_counted() -> None:
    layer = ["dot_general", "add", "max"]
    assert short_operators(layer * 100) == "(dot_general, add, max) x100"
    ops = [f"op{k}" for k in range(30)] + ["mul"] * 20
    assert short_operators(ops).startswith("op0, op1, ") and short_operators(ops).endswith(
        "(50 operators, most of them 20 mul, 1 op0, 1 op1)"
    )
    assert "op25" not in short_operators(ops)


def test_a_picture_has_every_fact_of_the_plan(report: Report) -> None:
    (region,) = report.regions
    svg = regions_svg([region], 1e12, alone=True)
    root = xml.etree.ElementTree.fromstring(svg)
    texts = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    for fact in (
        "dot0",
        "dot1",
        "matrix products, the bottleneck",
        "12.5 us a tile, 1 CTA",
        "dot_general, max",
        "model.py:7 (mlp)",
    ):
        assert fact in texts, fact
    assert {"18.4 kB", "l2 x2", "3.20 MB", "800 kB", "1.00 ms", "500 us"} <= set(texts)  # of the queue, the bars
    assert any("pipeline, " in t and "% of the roof" in t for t in texts)
    assert {"title", "desc"} <= {e.tag.rpartition("}")[2] for e in root} and root.get("role") == "img"
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("slower", [1.0, 1.05, 3.0])
def test_labels_of_the_roofline_do_not_overlap(report: Report, slower: float) -> None:
    (region,) = report.regions
    near = dataclasses.replace(
        region, baseline_bytes=region.bytes_moved, baseline_seconds=region.seconds * slower, peak_flops=1e12, flops=10**8
    )
    root = xml.etree.ElementTree.fromstring(regions_svg([near], 1e12))
    labels = [e for e in root.iter("{http://www.w3.org/2000/svg}text") if "% of the roof" in (e.text or "")]
    first, second = (float(e.get("y", "nan")) for e in labels)
    assert abs(first - second) >= 12


def test_boxes_of_a_picture_lie_inside_it_and_apart(report: Report) -> None:
    (region,) = report.regions
    stages = tuple(dataclasses.replace(region.stages[0], name=f"s{k}", ops=("dot_general", "add") * 40) for k in range(7))
    root = xml.etree.ElementTree.fromstring(regions_svg([dataclasses.replace(region, stages=stages)], 1e12))
    _, _, width, height = map(float, root.get("viewBox", "").split())
    boxes = [[float(e.get(k, "nan")) for k in ("x", "y", "width", "height")] for e in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(boxes) >= 9
    for k, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
        for other_x, other_y, other_w, other_h in boxes[:k]:
            assert x >= other_x + other_w or other_x >= x + w or y >= other_y + other_h or other_y >= y + h


@pytest.mark.parametrize("ending", [".html", ".svg", ".json", ".txt"])
def test_a_report_is_saved(report: Report, ending: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"plan{ending}"
    report.save(path)
    written = path.read_text(encoding="utf-8")
    assert "orders all rows" in written or ending == ".svg"
    assert "dot0" in written
    assert ("<svg" in written) == (ending in (".html", ".svg"))


def test_a_report_is_not_saved_under_another_ending(report: Report, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"'plan\.png'.*\.html, \.svg, \.json, \.txt"):
        report.save(tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())
