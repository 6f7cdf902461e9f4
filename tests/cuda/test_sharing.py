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
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets import cuda
from kitsune_jax.targets.cuda import kernel, lower
from kitsune_jax.targets.cuda.sharing import Constants, Kind, StageCode, kinds
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
        return jnp.asarray(rng.standard_normal(shape) * scale, jnp.bfloat16)

    params = [p for _ in range(LAYERS) for p in (normal(WIDTH, WIDTH, scale=WIDTH**-0.5), normal(WIDTH, scale=0.1))]
    return subject(FUNCTIONS[what], *params, normal(rows, WIDTH), normal(rows, WIDTH))


@functools.lru_cache(maxsize=4)
def planned(what: str, rows: int) -> tuple[Subject, dict[str, Plan]]:
    of = case(what, rows)
    found = arrangements(of)
    if what == "train":
        found |= {f"{name}-gradients2": split_gradients(of, found[name]) for name in L2}
    return of, found


def split_gradients(of: Subject, plan: Plan) -> Plan:
    """Stages that nobody reads, which are those of weight gradients, over two CTAs each."""
    read = {q.producer for q in plan.queues}
    stages = tuple(s if k in read else dataclasses.replace(s, split=2, workers=2) for k, s in enumerate(plan.stages))
    split = dataclasses.replace(plan, stages=stages)
    assert cuda.check(of.program(split), split, "region") is None
    return split


def generate(of: Subject, plan: Plan, share: bool) -> kernel.Kernel:
    program = of.program(plan)
    return kernel.generate(program, lower.arrangement(plan, program), "region", share)


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
    for field in ("launch", "inputs", "weights", "order", "vectors", "workspace_bytes", "registers"):
        assert getattr(one, field) == getattr(other, field)


def test_a_kernel_of_one_stage_has_no_tables() -> None:
    of, found = planned("forward", 130)
    plan = next(p for p in found.values() if p.arrangement == "vertical")
    assert generate(of, plan, True).source == generate(of, plan, False).source


# -- which stages are equal


def code(text: str, *numbers: int, split: int = 1) -> StageCode:
    """A stage whose text has {0}, {1}, ... where the constants stand."""
    constants = Constants()
    line = text.format(*(constants.number("x", k, n) for k, n in enumerate(numbers)))
    return StageCode((line,), (), split, tuple(constants.found.values()))


def test_constants_that_agree_are_literals_and_others_are_fields() -> None:
    (kind,) = kinds([code("f({0}, {1});", 64, 3), code("f({0}, {1});", 64, 5)])
    assert kind == Kind((0, 1), ("f(64, at.x1);",), (), kind.fields, (("3",), ("5",)))
    assert [field.name for field in kind.fields] == ["x1"]


def test_members_of_structs_are_literals_or_pointers_to_members() -> None:
    codes = []
    for k in range(2):
        constants = Constants()
        line = f"f({constants.parameter('in0')}, {constants.parameter(f'out{k}')}, {constants.ring(f'queue{k}', 4)}[group]);"
        codes.append(StageCode((line,), (), 1, tuple(constants.found.values())))
    (kind,) = kinds(codes)
    assert kind.consume == ("f(p.in0, p.*at.out0, (header.*at.ring0)[group]);",)
    assert kind.places == (("&Params::out0", "&Header::queue0"), ("&Params::out1", "&Header::queue1"))
    assert kinds(codes, share=False)[1].consume == ("f(p.in0, p.out1, (header.queue1)[group]);",)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("float v1 = exp2(v7);", "float v4 = exp2(v3);"),
        ("u32 w_q3[4]; queue3.push(n, 0, w_q3);", "u32 w_q8[4]; queue8.push(n, 0, w_q8);"),
        ("d12_0_product.feed(v12); d12_1_weights", "d2_0_product.feed(v2); d2_1_weights"),
        ("panel2x.put(panel2y); sum2", "panel14x.put(panel14y); sum14"),
        ("in3_row[h]; o3; out3_row", "in0_row[h]; o5; out5_row"),
    ],
)
def test_stages_that_differ_in_the_numbers_of_their_names_are_equal(one: str, other: str) -> None:
    assert len(kinds([code(one), code(other)])) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("exp2(v1)", "exp1(v1)"),
        ("log1p(v1)", "log2(v1)"),
        ("load_row<Bf16>(v1)", "load_row<F16>(v1)"),
        ("const i32 v1 = 0;", "const i64 v1 = 0;"),
        ("v1 = v2; v3 = v1;", "v1 = v2; v3 = v2;"),
        ("v1 = d1_0;", "v1 = d2_0;"),
        ("queue1.pop(n, 8);", "queue1.pop(n, 4);"),
        ("p.weights0", "p.weights1"),
        ("f(0x35800000u)", "f(0x35000000u)"),
    ],
)
def test_stages_that_do_something_else_are_not_equal(one: str, other: str) -> None:
    assert len(kinds([code(one), code(other)])) == 2


def test_stages_split_over_other_numbers_of_ctas_are_not_equal() -> None:
    assert len(kinds([code("f(slab);", split=2), code("f(slab);", split=4), code("f(slab);", split=2)])) == 2


# -- what it computes


def check_same_bits(what: str, rows: int, arrangement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, found = planned(what, rows)
    plan = found[arrangement]
    shared = Kernel(of, plan)

    def unshared(program: TileProgram, plan: Plan, name: str) -> kernel.Kernel:
        return kernel.generate(program, lower.arrangement(plan, program), name, share=False)

    monkeypatch.setattr(lower, "_kernel", unshared)
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
