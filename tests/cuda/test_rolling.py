"""Copies of code as loops: the text of a loop, unrolled, is that of the copies; and which runs of nodes become loops."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from kitsune_jax.targets.cuda import ir, layout
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from kitsune_jax.targets.cuda.ir import Ref, Stepped
from kitsune_jax.targets.cuda.lower import generate_kernel
from kitsune_jax.targets.cuda.stage.rolling import rolled
from tests.support.cuda_attention_cases import ATTENTION, ATTENTION_GRADIENTS
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_run import arrangements, subject

# -- generated kernels

_LOOP = re.compile(r"( *)for \(int chunk = 0; chunk < (\d+); \+\+chunk\) \{")


def unrolled(lines: Sequence[str]) -> list[str]:
    """``lines`` with the copies of each loop over chunks in its place."""
    found: list[str] = []
    k = 0
    while k < len(lines):
        loop = _LOOP.fullmatch(lines[k])
        if loop is None:
            found.append(lines[k])
            k += 1
            continue
        end = lines.index(f"{loop[1]}}}", k)
        assert found.pop().strip() == "KITSUNE_UNROLL"
        for copy in range(int(loop[2])):
            found += [re.sub(r"\bchunk\b", str(copy), line[2:]) for line in lines[k + 1 : end]]
        k = end + 1
    return found


def canonical(lines: Iterable[str]) -> list[str]:
    """``lines`` with numbers worked out, a number for each accumulator in the order of declaration, and without declarations."""
    found, declared = [], Counter[str]()
    for line in lines:
        if one := re.fullmatch(r" *float acc_(\d+)(?:_\d+)?(\[\d+\])?\[\d+\];", line):
            declared[one[1]] += not one[2]
            continue
        line = re.sub(r"\b(\d+) \* (\d+)\b", lambda m: str(int(m[1]) * int(m[2])), line)
        while line != (line := re.sub(r"\b(\d+) ([+-]) (\d+)\b", lambda m: str(int(m[1]) + int(m[2] + m[3])), line)):
            pass
        line = re.sub(r"- \((\d+)\)", r"- \1", line).replace("(b - 0)", "b")
        line = re.sub(r"\b(product|weights)_(\d+)\w*", r"\1_\2", line)
        line = re.sub(r"\bacc_(\d+)\[(\d+)\]", r"acc_\1_\2", line)
        found.append(re.sub(r"\bacc_(\d+)\b", lambda m: f"acc_{m[1]}_{declared[m[1]] - 1}", line))
    return found


_KERNELS = {**FAMILIES, **ATTENTION, **ATTENTION_GRADIENTS}


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["nerf", "narrow", "wide", "dense", "attention-causal", "attention-by-keys"])
def test_a_loop_is_the_copies_in_whose_place_it_stands(name: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one arrangement in ``share``; others for the second dtype."""
    family = _KERNELS[name]
    batched = name not in FAMILIES
    loops = 0
    for first, dtype in enumerate(("bfloat16", "float32")):
        of = subject(family.function, *family.arguments(257, dtype), batches=batched)
        found = arrangements(of)
        for plan in filter(None, map(found.get, found.names()[first % share :: share])):
            program = of.program(plan)
            at = layout.lay_out(program, arrangement_of(plan, program), "region")
            for s in range(len(at.stages)):
                with monkeypatch.context() as patch:
                    patch.setattr(layout, "rolled", lambda nodes, loops: tuple(nodes))
                    copies = ir.Spelling().lines(layout.place_stage(at, s).consumer.loop.body)
                text = ir.Spelling().lines(layout.place_stage(at, s).consumer.loop.body)
                loops += text != copies
                assert canonical(unrolled(text)) == canonical(copies)
    assert loops


@pytest.mark.parametrize(("arrangement_name", "has_loops"), [("sm80-spatial-l2-lanes3", False), ("sm90-spatial-l2-lanes3", True)])
def test_spatial_kernels_that_would_spill_more_have_copies(arrangement_name: str, has_loops: bool) -> None:
    family = FAMILIES["edge-update"]
    of = subject(family.function, *family.arguments(257, "float32"))
    plan = arrangements(of)[arrangement_name]
    program = of.program(plan)
    text = generate_kernel(program, arrangement_of(plan, program), "region").source
    assert bool(_LOOP.search(text)) == has_loops


# -- which runs become loops


