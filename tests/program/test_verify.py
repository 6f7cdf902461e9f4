"""The checker of programs: it lets every program of the tests through, and refuses each after one small change, with a reason."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kitsune_jax.ops.graph import make_params
from kitsune_jax.program.ir import SINKS, Array, Instr, LoopBody, Program, TileProgram, TileType, walk
from reference.check import verify
from tests.program.test_interpreter import chain
from tests.support.batch_sums import BATCH_SUMS, batch_sums
from tests.support.programs import CASES


@functools.cache
def programs() -> dict[str, TileProgram]:
    """Every tile program of the hand-written calls, and one with queues."""
    cases = {**CASES, **BATCH_SUMS}
    found = {f"{name}/{k}": part.program for name in cases for k, part in enumerate(cases[name]().program.parts)}
    return {**found, "chain": chain(4, skip_depth=5)}


def edited(body: tuple[Instr, ...], edit: Callable[[Instr], list[Instr]]) -> tuple[Instr, ...]:
    """``body`` with every instruction, those in loops too, replaced by what ``edit`` makes of it."""
    out: list[Instr] = []
    for instr in body:
        if instr.block is not None:
            block = dataclasses.replace(instr.block, body=edited(instr.block.body, edit))
            made = edit(instr)
            out += [i if i is not instr else dataclasses.replace(instr, block=block) for i in made]
        else:
            out += edit(instr)
    return tuple(out)


def with_edit(program: TileProgram, edit: Callable[[Instr], list[Instr]]) -> TileProgram:
    stages = tuple(dataclasses.replace(s, body=edited(s.body, edit)) for s in program.stages)
    return dataclasses.replace(program, stages=stages)


def instead(program: TileProgram, old: Instr, *new: Instr) -> TileProgram:
    return with_edit(program, lambda i: list(new) if i is old else [i])


def changed(instr: Instr, **params) -> Instr:
    return dataclasses.replace(instr, params=make_params(**{**dict(instr.params), **params}))


def pick(data: st.DataObject, program: TileProgram, *kinds: str, other: bool = False) -> Instr:
    """Any instruction, or one of ``kinds``, or (``other``) of none of them."""
    found = [i for s in program.stages for i in walk(s.body) if not kinds or (i.kind in kinds) != other]
    assume(found)
    return data.draw(st.sampled_from(found))


# Each takes a program and gives one that is wrong.


def another_shape(data: st.DataObject, p: TileProgram) -> TileProgram:
    (v, *_) = pick(data, p, "store", "push", *SINKS, "store_slice", "loop", other=True).outputs
    t = p.values[v]
    values = (*p.values[:v], dataclasses.replace(t, shape=(*t.shape, 7)), *p.values[v + 1 :])
    return dataclasses.replace(p, values=values)


def a_missing_instruction(data: st.DataObject, p: TileProgram) -> TileProgram:
    instr = pick(data, p)
    # A part of a sink's sums into which nothing is folded is right: it holds the identity.
    assume(bool(instr.outputs) or not any(i.kind in SINKS and i.get("dims") is not None for i in walk((instr,))))
    return instead(p, instr)


def an_instruction_twice(data: st.DataObject, p: TileProgram) -> TileProgram:
    instr = pick(data, p, *SINKS, "store_slice", other=True)
    return instead(p, instr, instr, instr)


def a_use_before_the_definition(data: st.DataObject, p: TileProgram) -> TileProgram:
    instr = pick(data, p)
    makers = {v: i for s in p.stages for i in s.body for v in i.outputs}
    assume(any(v in makers for v in instr.inputs))
    source = next(makers[v] for v in instr.inputs if v in makers)
    return instead(instead(p, instr), source, instr, source)


def a_value_of_a_loop_outside(data: st.DataObject, p: TileProgram) -> TileProgram:
    loop = pick(data, p, "loop")
    inner = loop.block.body[-1].inputs[0] if loop.block.results == () else loop.block.results[0]
    assume(inner not in loop.inputs)
    return instead(p, loop, loop, Instr("neg", (inner,), (len(p.values),)))


def one_iteration_more(data: st.DataObject, p: TileProgram) -> TileProgram:
    loop = pick(data, p, "loop")
    return instead(p, loop, changed(loop, count=loop["count"] + 1))


def a_carry_of_another_type(data: st.DataObject, p: TileProgram) -> TileProgram:
    loop = pick(data, p, "loop")
    assume(loop.block.carries)
    block: LoopBody = dataclasses.replace(loop.block, results=(loop.block.index, *loop.block.results[1:]))
    return instead(p, loop, dataclasses.replace(loop, block=block))


def a_carry_too_few(data: st.DataObject, p: TileProgram) -> TileProgram:
    loop = pick(data, p, "loop")
    assume(loop.inputs)
    return instead(p, loop, dataclasses.replace(loop, inputs=loop.inputs[1:]))


def a_computed_number(data: st.DataObject, p: TileProgram) -> TileProgram:
    cut = pick(data, p, "load_slice")
    new = len(p.values)
    p = dataclasses.replace(p, values=(*p.values, TileType(False, (), "int32")))
    doubled = Instr("add", (cut.inputs[0], cut.inputs[0]), (new,))
    return instead(p, cut, doubled, dataclasses.replace(cut, inputs=(new, *cut.inputs[1:])))


def an_array_that_there_is_not(data: st.DataObject, p: TileProgram) -> TileProgram:
    instr = pick(data, p, "load", "store", "load_slice", "store_slice")
    return instead(p, instr, changed(instr, array=99))


def a_queue_in_a_loop(data: st.DataObject, p: TileProgram) -> TileProgram:
    sink = pick(data, p, "sink_at", "push", "pop")
    assume(sink.get("sorted", True))
    new, inner = len(p.values), LoopBody(len(p.values), (), (sink,), ())
    p = dataclasses.replace(p, values=(*p.values, TileType(False, (), "int32")))
    assert new == inner.index
    return instead(p, sink, Instr("loop", (), (), make_params(count=2), block=inner))


def work_across_the_rows(data: st.DataObject, p: TileProgram) -> TileProgram:
    instr = pick(data, p, "reduce_max", "reduce_sum", "matmul", "dot", "transpose")
    assume(p.values[instr.inputs[0]].tile)
    name = "x_contract" if instr.kind in ("matmul", "dot") else "axes" if instr.kind != "transpose" else "permutation"
    return instead(p, instr, changed(instr, **{name: (0, *instr[name][1:])}))


def a_parameter_too_few(data: st.DataObject, p: TileProgram) -> TileProgram:
    instr = pick(data, p)
    name = data.draw(st.sampled_from(sorted({k for k, _ in instr.params} - {"reverse", "fill", "strides"}) or [""]))
    assume(name)
    return instead(p, instr, dataclasses.replace(instr, params=tuple((k, v) for k, v in instr.params if k != name)))


def a_shallow_queue(data: st.DataObject, p: TileProgram) -> TileProgram:
    assume(p.queues)
    q = len(p.queues) - 1  # the skip
    queues = (*p.queues[:q], dataclasses.replace(p.queues[q], depth=data.draw(st.integers(0, 3))))
    return dataclasses.replace(p, queues=queues)


def another_queue(data: st.DataObject, p: TileProgram) -> TileProgram:
    instr = pick(data, p, "push", "pop")
    other = data.draw(st.integers(-1, len(p.queues)).filter(lambda q: q != instr["queue"]))
    return instead(p, instr, changed(instr, queue=other))


def another_entry(data: st.DataObject, p: TileProgram) -> TileProgram:
    assume(p.queues)
    q = data.draw(st.integers(0, len(p.queues) - 1))
    wrong = dataclasses.replace(p.queues[q], tile=dataclasses.replace(p.queues[q].tile, dtype="float64"))
    return dataclasses.replace(p, queues=(*p.queues[:q], wrong, *p.queues[q + 1 :]))


def a_shorter_array(data: st.DataObject, p: TileProgram) -> TileProgram:
    """Rows would reach beyond it."""
    streaming = [k for k, a in enumerate(p.inputs) if a.streamed]
    assume(streaming)
    k = data.draw(st.sampled_from(streaming))
    a = p.inputs[k]
    d = next(d for d in range(len(a.shape)) if d not in a.dims)
    shorter = dataclasses.replace(a, shape=(*a.shape[:d], a.shape[d] - 1, *a.shape[d + 1 :]))
    assume(0 not in shorter.shape or 0 in a.shape)
    assume(0 not in a.shape)
    return dataclasses.replace(p, inputs=(*p.inputs[:k], shorter, *p.inputs[k + 1 :]))


def batch_axes_that_tiles_need(data: st.DataObject, p: TileProgram) -> TileProgram:
    assume(p.batch_axes and any(a.row_strides and not a.streamed for a in p.inputs))
    return dataclasses.replace(p, batch_axes=0)


MUTATIONS = (
    another_shape, a_missing_instruction, an_instruction_twice, a_use_before_the_definition, a_value_of_a_loop_outside,
    one_iteration_more, a_carry_of_another_type, a_carry_too_few, a_computed_number, an_array_that_there_is_not, a_queue_in_a_loop,
    work_across_the_rows, a_parameter_too_few, a_shallow_queue, another_queue, another_entry, a_shorter_array,
    batch_axes_that_tiles_need,
)  # fmt: skip


def test_every_program_of_the_tests_is_let_through() -> None:
    for program in programs().values():
        verify(program)
    for case in CASES.values():
        verify(case().program)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_program_with_one_wrong_thing_is_refused(mutation, data: st.DataObject) -> None:
    fitting = [n for n, p in programs().items() if mutation not in (a_shallow_queue, another_queue, another_entry) or p.queues]
    fitting = [n for n in fitting if mutation is not batch_axes_that_tiles_need or programs()[n].batch_axes]
    name = data.draw(st.sampled_from(sorted(fitting)))
    wrong = mutation(data, programs()[name])
    with pytest.raises(ValueError):
        verify(wrong)


def segment_call() -> Program:
    return CASES["segment_sum"]().program


CALLS: dict[str, tuple[Callable[[Program], Program], str]] = {
    "reads_what_its_own_phase_writes": (lambda p: part(p, 1, phase=0), "part 1: reads array 2, which no earlier phase writes"),
    "phases_out_of_order": (lambda p: part(p, 0, phase=7), "part 1: phase 1 comes after phase 7"),
    "writes_twice": (lambda p: part(p, 1, writes=(2,)), "part 1: writes array 2 as"),
    "writes_an_operand": (lambda p: part(p, 0, writes=(0,)), "part 0: writes array 0 as"),
    "fewer_arrays": (lambda p: part(p, 1, reads=()), "part 1: reads 0 arrays, its program has 2"),
    "a_part_is_missing": (lambda p: dataclasses.replace(p, parts=p.parts[:-1]), r"arrays \[3\] of the call are never written"),
    "another_type": (lambda p: dataclasses.replace(p, arrays=(Array((1, 2), "float32"), *p.arrays[1:])), "reads array 0 as"),
}


def part(program: Program, k: int, **changes) -> Program:
    parts = list(program.parts)
    parts[k] = dataclasses.replace(parts[k], **changes)
    return dataclasses.replace(program, parts=tuple(parts))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_parts_do_not_fit_is_refused(name: str) -> None:
    change, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        verify(change(segment_call()))


def test_a_refusal_names_the_place_and_the_reason() -> None:
    program = programs()["attention/0"]
    loop = next(i for i in program.stages[0].body if i.kind == "loop")
    place = r"stage 0 \(stage0\), instruction 4, loop, instruction 0, load_slice"
    with pytest.raises(ValueError, match=f"{place}: elements 0 to 72 of dimension 1"):
        verify(instead(program, loop, changed(loop, count=9)))
    product = [i for i in loop.block.body if i.kind == "matmul"][1]
    with pytest.raises(ValueError, match=r"matmul: x contracts dimensions of extents \[8\], w of \[6\]"):
        verify(instead(program, product, changed(product, w_contract=(1,))))


def test_sums_of_batches_and_parts_of_them() -> None:
    p = batch_sums(m=101, block=32).program.parts[0].program
    verify(p)

    def refused(reason: str, program: TileProgram) -> None:
        with pytest.raises(ValueError, match=reason):
            verify(program)

    def with_output(**changes) -> TileProgram:
        return dataclasses.replace(p, outputs=(dataclasses.replace(p.outputs[0], **changes), *p.outputs[1:]))

    product = next(i for s in p.stages for i in walk(s.body) if i.kind == "matmul_sink" and i.get("dims") == (0,))
    refused("those of several overlap", with_output(row_strides=(0, *p.outputs[0].row_strides[1:])))
    refused("are not contiguous", with_output(shape=(2, 101, 3, 5), dims=(1, 3), row_strides=(1515, 5, 0)))
    refused("may depend on no row", with_output(row_strides=(), dims=()))
    refused("elements 0 to 104 of dimension 0, which has 101", instead(p, product, changed(product, steps=(36,))))
    refused("a dimension, a step and a size for each number", instead(p, product, changed(product, steps=())))
    refused(r"sink 0 has shape \[32, 5\], not \[31, 5\]|31", instead(p, product, changed(product, sizes=(31,))))
    at = Instr("sink_at", product.inputs[:2], (), make_params(sink=0, sorted=False))
    refused("sink 0 is one for each batch", instead(p, product, at))
