"""The interpreter of tile programs: values against plain NumPy, queues that are bounded, and deadlocks that are found and named."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax.ops.graph import Graph, make_params
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import ArrayType, Instr, QueueType, SinkType, StageProgram, TileProgram, TileType
from kitsune_jax.targets.cuda.planning.machines import H200
from kitsune_jax.targets.cuda.planning.planner import plan
from reference.check import Deadlock, check_deadlock_free
from reference.interpret import dot_general, interpret
from reference.operators import MEANINGS
from tests.planning.test_planning import Net, nerf, spatial

RNG = np.random.default_rng(7)


def instr(kind: str, inputs: tuple[int, ...] = (), outputs: tuple[int, ...] = (), **params) -> Instr:
    return Instr(kind, inputs, outputs, make_params(**params))


def chain(length: int, *, skip_depth: int, depth: int = 2, rows: int = 64, tile_rows: int = 3, width: int = 2) -> TileProgram:
    """``length`` stages that add 1 each; the last adds what the first made (a skip past all others). out = 2 x + length + 1."""
    tile = TileType(True, (width,), "float32")
    values: list[TileType] = []

    def new(t: TileType = tile) -> int:
        values.append(t)
        return len(values) - 1

    one = new(TileType(False, (), "float32"))
    bodies: list[list[Instr]] = []
    for s in range(length):
        x, y = new(), new()
        body = [instr("load", (), (x,), array=0) if s == 0 else instr("pop", (), (x,), queue=s - 1), instr("add", (x, one), (y,))]
        if s < length - 1:
            body.append(instr("push", (y,), (), queue=s))
        if s == 0:
            body.append(instr("push", (y,), (), queue=length - 1))
        if s == length - 1:
            z, out = new(), new()
            body += [instr("pop", (), (z,), queue=length - 1), instr("add", (y, z), (out,)), instr("store", (out,), (), array=0)]
        bodies.append(body)
    array = ArrayType((rows, width), "float32", True, (width,), (1,))
    return TileProgram(
        axes=(rows,),
        tile_rows=tile_rows,
        inputs=(array,),
        outputs=(array,),
        values=tuple(values),
        literals=((one, 1.0),),
        stages=tuple(StageProgram(f"stage{s}", tuple(body)) for s, body in enumerate(bodies)),
        queues=(
            *(QueueType(s, (s + 1,), tile, depth) for s in range(length - 1)),
            QueueType(0, (length - 1,), tile, skip_depth),
        ),
        sinks=(),
    )


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_chain_with_a_skip_is_right_in_any_order(seed):
    program = chain(4, skip_depth=5)
    x = RNG.standard_normal((64, 2)).astype(np.float32)
    (out,) = interpret(program, [x], schedule_seed=seed)
    np.testing.assert_allclose(out, 2 * x + 5, rtol=1e-6)
    (wide,) = interpret(program, [x], schedule_seed=seed, widen=True)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, 2 * x.astype(np.float64) + 5)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(3, 7), skip_depth=st.integers(1, 9), lookahead=st.integers(0, 2))
def test_the_token_check_and_the_interpreter_agree_on_deadlocks(length, skip_depth, lookahead):
    """Each of the stages between holds ``lookahead`` more tiles than its own, and the skip must hold them all."""
    program = chain(length, skip_depth=skip_depth, depth=lookahead + 1, tile_rows=2)
    live = skip_depth > (length - 1) * lookahead
    found = check_deadlock_free(program, lookahead=lookahead)
    assert (found is None) == live
    x = np.ones((64, 2), np.float32)
    if live:
        np.testing.assert_array_equal(interpret(program, [x], schedule_seed=3, lookahead=lookahead)[0], 2 * x + length + 1)
    else:
        with pytest.raises(Deadlock) as error:
            interpret(program, [x], schedule_seed=3, lookahead=lookahead)
        assert str(error.value) == found


def test_a_shallow_skip_is_named_with_who_waits():
    found = check_deadlock_free(chain(4, skip_depth=3))
    assert found is not None and "stage 0 (stage0), at tile 3, waits for a free slot in queue 3 (depth 3)" in found
    assert "which stage 3 (stage3) empties" in found and "waits for tile 3 in queue 0, which stage 0 (stage0) fills" in found
    assert check_deadlock_free(chain(4, skip_depth=5)) is None
    assert check_deadlock_free(chain(4, skip_depth=3), lookahead=0) is None


def test_stages_that_wait_for_each_other_and_queues_of_no_depth_deadlock():
    program = chain(3, skip_depth=4)
    backward = dataclasses.replace(program.queues[-1], producer=2, consumers=(0,))
    pop, push = instr("pop", (), (1,), queue=2), instr("push", (4,), (), queue=2)
    first, last = program.stages[0], program.stages[2]
    cycle = dataclasses.replace(
        program,
        stages=(
            dataclasses.replace(first, body=(pop, first.body[1], first.body[2])),
            program.stages[1],
            dataclasses.replace(last, body=(*last.body[:2], dataclasses.replace(push, inputs=(last.body[1].outputs[0],)))),
        ),
        queues=(*program.queues[:-1], backward),
    )
    with pytest.raises(Deadlock, match="stage 0 .* waits for tile 0 in queue 2, which stage 2"):
        interpret(cycle, [np.zeros((64, 2), np.float32)])
    assert "depth 0" in (check_deadlock_free(chain(3, skip_depth=0)) or "")


def test_types_are_checked_at_every_step():
    program = chain(3, skip_depth=4)
    x = np.zeros((64, 2), np.float32)
    with pytest.raises(ValueError, match=r"input 0 is float32\[64, 3\]; the program takes float32\[64, 2\]"):
        interpret(program, [np.zeros((64, 3), np.float32)])
    with pytest.raises(ValueError, match="float64"):
        interpret(program, [x.astype(np.float64)])
    with pytest.raises(ValueError, match="takes 1 arrays, not 2"):
        interpret(program, [x, x])
    wrong = dataclasses.replace(program.queues[0], tile=TileType(True, (3,), "float32"))
    with pytest.raises(TypeError, match="push to queue 0"):
        interpret(dataclasses.replace(program, queues=(wrong, *program.queues[1:])), [x])
    values = (program.values[0], TileType(True, (2,), "int32"), *program.values[2:])
    with pytest.raises(TypeError, match="load in stage 0"):
        interpret(dataclasses.replace(program, values=values), [x])
    silent = dataclasses.replace(program.stages[0], body=program.stages[0].body[:-1])
    with pytest.raises(TypeError, match="has 0 push of queue 2"):
        check_deadlock_free(dataclasses.replace(program, stages=(silent, *program.stages[1:])))
    ghost = dataclasses.replace(program.stages[0], body=(instr("store", (1,), (), array=0), *program.stages[0].body))
    with pytest.raises(TypeError, match="before it is defined"):
        interpret(dataclasses.replace(program, stages=(ghost, *program.stages[1:])), [x])


def test_sinks_accumulate_in_double_and_arrive_at_the_end():
    rows = 1000
    tile, whole = TileType(True, (4,), "float32"), ArrayType((rows, 4), "float32", True, (4,), (1,))
    kinds = ("sum", "max", "min", "prod")
    body = (instr("load", (), (0,), array=0), *[instr("sink", (0,), (), sink=k, axes=(0,)) for k, _ in enumerate(kinds)])
    program = TileProgram(
        (rows,), 7, (whole,), tuple(ArrayType((4,), "float32", False) for _ in kinds), (tile,), (),
        (StageProgram("fold", body),), (), tuple(SinkType(h, (4,), "float32", k) for k, h in enumerate(kinds)),
    )  # fmt: skip
    x = (1 + 0.01 * RNG.standard_normal((rows, 4))).astype(np.float32)
    outs = interpret(program, [x])
    wide = x.astype(np.float64)
    for out, want in zip(outs, (wide.sum(0), wide.max(0), wide.min(0), wide.prod(0)), strict=True):
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out, want.astype(np.float32))


def test_two_stream_axes_transposed_layouts_and_row_indices():
    """x is [c, b, a] over (a, b), y depends on b only; out is [b, c, a] = x + y + position, b outermost in the position."""
    a, b, c = 4, 5, 3
    tile, column, index = TileType(True, (c,), "float32"), TileType(True, (), "float32"), TileType(True, (c,), "float32")
    values = (tile, column, tile, tile, index, tile)
    body = (
        instr("load", (), (0,), array=0),
        instr("load", (), (1,), array=1),
        instr("broadcast_in_dim", (1,), (2,), shape=(-1, c), dims=(0,)),
        instr("add", (0, 2), (3,)),
        instr("row_index", (), (4,), axes=(1, 0)),
        instr("add", (3, 4), (5,)),
        instr("store", (5,), (), array=0),
    )
    program = TileProgram(
        axes=(a, b),
        tile_rows=3,
        inputs=(
            ArrayType((c, b, a), "float32", True, (1, a), (0,)),
            ArrayType((b,), "float32", True, (0, 1), ()),
        ),
        outputs=(ArrayType((b, c, a), "float32", True, (1, c * a), (1,)),),
        values=values,
        literals=(),
        stages=(StageProgram("all", body),),
        queues=(),
        sinks=(),
    )
    x = RNG.standard_normal((c, b, a)).astype(np.float32)
    y = RNG.standard_normal(b).astype(np.float32)
    (out,) = interpret(program, [x, y])
    position = np.arange(b)[:, None] * a + np.arange(a)[None, :]  # axes (1, 0): b outermost
    want = x.transpose(1, 0, 2) + y[:, None, None] + position[:, None, :].astype(np.float32)
    np.testing.assert_allclose(out, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_matmul_with_batch_and_permuted_result(dtype):
    """x [r, g, k] by w [n, g, k] over k, batched over g: falls out as [g, r, n], wanted as [r, n, g]."""
    r, g, k, n = 10, 2, 3, 4
    np_type = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    body = (
        instr("load", (), (0,), array=0),
        instr("load", (), (1,), array=1),
        instr(
            "matmul", (0, 1), (2,),
            x_contract=(2,), x_batch=(1,), w_contract=(2,), w_batch=(1,), out_perm=(1, 2, 0),
            accumulate="int32" if dtype == "int32" else "float32",
        ),
        instr("store", (2,), (), array=0),
    )  # fmt: skip
    program = TileProgram(
        (r,), 4,
        (ArrayType((r, g, k), dtype, True, (g * k,), (1, 2)), ArrayType((n, g, k), dtype, False)),
        (ArrayType((r, n, g), dtype, True, (n * g,), (1, 2)),),
        (TileType(True, (g, k), dtype), TileType(False, (n, g, k), dtype), TileType(True, (n, g), dtype)),
        (), (StageProgram("all", body),), (), (),
    )  # fmt: skip
    x, w = (RNG.integers(-3, 4, shape).astype(np_type) for shape in ((r, g, k), (n, g, k)))
    (out,) = interpret(program, [x, w])
    assert out.dtype == np_type
    want = np.einsum("rgk,ngk->rng", x.astype(np.float64), w.astype(np.float64))
    np.testing.assert_array_equal(out.astype(np.float64), want)


def test_dot_general_agrees_with_einsum():
    x, w = RNG.standard_normal((2, 3, 4, 5)), RNG.standard_normal((5, 6, 2, 4))
    np.testing.assert_allclose(dot_general(x, w, (3, 2), (0, 3), (0,), (2,)), np.einsum("baij,jcbi->bac", x, w), rtol=1e-12)


# Plans through the builder


def reference(graph: Graph, region: Region, arrays: dict[int, np.ndarray]) -> list[np.ndarray]:
    """The graph in float64, op by op on whole arrays."""
    env = {v: a.astype(np.float64) for v, a in arrays.items()}
    env |= {v: np.asarray(x.literal, np.float64) for v, x in enumerate(graph.values) if x.literal is not None}
    for i in region.ops:
        op = graph.ops[i]
        ins = [env[v] for v in op.inputs]
        if op.kind == "dot_general":
            env[op.outputs[0]] = dot_general(*ins, op["lhs_contract"], op["rhs_contract"], op["lhs_batch"], op["rhs_batch"])
        else:
            env[op.outputs[0]] = MEANINGS[op.kind].numpy(dict(op.params), *ins, out_dtype="float64")
    return [env[v] for v in region.outputs]


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("rows", [130, 640])
def test_a_spatial_plan_runs_through_bounded_queues_and_equals_float64(rows, encoded):
    graph, region = nerf(rows, "float32", encoded, width=64)
    p = plan(graph, region, spatial())
    assert p.arrangement == "spatial" and p.queues
    program = build(graph, region, p)
    assert check_deadlock_free(program) is None
    arrays = {v: (RNG.standard_normal(graph.values[v].shape) * 0.2).astype(np.float32) for v in graph.inputs}
    want = reference(graph, region, arrays)
    for seed in (0, 1):
        got = interpret(program, [arrays[v] for v in region.inputs], schedule_seed=seed, widen=True, lookahead=1)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)


def test_planned_skips_are_only_as_deep_as_they_must_be_to_matter():
    """The planner's skip queue is live with prefetching stages; cut to two entries it is not."""
    graph, region = nerf(262144, encoded=False)
    program = build(graph, region, plan(graph, region, spatial()))
    long = max(range(len(program.queues)), key=lambda q: max(program.queues[q].consumers) - program.queues[q].producer)
    assert check_deadlock_free(program) is None
    shallow = dataclasses.replace(program.queues[long], depth=2)
    queues = (*program.queues[:long], shallow, *program.queues[long + 1 :])
    found = check_deadlock_free(dataclasses.replace(program, queues=queues))
    assert found is not None and f"queue {long} (depth 2)" in found


def test_makers_shared_by_stages_are_made_in_each():
    net = Net(512)
    x = net.input(512, 64)
    bias = net.op("broadcast_in_dim", (net.input(64),), (512, 64), shape=(512, 64), dims=(1,))
    h = x
    for _ in range(12):  # enough weights that one CTA cannot keep them
        h = net.op("add", (net.dot(h, net.input(64, 64)), bias), (512, 64))
        h = net.op("max", (h, net.value((), 0.0)), (512, 64))
    graph, region = net.done(h)
    p = plan(graph, region, spatial(dataclasses.replace(H200, local_bytes=96 << 10)))
    maker = graph.producers()[bias]
    assert len(p.stages) > 1 and all(maker in stage.ops for stage in p.stages)
    assert all(q.value != bias for q in p.queues)
    program = build(graph, region, p)
    arrays = [(RNG.standard_normal(graph.values[v].shape) * 0.2).astype(np.float32) for v in region.inputs]
    got = interpret(program, arrays, schedule_seed=5, widen=True)
    np.testing.assert_allclose(got[0], reference(graph, region, dict(zip(region.inputs, arrays, strict=True)))[0], rtol=1e-10)