def issue(product: int, chunk: int, columns: int = 64) -> st.Issue:
    ref, block = Ref("d", product, f"_{chunk}"), chunk * columns // 32
    return st.Issue(ref, columns, "bfloat16", False, None, None, block, (), 0, chunk, 2, columns // 2)


def use(product: int, chunk: int, pending: int = 0, columns: int = 64) -> list[ir.Node]:
    """Wait for a chunk, and store its columns."""
    ref, blocks = Ref("d", product, f"_{chunk}"), columns // 32
    x = ir.Read("word", ref, "float32", chunk * blocks)
    put = ir.Put(ir.Keep(-1, Ref("v", 9), "word"), x, "float32", 256)
    loop = ir.BlockLoop(256, chunk * blocks, blocks, (put,), (ref,))
    return [st.Complete(ref, pending, "bfloat16", 0, 4, True, ()), loop]


def kinds(nodes: Iterable[ir.Node]) -> list[str | int]:
    """The kinds of nodes, and the iterations of loops."""
    return [node.count if isinstance(node, st.ChunkLoop) else type(node).__name__ for node in nodes]


def test_chunks_one_after_the_other_are_a_loop_with_accumulators_of_its_own() -> None:
    (loop,) = rolled([node for k in range(4) for node in (issue(5, k), *use(5, k))])
    assert isinstance(loop, st.ChunkLoop) and loop.count == 4
    start, wait, blocks = loop.body
    assert isinstance(start, st.Issue) and (start.ref, start.first) == (Ref("d", 5), Stepped(0, 2))
    assert isinstance(blocks, ir.BlockLoop) and (blocks.first, blocks.count) == (Stepped(0, 2), 2)
    assert ir.Spelling().lines([loop])[2] == "  float acc_5[32];"


def test_two_chunks_in_flight_are_two_loops_over_an_array() -> None:
    array, start, wait = rolled([issue(5, 0), issue(5, 1), *use(5, 0, 1), *use(5, 1)])
    assert array == st.Accumulators(Ref("d", 5), 2, 64)
    assert isinstance(start, st.ChunkLoop) and isinstance(wait, st.ChunkLoop)
    assert wait.body[0].lines(ir.Spelling()) == ["complete<Bf16, 0, 4>(acc_5[chunk], 1 - chunk, weights);"]


def test_of_many_chunks_with_two_in_flight_the_first_and_last_stand_outside() -> None:
    nodes = [issue(5, 0)]
    for k in range(4):
        nodes += [*([issue(5, k + 1)] if k < 3 else []), *use(5, k, int(k < 3))]
    found = rolled(nodes)
    assert kinds(found) == ["Accumulators", "Issue", 3, "Complete", "BlockLoop"]
    assert isinstance(found[1], st.Issue) and found[1].ref == Ref("d", 5, "[0]")
    assert isinstance(found[2], st.ChunkLoop) and found[2].body[0].lines(ir.Spelling())[0].endswith("(acc_5[chunk + 1], weights);")


def test_products_of_one_loop_share_its_iterations() -> None:
    nodes = [node for k in range(2) for node in (issue(5, k), issue(7, k), *use(5, k, 1), *use(7, k))]
    assert kinds(rolled(nodes)) == [2]


def test_chunks_of_other_widths_stay_copies() -> None:
    nodes = [issue(5, 0, 128), *use(5, 0, columns=128), issue(5, 1, 96), *use(5, 1, columns=96)]
    assert kinds(rolled(nodes)) == kinds(nodes)


def test_code_that_only_happens_to_be_equal_stays() -> None:
    turns = (st.Turn("take"), st.Turn("give"), st.Turn("take"), st.Turn("give"))
    assert rolled(turns) == turns


def test_loops_inside_of_loops_are_found() -> None:
    body = tuple(node for k in range(2) for node in (issue(5, k), *use(5, k)))
    (layers,) = rolled([st.LayerLoop(3, 0, 1, body)])
    assert isinstance(layers, st.LayerLoop) and kinds(layers.body) == [2]


def test_accumulators_that_hold_a_sum_before_are_declared_once() -> None:
    held = [ir.Registers(Ref("d", 5, f"_{k}"), "word", "float32", 32) for k in range(2)]
    starts = [dataclasses.replace(issue(5, k), started=True) for k in range(2)]
    text = ir.Spelling().lines(rolled([held[0], starts[0], held[1], starts[1], *use(5, 0, 1), *use(5, 1)]))
    assert [line for line in text if "float acc" in line] == ["float acc_5[2][32];"]
