"""``kj.profile``: traces read as kernels, SKIP's numbers, the bound, chains, batch sizes, and the report of a real call."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.profiling import hlo
from kitsune_jax.profiling.batches import INDICES, NONE_SHARED, Batch, batch_of
from kitsune_jax.profiling.hlo import KernelWork
from kitsune_jax.profiling.metrics import (
    Metrics,
    PeakRates,
    Recurring,
    Shares,
    chains,
    limit_of,
    metrics_of,
    shares_of,
)
from kitsune_jax.profiling.report import BatchSize, Gain, KernelChain, Profile
from kitsune_jax.profiling.run import pipeline_of, why_nothing
from kitsune_jax.profiling.trace import CALL, Event, KernelRun, TracedCall, runs_of
from kitsune_jax.report.data import RegionReport, Rejected
from kitsune_jax.report.render import Report

# --- traces -----------------------------------------------------------------------------------------------------------------------


def thunk(op: str, start: float, end: float, **more: Any) -> Event:
    return Event(op, start, end, op=op, module="jit_f", **more)


def launched(op: str, launch: float, start: float, end: float, number: int, device: str = "/device:GPU:0") -> list[Event]:
    """A kernel of a GPU and the call that launched it."""
    kernel = Event(f"{op}_kernel", start, end, device, op=op, module="jit_f", correlation=number)
    return [Event("cuLaunchKernelEx", launch, launch + 3, correlation=number), kernel]


def names(run: TracedCall) -> list[str]:
    return [k.op for k in run.kernels]


def test_thunks_belong_to_the_call_in_which_they_start():
    events = [Event(CALL, 0, 50), thunk("b", 20, 30), thunk("a", 10, 15), Event(CALL, 100, 150), thunk("c", 110, 120)]
    first, second = runs_of(events, "jit_f", {})
    assert (names(first), names(second)) == (["a", "b"], ["c"])
    assert (second.start, second.end) == (100, 150)


def test_a_thunk_that_leaves_its_work_to_other_threads_ends_with_its_flow():
    (run,) = runs_of([Event(CALL, 0, 50), thunk("conv", 10, 12, starts=7), Event("end: conv", 40, 41, ends=7)], "jit_f", {})
    assert run.kernels == (KernelRun("conv", 10, 40),)


def test_a_loop_is_its_steps():
    events = [Event(CALL, 0, 50), thunk("while.1", 5, 40), thunk("add", 6, 10), thunk("add", 20, 30)]
    (run,) = runs_of(events, "jit_f", {"while.1": {"add"}})
    assert names(run) == ["add", "add"]


def test_a_loop_whose_steps_are_not_in_the_trace_is_one_kernel():
    (run,) = runs_of([Event(CALL, 0, 50), thunk("call", 5, 40)], "jit_f", {"call": {"add"}})
    assert names(run) == ["call"]


def test_thunks_of_other_programs_and_of_other_devices_are_left_out():
    other = dataclasses.replace(thunk("other", 1, 2), module="jit_g")
    (run,) = runs_of([Event(CALL, 0, 50), other, thunk("a", 3, 4, ordinal=1), thunk("b", 5, 6, ordinal=0)], "jit_f", {})
    assert names(run) == ["b"]


def test_kernels_of_a_gpu_have_the_launches_of_their_correlation_numbers():
    copy = Event("MemcpyD2H", 60, 70, "/device:GPU:0", correlation=3)
    events = [Event(CALL, 0, 90), *launched("a", 2, 10, 20, 1), *launched("b", 4, 30, 50, 2), copy]
    (run,) = runs_of([*events, *launched("c", 6, 12, 13, 9, "/device:GPU:1")], "jit_f", {})
    assert run.kernels == (KernelRun("a", 10, 20, 2, 1), KernelRun("b", 30, 50, 4, 2))


# --- SKIP's numbers ---------------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_call_on_a_gpu():
    events = [Event(CALL, 0, 100e3), *launched("a", 5e3, 10e3, 20e3, 1), *launched("b", 8e3, 40e3, 90e3, 2)]
    (run,) = runs_of(events, "jit_f", {})
    assert metrics_of(run) == Metrics(
        launches=2,
        kernels=2,
        tklqt=pytest.approx(37e-6),  # 5 and 32 us
        latency=pytest.approx(90e-6),
        first_kernel=pytest.approx(10e-6),
        kernel_time=pytest.approx(60e-6),
        mean_kernel=pytest.approx(30e-6),
        idle=pytest.approx(30e-6),
    )


def test_kernels_of_one_cuda_graph_are_one_launch():
    kernels = [Event(f"k{n}", 10e3 * n, 10e3 * n + 5e3, "/device:GPU:0", op=f"k{n}", correlation=4) for n in (1, 2, 3)]
    (run,) = runs_of([Event(CALL, 0, 60e3), Event("cuGraphLaunch", 2e3, 4e3, correlation=4), *kernels], "jit_f", {})
    m = metrics_of(run)
    assert (m.launches, m.kernels) == (1, 3)
    assert m.tklqt == pytest.approx(8e-6 + 18e-6 + 28e-6)


@pytest.mark.parametrize("lost", ["launch", "both"])
def test_there_is_no_launch_and_queue_time_where_a_kernel_has_no_launch(lost: str):
    kernels = [KernelRun("a", 10, 20, None if lost == "both" else 5, 1), KernelRun("b", 30, 40)]
    assert metrics_of(TracedCall(0, 50, tuple(kernels))).tklqt is None


def test_idle_time_counts_overlapping_kernels_once():
    m = metrics_of(TracedCall(0, 60e3, (KernelRun("a", 10e3, 40e3), KernelRun("b", 20e3, 30e3), KernelRun("c", 35e3, 50e3))))
    assert m.kernel_time == pytest.approx(55e-6)
    assert m.idle == pytest.approx(10e-6)


def test_a_call_without_kernels_has_no_mean():
    m = metrics_of(TracedCall(10e3, 30e3, ()))
    assert (m.kernels, m.mean_kernel, m.first_kernel, m.tklqt) == (0, None, None, None)
    assert m.idle == m.latency == pytest.approx(20e-6)


# --- the bound --------------------------------------------------------------------------------------------------------------------

RATES = PeakRates(
    "a machine",
    dots=(("bfloat16", 2e12), ("other", 1e12)),
    simple=1e11,
    transcendental=1e10,
    near=1e11,
    far=1e10,
    near_bytes=1 << 20,
    kernel_seconds=1e-6,
)
PRODUCT = KernelWork(("dot_general",), dots=10**9, bytes=10**5)
MOVED = KernelWork(("add",), simple=10**6, bytes=12 * 10**6)
SORTED = KernelWork(("sort",), bytes=10**3, counted=False)


def in_turn(spent: float, works: Sequence[KernelWork], gap: float) -> Shares:
    """The parts of a call of kernels of ``spent`` nanoseconds, each behind a gap."""
    starts = [gap + k * (spent + gap) for k in range(len(works))]
    run = TracedCall(0, starts[-1] + spent, tuple(KernelRun("k", s, s + spent) for s in starts))
    return shares_of(run, works, RATES)


@pytest.mark.parametrize(
    ("spent", "work", "gap", "bound"),
    [
        (1_500, PRODUCT, 200, "overhead"),  # a microsecond of each is the least time of a kernel
        (9_000, PRODUCT, 10_000, "overhead"),  # the device waits
        (50_000, PRODUCT, 200, "compute"),
        (50_000, MOVED, 200, "memory"),
        (50_000, SORTED, 200, "other"),
    ],
)
def test_the_bound_is_the_largest_part(spent: float, work: KernelWork, gap: float, bound: str):
    assert in_turn(spent, [work] * 200, gap).bound == bound


def test_the_parts_of_a_latency():
    shares = in_turn(11_000, [PRODUCT, MOVED, MOVED, SORTED], 5_000)
    assert shares == Shares(pytest.approx(24e-6), pytest.approx(20e-6), pytest.approx(10e-6), pytest.approx(10e-6))  # type: ignore[arg-type]


def test_the_parts_of_overlapping_kernels_are_the_latency():
    run = TracedCall(0, 100e3, (KernelRun("a", 10e3, 90e3), KernelRun("b", 10e3, 90e3)))
    shares = shares_of(run, [PRODUCT, MOVED], RATES)
    assert sum(dataclasses.astuple(shares)) == pytest.approx(90e-6)
    assert shares.memory == pytest.approx(shares.compute)


@pytest.mark.parametrize(
    ("work", "limit"),
    [
        (KernelWork((), simple=10**5, bytes=10**6 // 2), "memory"),  # 5 us from the cache, 1 us of additions
        (KernelWork((), transcendental=10**5, bytes=10**6 // 2), "compute"),  # 10 us of functions
        (KernelWork((), dots=4 * 10**6, bytes=10**6 // 2), "memory"),
        (KernelWork((), dots=30 * 10**8, dtype="bfloat16", bytes=2 * 10**7), "memory"),  # 1.5 ms and 2 ms from memory
        (KernelWork((), dots=30 * 10**8, bytes=2 * 10**7), "compute"),  # 3 ms in another dtype
    ],
)
def test_the_limit_of_a_kernel(work: KernelWork, limit: str):
    assert limit_of(work, RATES) == limit


# --- the text of a module ---------------------------------------------------------------------------------------------------------

MODULE = """HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/model.py"

