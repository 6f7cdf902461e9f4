"""Stages of a kernel that are equal but for where things lie share one function, and nothing else changes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.planning.plan import Plan
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import ir, lower
from kitsune_jax.targets.cuda import lower as cuda_lower
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.arrangement import arrangement_of
from kitsune_jax.targets.cuda.ir import Ref, Spelling
from kitsune_jax.targets.cuda.layout import kinds
from tests.support.cuda_run import Kernel, Subject, arrangements, kernel_cache, subject

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

WIDTH, LAYERS = 64, 4
FORWARD = ("sm90-spatial-cluster-lanes1", "sm90-spatial-cluster-lanes2")
L2 = ("sm90-spatial-l2-lanes1", "sm90-spatial-l2-lanes2", "sm80-spatial-l2-lanes1")


def network(*args: jax.Array) -> jax.Array:
    """Layers that are equal but for their weights and biases, which come first."""
    *params, x = args
    for k in range(0, len(params), 2):
        x = jnp.tanh(x @ params[k] + params[k + 1])
    return x


def loss(*args: jax.Array) -> jax.Array:
    *inputs, y = args
    return jnp.mean((network(*inputs) - y).astype(jnp.float32) ** 2)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "forward": lambda *args: network(*args[:-1]),
    "train": jax.value_and_grad(loss, tuple(range(2 * LAYERS))),
}


def case(what: str, rows: int) -> Subject:
    rng = np.random.default_rng(rows)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jax.device_put(np.asarray(rng.standard_normal(shape) * scale, jnp.bfloat16))

    params = [p for _ in range(LAYERS) for p in (normal(WIDTH, WIDTH, scale=WIDTH**-0.5), normal(WIDTH, scale=0.1))]
    return subject(FUNCTIONS[what], *params, normal(rows, WIDTH), normal(rows, WIDTH))


@functools.lru_cache(maxsize=4)
def planned(what: str, rows: int) -> tuple[Subject, dict[str, Plan]]:
    of = case(what, rows)
    found = dict(arrangements(of))
    if what == "train":
        found |= {f"{name}-gradients2": split_gradients(of, found[name]) for name in L2}
    return of, found


def split_gradients(of: Subject, plan: Plan) -> Plan:
    """Stages that nobody reads, which are those of weight gradients, over two CTAs each."""
    read = {q.producer for q in plan.queues}
    stages = tuple(s if k in read else dataclasses.replace(s, split=2, workers=2) for k, s in enumerate(plan.stages))
    split = dataclasses.replace(plan, stages=stages)
    assert cuda_lower.check(of.program(split), split, "region") is None
    return split


def generate(of: Subject, plan: Plan, share: bool) -> lower.Kernel:
    program = of.program(plan)
    return lower.generate_kernel(program, arrangement_of(plan, program), "region", share)


def functions(source: str) -> int:
    found = len(re.findall(r"void consume\d+\(", source))
    assert found == len(re.findall(r"void load\d+\(", source))
    return found


# -- the text


@pytest.mark.parametrize("arrangement", ["sm90-spatial-cluster-lanes1", "sm90-spatial-l2-lanes1"])
def test_equal_layers_are_one_function(arrangement: str) -> None:
    """A layer is two stages here; only the first and the last have an end of the network."""
    of, found = planned("forward", 130)
    plan = found[arrangement]
    assert len(plan.stages) == 2 * LAYERS == functions(generate(of, plan, False).source)
    assert functions(generate(of, plan, True).source) == 4


def test_a_training_step_has_few_kinds_of_stages() -> None:
    of, found = planned("train", 130)
    plan = found["sm90-spatial-l2-lanes1-gradients2"]
    shared = generate(of, plan, True).source
    assert 2 * functions(shared) <= len(plan.stages) == functions(generate(of, plan, False).source)


def test_a_function_is_called_at_one_place() -> None:
    """Else it would be inlined, and compiled, as often."""
    of, found = planned("train", 130)
    source = generate(of, found["sm90-spatial-l2-lanes1-gradients2"], True).source
    for name in re.findall(r"void ((?:consume|load)\d+)\(", source):
        assert len(re.findall(rf"\b{name}\(", source)) == 2  # where it is defined, and there


def test_sharing_changes_nothing_but_the_text() -> None:
    """Launch geometry, operands and workspace are those of the stages."""
    of, found = planned("train", 130)
    one, other = (generate(of, found["sm90-spatial-l2-lanes1-gradients2"], share) for share in (True, False))
    for field in ("call", "packed", "kept"):
        assert getattr(one, field) == getattr(other, field)


def test_a_kernel_of_one_stage_has_no_tables() -> None:
    of, found = planned("forward", 130)
    plan = next(p for p in found.values() if p.arrangement == "vertical")
    assert generate(of, plan, True).source == generate(of, plan, False).source


# -- which stages are equal


def constants(*numbers: int) -> tuple[ir.Constant, ...]:
    return tuple(ir.number("x", k, n) for k, n in enumerate(numbers))


def word(v: int) -> ir.Read:
    return ir.Read("word", Ref("v", v), "float32")


def let(v: int, template: str, *operands: int, dtype: str = "float32") -> ir.Let:
    return ir.Let(Ref("v", v), dtype, ir.Apply(template, tuple(map(word, operands))))


def rows(k: int, dtype: str) -> ir.Rows:
    return ir.Rows(Ref("in", k), dtype, 8, "16", (), False)


def test_constants_that_agree_are_literals_and_others_are_fields() -> None:
    (kind,) = kinds([constants(64, 3), constants(64, 5)])
    assert kind.stages == (0, 1) and kind.places == (("3",), ("5",))
    spelling = Spelling(frozenset((c.name, c.key) for c in kind.fields))
    assert [spelling.constant(c) for c in kind.code] == ["64", "at.x1"]


def test_members_of_structs_are_literals_or_pointers_to_members() -> None:
    codes = [(ir.parameter("in", 0), ir.parameter("out", k), ir.ring(k, 4)) for k in range(2)]
    (kind,) = kinds(codes)
    spelling = Spelling(frozenset((c.name, c.key) for c in kind.fields))
    assert [spelling.constant(c) for c in kind.code] == ["p.in0", "p.*at.out0", "(header.*at.ring0)"]
    assert kind.places == (("&Params::out0", "&Header::queue0"), ("&Params::out1", "&Header::queue1"))
    assert [Spelling().constant(c) for c in kinds(codes, share=False)[1].code] == ["p.in0", "p.out1", "(header.queue1)"]


def test_a_constant_with_two_values_is_an_error() -> None:
    with pytest.raises(AssertionError, match="x of 0 is 1 and 2"):
        kinds([(ir.number("x", 0, 1), ir.number("x", 0, 2)), ()])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (let(1, "exp2({0})", 7), let(4, "exp2({0})", 3)),
        (st.QueueCall(Ref("queue", 3), "wr_release"), st.QueueCall(Ref("queue", 8), "wr_release")),
        ((let(12, "f({0})", 2), let(13, "f({0})", 12)), (let(2, "f({0})", 5), let(3, "f({0})", 2))),
        (ir.ToPanel(-1, Ref("panel", 2, "x")), ir.ToPanel(-1, Ref("panel", 14, "x"))),
        (st.LoadRow(Ref("r", 1), rows(3, "float32")), st.LoadRow(Ref("r", 2), rows(0, "float32"))),
    ],
)
def test_stages_that_differ_in_the_numbers_of_their_names_are_equal(one: Any, other: Any) -> None:
    assert len(kinds([one, other])) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (let(1, "exp2({0})", 2), let(1, "exp1({0})", 2)),
        (st.LoadRow(Ref("r", 1), rows(1, "bfloat16")), st.LoadRow(Ref("r", 1), rows(1, "float16"))),
        (let(1, "{0}", 2, dtype="int32"), let(1, "{0}", 2, dtype="uint32")),
        ((let(1, "{0}", 2), let(3, "{0}", 1)), (let(1, "{0}", 2), let(3, "{0}", 2))),
        (let(1, "{0} + {1}", 1, 2), let(1, "{0} + {1}", 2, 2)),
        (st.Entry(Ref("pop", 1), Ref("queue", 1), 8), st.Entry(Ref("pop", 1), Ref("queue", 1), 4)),
        (ir.ToPanel(-1, Ref("panel", 2, "x")), ir.ToPanel(-1, Ref("panel", 2, "y"))),
        (ir.Literal("from_bits(0x35800000u)"), ir.Literal("from_bits(0x35000000u)")),
        (st.QueueCall(Ref("queue", 1), "wr_acquire"), st.QueueCall(Ref("queue", 1), "rd_acquire")),
    ],
)
def test_stages_that_do_something_else_are_not_equal(one: Any, other: Any) -> None:
    assert len(kinds([one, other])) == 2


def test_a_table_of_types_of_constants_is_part_of_the_code() -> None:
    assert len(kinds([(ir.number("x", 0, 1),), (ir.number("x", 0, 1, "i64"),)])) == 2


# -- what it computes


def check_same_bits(what: str, rows: int, arrangement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, found = planned(what, rows)
    plan = found[arrangement]
    shared = Kernel(of, plan)

    def unshared(call: Program, plans: tuple[Plan, ...], name: str) -> lower.Kernel:
        assert call.only is not None
        return lower.generate_kernel(call.only, arrangement_of(plans[0], call.only), name, share=False)

    monkeypatch.setattr(lower, "_cached_kernel", unshared)
    apart = Kernel(of, plan)
    assert functions(shared.code.kernel.source) < functions(apart.code.kernel.source)
    want = apart(seed=1)
    for seed in (1, 2):
        for k, (a, b) in enumerate(zip(shared(seed=seed), want, strict=True)):
            assert a.tobytes() == b.tobytes(), f"result {k} differs under seed {seed}"


@pytest.mark.parametrize(
    ("what", "arrangement"), [("forward", "sm90-spatial-cluster-lanes1"), ("train", "sm90-spatial-l2-lanes2-gradients2")]
)
def test_shared_stages_give_the_bits_of_separate_ones(what: str, arrangement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same_bits(what, 130, arrangement, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 65, 257])
@pytest.mark.parametrize(
    ("what", "arrangement"),
    [*(("forward", a) for a in (*FORWARD, *L2)), *(("train", a) for a in L2), *(("train", f"{a}-gradients2") for a in L2)],
)
def test_shared_stages_give_the_bits_of_separate_ones_everywhere(
    what: str, rows: int, arrangement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same_bits(what, rows, arrangement, monkeypatch)