FunctionNames
1 "mlp"
2 "mlp.<locals>.step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=9}
2 {file_name_id=1 function_name_id=2 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%layer (p0: f32[32,64], p1: f32[64,16], p2: f32[16]) -> f32[32,16] {
  %p0 = f32[32,64]{1,0} parameter(0)
  %p1 = f32[64,16]{1,0} parameter(1)
  %dot.1 = f32[32,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/dot_general" stack_frame_id=1}
  %p2 = f32[16]{0} parameter(2)
  %b = f32[32,16]{1,0} broadcast(%p2), dimensions={1}, metadata={op_name="jit(f)/add" stack_frame_id=1}
  %add.1 = f32[32,16]{1,0} add(%dot.1, %b), metadata={op_name="jit(f)/add" stack_frame_id=1}
  ROOT %tanh.1 = f32[32,16]{1,0} tanh(%add.1), metadata={op_name="jit(f)/tanh" stack_frame_id=2}
}

%cut (t: f32[1000,16], i: s32[]) -> f32[1,16] {
  %t = f32[1000,16]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %ds = f32[1,16]{1,0} dynamic-slice(%t, %i, %zero), dynamic_slice_sizes={1,16}, metadata={op_name="jit(f)/while/body/dynamic_slice" stack_frame_id=2}
  ROOT %neg = f32[1,16]{1,0} negate(%ds), metadata={op_name="jit(f)/while/body/neg" stack_frame_id=2}
}

%put (t: f32[1000,16], u: f32[1,16], i: s32[]) -> f32[1000,16] {
  %t = f32[1000,16]{1,0} parameter(0)
  %u = f32[1,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = f32[1000,16]{1,0} dynamic-update-slice(%t, %u, %i, %zero)
}

%body (s: (s32[], f32[1000,16])) -> (s32[], f32[1000,16]) {
  %s = (s32[], f32[1000,16]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %a = f32[1000,16]{1,0} get-tuple-element(%s), index=1
  %cut_fusion = f32[1,16]{1,0} fusion(%a, %n), kind=kLoop, calls=%cut
  %put_fusion = f32[1000,16]{1,0} fusion(%a, %cut_fusion, %n), kind=kLoop, calls=%put
  ROOT %t.1 = (s32[], f32[1000,16]{1,0}) tuple(%n, %put_fusion)
}

%cond (s: (s32[], f32[1000,16])) -> pred[] {
  %s = (s32[], f32[1000,16]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[32,64], w: f32[64,16], v: f32[16], t: f32[1000,16], im: bf16[8,16,16,32], k: bf16[3,3,32,64]) -> f32[32,16] {
  %x = f32[32,64]{1,0} parameter(0)
  %w = f32[64,16]{1,0} parameter(1)
  %v = f32[16]{0} parameter(2)
  %t = f32[1000,16]{1,0} parameter(3)
  %im = bf16[8,16,16,32]{3,2,1,0} parameter(4)
  %k = bf16[3,3,32,64]{3,2,1,0} parameter(5)
  %layer_fusion = f32[32,16]{1,0} fusion(%x, %w, %v), kind=kOutput, calls=%layer
  %conv.1 = bf16[8,16,16,64]{3,2,1,0} convolution(%im, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
  %sort.1 = f32[32,16]{1,0} sort(%layer_fusion), dimensions={0}, to_apply=%cond
  %gemm.1 = (f32[32,16]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %start = (s32[], f32[1000,16]{1,0}) tuple(%v, %t)
  %while.1 = (s32[], /*index=1*/f32[1000,16]{1,0}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %out = f32[32,16]{1,0} add(%sort.1, %layer_fusion), metadata={op_name="jit(f)/transpose(jvp(f))/add_any" stack_frame_id=1}
}
"""  # noqa: E501
READ = hlo.read(MODULE)


def test_a_fusion_is_its_operators_and_the_bytes_at_its_border():
    assert READ.name == "jit_f"
    assert READ.work("layer_fusion") == KernelWork(
        ("dot_general", "add", "tanh"),
        ("model.py:12 (mlp)", "model.py:7 (step)"),
        dots=2 * 32 * 16 * 64,
        simple=32 * 16,
        transcendental=32 * 16,
        bytes=4 * (32 * 64 + 64 * 16 + 16 + 32 * 16),
    )


def test_a_fusion_that_cuts_or_updates_an_array_moves_the_part():
    assert READ.work("cut_fusion").bytes == 4 * (16 + 1 + 16)  # a row, its number, the result
    assert READ.work("put_fusion").bytes == 4 * (16 + 1 + 16)


def test_a_convolution_has_the_operations_of_its_kernel():
    found = READ.work("conv.1")
    assert (found.ops, found.dtype, found.dots) == (("conv_general_dilated",), "bfloat16", 2 * (8 * 16 * 16 * 64) * (3 * 3 * 32))


def test_a_product_of_a_library_is_counted_and_a_sort_is_not():
    assert READ.work("gemm.1").dots == 2 * 32 * 16 * 64
    assert READ.work("gemm.1").counted
    assert not READ.work("sort.1").counted


def test_a_loop_runs_its_body_and_holds_its_kernels():
    assert READ.holders["while.1"] >= {"cut_fusion", "put_fusion"}
    assert READ.work("while.1").simple == 10 * 16


def test_a_plain_instruction_has_its_operator_and_line():
    assert READ.work("out").ops == ("add_any",)
    assert READ.work("out").sources == ("model.py:12 (mlp)",)
    assert READ.work("out").bytes == 3 * 4 * 32 * 16


def test_the_kernels_of_a_gpu_are_found_by_their_names():
    assert READ.work("while_1") == READ.work("while.1")
    assert not READ.work("a_kernel_of_somebody_else").counted


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        hlo.read("module @jit_f {}")


# --- chains -----------------------------------------------------------------------------------------------------------------------


def test_layers_are_the_chain_that_recurs():
    assert chains("sabcabcabcx", [1] * 11, most=1) == [Recurring(3, (1, 4, 7))]


def test_layers_go_before_pairs_of_layers():
    """The slow kernels of a pair of layers are all four; those of the layers that are equal are three."""
    assert chains("dtdtdtdT", [9, 1] * 4, most=1) == [Recurring(2, (0, 2, 4))]


def test_a_chain_need_not_recur_at_once():
    assert chains("abxabyab", [5, 5, 1, 5, 5, 1, 5, 5], most=1) == [Recurring(2, (0, 3, 6))]


def test_equal_kernels_are_a_chain_of_one():
    assert chains("aaaa", [1] * 4, most=5) == [Recurring(1, (0, 1, 2, 3))]


def test_each_kernel_is_in_one_chain():
    keys = "abcabdabcabdee"
    found = chains(keys, range(1, 15), most=20)
    assert sorted(k for place in found for k in place.kernels()) == list(range(len(keys)))


def test_the_chain_that_takes_the_most_time_is_first():
    assert [p.starts for p in chains("ababz", [1, 1, 1, 1, 9], most=5)] == [(4,), (0, 2)]


# --- batch sizes ------------------------------------------------------------------------------------------------------------------


def batch(fn: Any, *args: Any) -> Batch | str:
    return batch_of((args, {}), ("a", "b", "c", "d"), lambda a: jax.tree.leaves(jax.eval_shape(fn, *a[0], **a[1])))


W, X, Y = np.ones((6, 6), np.float32), np.ones((6, 6), np.float32), np.ones(6, np.float32)


def test_the_batch_is_the_dimension_that_can_be_changed():
    found = batch(lambda w, x: x @ w, W, X)  # of the two the weight's cannot
    assert isinstance(found, Batch)
    assert (found.size, found.names) == (6, ("b",))


def test_arguments_that_belong_together_are_one_batch():
    found = batch(lambda w, x, y: jnp.sum((x @ w)[:, 0] - y), np.ones((6, 3), np.float32), X, Y)
    assert isinstance(found, Batch)
    assert found.names == ("b", "c")


def test_a_table_is_no_batch_beside_the_rows_that_are_read_of_it():
    found = batch(lambda table, ids: table[ids], np.ones((50, 4), np.float32), np.arange(7))
    assert isinstance(found, Batch)
    assert found.names == ("b",)


def test_indices_of_another_length_are_no_batch():
    found = batch(lambda nodes, senders: jax.ops.segment_sum(nodes[senders], senders, len(nodes)), X, np.arange(9))
    assert found == INDICES.format("b")


@pytest.mark.parametrize("args", [(), (3.0,), ((np.ones(3), np.ones(4)),)])
def test_arguments_without_a_common_dimension_have_no_batch(args: tuple[Any, ...]):
    assert batch(lambda *a: jnp.zeros(2), *args) == NONE_SHARED


def test_a_function_of_one_shape_says_so():
    found = batch(lambda x: x + np.ones((6, 6)), X)
    assert found == "the function cannot be traced with another leading dimension of a"


def test_rows_are_cut_or_repeated():
    found = Batch(3, ("b",), frozenset({1}))
    arguments = ((np.zeros(3), np.arange(3)), {})
    for size, rows in ((2, [0, 1]), (7, [0, 1, 2, 0, 1, 2, 0])):
        (other, resized), _ = found.resized(arguments, size)
        assert resized.tolist() == rows
        assert other.shape == (3,)


# --- what a pipeline gives --------------------------------------------------------------------------------------------------------

REGION = RegionReport(
    name="region0", ops=3, rows=64, tile_rows=8, tiles=8, arrangement="vertical", stages=(), queues=(), workers=1, replicas=2,
    bytes_in=1, bytes_out=1, bytes_saved=4000, seconds=1e-3, baseline_seconds=3e-3, bound="dram",
    sources=("model.py:12 (mlp)",),
)  # fmt: skip
PLAN = Report(
    ops_total=5,
    ops_pipelined=3,
    regions=(REGION,),
    rejected=(Rejected("sort", "model.py:7 (step)", "sorts need all rows"), Rejected("add", "model.py:7 (step)", "too small", 3)),
    traffic_bulk_sync=0,
    traffic_pipeline=0,
    platform="cpu",
    machine="a machine",
)


def test_operators_in_a_region_have_its_ratio_and_its_bottleneck():
    gain, why = pipeline_of(PLAN, ["model.py:12 (mlp)"], {"dot_general"})
    assert gain == pytest.approx(3)
    assert why == "region0, bottleneck: memory bandwidth, saves 4.00 kB of memory traffic"


def test_operators_outside_of_regions_have_the_reason():
    assert pipeline_of(PLAN, ["model.py:7 (step)"], {"sort"}) == (None, "sorts need all rows")
    assert pipeline_of(PLAN, ["model.py:7 (step)"], {"sort", "add"}) == (None, "too small")


def test_a_line_with_both_says_both():
    _, why = pipeline_of(PLAN, ["model.py:12 (mlp)", "model.py:7 (step)"], {"dot_general", "sort"})
    assert why.endswith("; 1 operator at these lines left to XLA: sorts need all rows")


def test_a_function_that_is_not_pipelined_says_why():
    nothing = dataclasses.replace(PLAN, ops_pipelined=0, regions=())
    assert why_nothing(nothing) == "too small"
    assert why_nothing(dataclasses.replace(nothing, obstacles=("it is switched off",))) == "it is switched off"


# --- the report -------------------------------------------------------------------------------------------------------------------

SMALL, LARGE = Shares(90e-6, 5e-6, 5e-6), Shares(1e-4, 1e-4, 8e-4)
PROFILE = Profile(
    name="mlp",
    platform="cpu",
    machine="a machine",
    bound="compute",
    shares=LARGE,
    metrics=Metrics(10, 10, None, 1e-3, 1e-5, 9e-4, 9e-5, 1e-4),
    runs=5,
    batch=64,
    batch_arguments=("x",),
    batch_note="",
    sizes=(BatchSize(4, 1e-4, SMALL, "overhead"), BatchSize(64, 1e-3, LARGE, "compute")),
    chains=(
        KernelChain((("dot_general", "add"), ("<tanh>",)), 5, 8e-4, ("model.py:12 (mlp)",), "compute", 1.5, "region0 has it " * 20),
        KernelChain((("sort",),), 1, 1e-4, (), "other", None, "sorts need all rows"),
    ),
    gain=Gain(1e-3, 5e-4, 3e-3, 1e-3, 1),
)


SAME = (PROFILE.sizes[0], dataclasses.replace(PROFILE.sizes[0], size=8))
BACK, LATER = BatchSize(99, 1e-3, SMALL, "overhead"), BatchSize(99, 1e-3, LARGE, "memory")


def test_the_text_begins_with_the_verdict():
    assert str(PROFILE).splitlines()[:3] == [
        "compute-bound at batch 64: of 1.00 ms, 80 % computes, 10 % is overhead, 10 % moves data",
        "from batch 64 on it is compute-bound, up to 4 overhead-bound (of the sizes tried)",
        "as a pipeline 500 us, with jax.jit 1.00 ms: 2.00x, measured; 1 region modelled at 3.00x",
    ]


def test_the_text_names_chains_their_lines_and_what_a_pipeline_gives():
    text = " ".join(str(PROFILE).split())
    assert (
        "800 us (89 %), 5 x 2 kernels, compute-bound: dot_general + add, <tanh> (model.py:12 (mlp)) pipeline 1.50x, modelled"
        in text
    )
    assert "bound by kernels of unknown work: sort left to XLA: sorts need all rows" in text


def test_the_gain_of_a_chain_is_told_as_measured_or_with_its_likely_range():
    chain = PROFILE.chains[0]
    known, modelled = dataclasses.replace(chain, measured=True), dataclasses.replace(chain, likely=(0.75, 2.25))
    assert "pipeline 1.50x, measured: region0" in str(dataclasses.replace(PROFILE, chains=(known,)))
    assert "pipeline 1.50x, modelled, likely 0.75x to 2.2x: region0" in str(dataclasses.replace(PROFILE, chains=(modelled,)))


def test_a_kernel_of_many_operators_is_shortened():
    chain = KernelChain((tuple("abcdefghi"), ("dot_general",)), 2, 1e-4, (), "memory", None, "it is small")
    assert "a + b + c + d + e + f + 3 more, dot_general" in str(dataclasses.replace(PROFILE, chains=(chain,)))


def test_no_line_is_longer_than_a_terminal():
    assert max(map(len, str(PROFILE).splitlines())) <= 120


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"batch": None, "batch_note": "it has none", "sizes": ()},
            "other batch sizes were not tried: it has none",
        ),
        ({"sizes": PROFILE.sizes[1:]}, "other batch sizes were not tried"),
        ({"sizes": SAME}, "all sizes tried, 4 to 8, are overhead-bound"),
        ({"sizes": (*PROFILE.sizes, BACK)}, "the smallest and the largest size tried, 4 and 99, are overhead-bound"),
        ({"sizes": (*PROFILE.sizes, LATER)}, "from batch 64 on it is no longer overhead-bound, up to 4 overhead-bound"),
        ({"gain": Gain(None, None, 0, 0, 0, "it is small")}, "a pipeline gives nothing: it is small"),
        (
            {"platform": "cuda", "metrics": dataclasses.replace(PROFILE.metrics, tklqt=2e-6)},
            "(TKLQT)  2.00 us",
        ),
    ],
)
def test_other_verdicts(change: dict[str, Any], text: str):
    assert text in str(dataclasses.replace(PROFILE, **change))


@pytest.mark.parametrize(
    ("bounds", "turn"),
    [
        (["overhead", "compute"], 2),
        (["overhead", "memory", "compute"], 2),
        (["overhead", "compute", "overhead", "compute"], 4),  # a disturbed measurement does not count
        (["overhead", "compute", "overhead"], None),
        (["memory", "memory"], None),
        (["memory"], None),
        ([], None),
    ],
)
def test_the_size_at_which_the_bound_turns(bounds: list[Any], turn: int | None):
    sizes = tuple(BatchSize(n, 1.0, SMALL, bound) for n, bound in enumerate(bounds, 1))
    assert dataclasses.replace(PROFILE, sizes=sizes).turns_at == turn


def test_the_dictionary_is_json():
    found = json.loads(json.dumps(PROFILE.to_dict()))
    assert found == PROFILE.to_dict()
    assert (found["bound"], found["turns_at"], found["gain"]["ratio"]) == ("compute", 64, 2.0)
    assert found["chains"][0]["ops"] == [["dot_general", "add"], ["<tanh>"]]


def test_a_profile_is_saved_by_the_ending_of_its_name(tmp_path: Path):
    PROFILE.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text()) == PROFILE.to_dict()
    PROFILE.save(str(tmp_path / "p.html"))
    page = (tmp_path / "p.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "&lt;tanh&gt;" in page
    assert "<tanh>" not in page
    with pytest.raises(ValueError, match=r"as \.html or \.json, not as 'p\.svg'"):
        PROFILE.save(tmp_path / "p.svg")


# --- a real call ------------------------------------------------------------------------------------------------------------------


def mlp(ws: Any, x: Any, *, power: str = "square") -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)  # the line of the chain
    return x**2 if power == "square" else x


LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# the line of the chain"))


@pytest.fixture(scope="module")
def found() -> Profile:
    ws = [jnp.ones((16, 16)) / 16] * 4
    return kj.profile(mlp, batches=(32, 64), repeats=2, budget_s=60, force=True)(ws, jnp.ones((64, 16)), power="square")


def test_a_real_call_has_kernels_whose_parts_are_the_latency(found: Profile):
    m = found.metrics
    assert (found.name, found.platform, found.runs, m.tklqt) == ("mlp", "cpu", 2, None)
    assert m.launches == m.kernels >= 4
    assert m.kernel_time > 0
    assert 0 <= m.idle <= m.latency
    assert sum(dataclasses.astuple(found.shares)) == pytest.approx(m.latency)


def test_a_real_call_is_tried_at_the_sizes_asked_for(found: Profile):
    assert (found.batch, found.batch_arguments) == (64, ("x",))
    assert [s.size for s in found.sizes] == [32, 64]


def test_kernels_have_the_lines_that_explain_knows(found: Profile):
    """All layers are one chain of one line, and the plan has a region there."""
    chain = next(c for c in found.chains if c.times >= 3)
    assert f"test_profile.py:{LINE} (mlp)" in chain.sources
    assert {"dot_general", "tanh"} <= {op for ops in chain.ops for op in ops}
    assert chain.gain is not None
    assert "region0" in chain.why


def test_a_pipelined_function_is_timed_beside_jit(found: Profile):
    assert found.gain.ratio is not None
    assert found.gain.ratio > 0
    assert found.gain.regions == 1


def test_a_pipelined_function_is_profiled_without_its_pipelines():
    """The call inside is plain as well: all of its kernels are XLA's."""
    inner = kj.pipeline(mlp, force=True)
    ws, x = [jnp.ones((16, 16)) / 16], jnp.ones((64, 16))
    profile = kj.profile(lambda ws, x: inner(ws, x).sum(), batches=(), repeats=1, force=True)(ws, x)
    assert all("custom" not in op and "ffi" not in op for c in profile.chains for ops in c.ops for op in ops)
    assert profile.gain.ratio is not None
    assert re.search(r"^as a pipeline .*: \d+\.\d\dx, measured", str(profile), re.MULTILINE)


def test_without_arguments_it_says_how_to_call_it():
    assert repr(kj.profile(mlp)) == "<profile of mlp: call it with arguments, kj.profile(mlp)(*args)>"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"repeats": 0}, "repeats=0 is not a positive integer"),
        ({"batches": (0,)}, "must be positive integers"),
        ({"budget_s": -1}, "budget_s=-1 is not a number of seconds"),
        ({"residuals": "sav"}, "residuals='sav' is not known"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: str):
    with pytest.raises(ValueError, match=error):
        kj.profile(mlp, **options)


def test_it_runs_functions_of_arrays_outside_of_transformations():
    with pytest.raises(TypeError, match="takes a function of arrays, not int"):
        kj.profile(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass arrays, not jax\.ShapeDtypeStruct"):
        kj.profile(mlp)([jnp.ones((4, 4))], jax.ShapeDtypeStruct((4, 4), jnp.float32))
    with pytest.raises(TypeError, match="cannot be called inside of jit"):
        jax.jit(lambda x: kj.profile(mlp)([], x))(jnp.ones(3))


def test_a_trace_that_is_running_is_named(tmp_path: Path):
    with jax.profiler.trace(str(tmp_path)), pytest.raises(RuntimeError, match="stop the trace that is running"):
        kj.profile(jnp.sin, batches=())(jnp.ones(3))


def test_a_jax_that_cannot_read_traces_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(jax.profiler, "ProfileData")
    with pytest.raises(RuntimeError, match="which JAX .* does not have: install JAX"):
        kj.profile(jnp.sin)(jnp.ones(3))


# --- programs whose bound is known by construction --------------------------------------------------------------------------------


def normal(*shape: int) -> jax.Array:
    rng = np.random.default_rng(len(shape))
    return jax.device_put(np.asarray(rng.normal(size=shape) / max(1, shape[0]) ** 0.5, jnp.float32))


def tiny_layers(w: Any, x: Any) -> Any:
    for _ in range(100):
        x = jnp.tanh(x @ w)  # two kernels of some hundred nanoseconds
    return x


def centred(x: Any) -> Any:
    for _ in range(4):
        x = x - x.mean()  # the mean of all is a kernel of its own
    return x


def layer_norm(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def block(p: dict[str, Any], x: Any, heads: int = 2) -> Any:
    b, t, d = x.shape
    y = layer_norm(x)
    q, k, v = ((y @ p[name]).reshape(b, t, heads, d // heads) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (d // heads) ** 0.5)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(b, t, d) @ p["o"]
    return x + jax.nn.relu(layer_norm(x) @ p["a"]) @ p["b"]


def blocks(count: int, d: int) -> list[dict[str, Any]]:
    return [{**{name: normal(d, d) for name in "qkvo"}, "a": normal(d, 4 * d), "b": normal(4 * d, d)} for _ in range(count)]


def vit(p: Any, images: Any) -> Any:
    n, size, _, channels = images.shape
    x = images.reshape(n, size // 4, 4, size // 4, 4, channels).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, (size // 4) ** 2, 16 * channels) @ p["patches"]
    for layer in p["layers"]:
        x = block(layer, x)
    return x.mean(1)


def bert(p: Any, ids: Any) -> Any:
    x = p["table"][ids]
    for layer in p["layers"]:
        x = block(layer, x)
    return x


def resnet(ws: Any, x: Any) -> Any:
    for w in ws:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + y)
    return x.mean((1, 2))


def gnn(nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
    for _ in range(3):  # an addition and a multiplication for each number that is moved
        nodes = nodes + jax.ops.segment_sum(nodes[senders] * edges[:, None], receivers, len(nodes))
    return nodes


def ids(n: int, below: int, *shape: int) -> Any:
    return np.random.default_rng(n).integers(0, below, shape or n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "make"),
    [
        pytest.param("overhead", lambda: (tiny_layers, normal(8, 8), normal(1, 8)), id="200 tiny kernels"),
        pytest.param("compute", lambda: (lambda w, x: x @ w @ w, normal(1024, 1024), normal(1024, 1024)), id="large products"),
        pytest.param("memory", lambda: (centred, normal(16, 1 << 20)), id="64 MB"),
        pytest.param("other", lambda: (jnp.sort, normal(1 << 20)), id="a sort"),
        pytest.param("overhead", lambda: (vit, {"patches": normal(48, 8), "layers": blocks(6, 8)}, normal(1, 8, 8, 3)), id="ViT"),
        pytest.param("compute", lambda: (bert, {"table": normal(99, 256), "layers": blocks(2, 256)}, ids(1, 99, 8, 64)), id="BERT"),
        pytest.param("compute", lambda: (resnet, [normal(3, 3, 64, 64)] * 4, normal(8, 16, 16, 64)), id="ResNet"),
        pytest.param(
            "memory", lambda: (gnn, normal(50_000, 64), normal(200_000), ids(200_000, 50_000), ids(200_001, 50_000)[1:]), id="GNN"
        ),
    ],
)
def test_the_bound_of_programs_where_it_is_known(bound: str, make: Any):
    fn, *args = make()
    assert kj.profile(fn, batches=())(*args).bound == bound


@pytest.mark.slow
def test_the_batch_at_which_a_program_turns():
    found = kj.profile(tiny_layers, batches=(4096,), budget_s=60)(normal(32, 32), normal(1, 32))
    assert [s.bound for s in found.sizes] == ["overhead", "compute"]
    assert found.turns_at == 4096


# -- functions that hold pipelines


def _layers(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w)


@pytest.mark.parametrize("runs_before", [False, True])
def test_a_function_that_holds_pipelines_is_profiled_without_and_keeps_them(runs_before: bool) -> None:
    """JAX remembers what it has traced, with pipelines or without."""
    w, x = jnp.ones((16, 16)) / 16, jnp.ones((512, 16))
    inner = jax.jit(kj.pipeline(_layers, force=True))

    def outer(w: Any, x: Any) -> Any:
        return inner(w, x).sum(1)

    for fn in (inner, outer):
        if runs_before:
            fn(w, x)
        found = kj.profile(fn, batches=(), repeats=1)(w, x)
        assert not any("kitsune" in op for chain in found.chains for ops in chain.ops for op in ops), found.chains
        assert found.chains and "kitsune" in jax.jit(fn).lower(w, x).as_text()
    assert kj.profile(inner, batches=(), repeats=1)(w, x).gain.regions == 1  # forced: its own options hold


def test_profile_with_arguments_says_how_it_is_called() -> None:
    with pytest.raises(TypeError, match=re.escape("call it with arguments: profile(_layers)(*args)")):
        kj.profile(_layers, jnp.ones(3))  # type: ignore[arg-type]
