"""The machine code of generated kernels, as both compilers of ``cuda_compilers`` make it: what a plan promises is in it, nobody
touches the registers of a matrix product in flight, and nothing lives in local memory.

Nothing runs here. NVRTC compiles the kernels of ``cuda_cases`` and the benchmarks' applications, cuobjdump disassembles them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from benchmarks.apps import APPS
from benchmarks.training import TRAIN_STEPS, State
from kernel_checks import sass
from kernel_checks.lint import InFlight, Skipped, flow, in_flight, skipped
from kernel_checks.sass import Sass
from kitsune_jax.frontend import lowering
from kitsune_jax.planning.plan import Plan
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc
from kitsune_jax.targets.cuda.arrangement import Arrangement, arrangement_of
from kitsune_jax.targets.cuda.lower import Kernel
from tests.cuda.test_lowering import kernels_in
from tests.support.cuda_cases import DTYPES, FAMILIES
from tests.support.cuda_compilers import COMPILERS, NEWEST, folder_of
from tests.support.cuda_run import Arrangements, Subject, arrangements, kernel_cache, subject  # noqa: F401  (a fixture)
from tests.support.cuda_training_cases import TRAINING

pytestmark = [
    pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler"),
    pytest.mark.usefixtures("kernel_cache"),
]

ROWS = 2000
PORTABLE = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# What ptxas says with a number is a complaint (C7507: setmaxnreg ignored; C7508 to C7520: wgmma serialised or waited for early).
COMPLAINT = re.compile(r"\(C7\d\d\d\)|\bwarning\b", re.IGNORECASE)
# All but "dense", of which the largest region that is legal streams over the columns of the weights.
NETWORKS = [name for name in FAMILIES if name != "dense"]


@dataclasses.dataclass(frozen=True)
class Made:
    """A kernel with what it was made from and what became of it."""

    arrangement: Arrangement
    kernel: Kernel
    cubin: bytes
    log: str
    code: Sass
    resources: sass.Resources
    products: InFlight
    skipped: tuple[Skipped, ...]


def made(of: Subject, plan: Plan, compiler: str = NEWEST, arch: str | None = None) -> Made:
    program = of.program(plan)
    asked = arrangement_of(plan, program)
    generated = lower.generate_kernel(program, asked, "region")
    result = compilers.cubin(generated.source, arch or ("sm_90a" if asked.sm == 900 else "sm_80"), folder_of(compiler))
    resources = sass.resources(result.log, result.cubin)
    code = sass.disassemble(result.cubin, "kitsune_region")
    # Nothing is asynchronous in the portable kernels' products, and the lint knows no later generation's opcodes.
    paths = flow(code.instructions if asked.sm == 900 else ())
    return Made(asked, generated, result.cubin, result.log, code, resources, in_flight(paths), skipped(paths))


def promised(a: Arrangement, source: str) -> set[str]:
    """Opcodes without which a kernel with this arrangement is not what the plan paid for."""
    found = set[str]()
    products, weights = bool(re.search(r"\bProduct<", source)), bool(re.search(r"stream_weights|fetch_resident", source))
    found |= {"HMMA."} if "RowProduct<" in source else set()
    found |= {"LDGSTS."} if "copy_async<" in source else set()
    if a.sm < 900:
        found |= {"HMMA.", "LDSM."} if products else set()
        found |= {"LDGSTS.", "ARRIVES.LDGSTSBAR"} if weights else set()
    else:
        found |= {"HGMMA."} if products else set()
        if weights:
            multicast = a.cluster > 1 and not all(a.resident)
            found |= {"UBLKCP.S.G.MULTICAST" if multicast else "UBLKCP.S.G"}
        found |= {"USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC"} if a.lanes > 1 else set()
        found |= {"UCGABAR_ARV", "UCGABAR_WAIT"} if a.cluster > 1 else set()
        found |= {"STAS"} if "cluster" in a.places else set()  # st.async
    found |= {"LDG.E.STRONG.GPU"} if "l2" in a.places else set()  # flags, polled in the L2
    return found


def check_promises(one: Made) -> None:
    missing = {opcode for opcode in promised(one.arrangement, one.kernel.source) if one.code.count(opcode) == 0}
    assert not missing, f"no {missing} in {sorted({i.opcode for i in one.code.instructions})}"


def check_products(code: InFlight, skips: tuple[Skipped, ...]) -> None:
    """What would make results wrong, or every product wait for the one before, although the source is right."""
    assert not skips, "\n".join(map(str, skips))
    assert not code.hazards, "\n".join(map(str, code.hazards))
    assert not code.serialised
    assert code.empty == 0


def check(one: Made) -> None:
    """Everything that is asked of a kernel that a planner picks."""
    check_promises(one)
    check_products(one.products, one.skipped)
    complaints = [line for line in one.log.splitlines() if COMPLAINT.search(line)]
    assert not complaints, complaints
    assert not one.code.has_local_memory, (
        f"{one.code.stack} bytes of stack, {one.code.count('LDL')} LDL, {one.code.count('STL')} STL"
    )
    assert one.resources.spill_bytes == one.resources.stack_bytes == 0
    # One wait for each group of wgmma: any other was put in by ptxas, which then serialises.
    if one.arrangement.sm == 900:
        assert one.code.count("WARPGROUP.DEPBAR") <= one.code.count("HGMMA.")


@functools.cache
def of_family(name: str, dtype: str) -> Subject:
    family = FAMILIES.get(name) or TRAINING[name]
    of = subject(family.function, *family.shapes(ROWS, dtype))
    assert of.region.space.rows == ROWS
    return of


@functools.cache
def plans(name: str, dtype: str) -> Arrangements:
    return arrangements(of_family(name, dtype))


# --- every arrangement


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "family, dtype, arrangement",
    [
        ("edge-update-small", "bfloat16", "sm90-vertical-resident-lanes3"),
        ("edge-update-small", "float32", "sm90-vertical-streamed-cluster2-lanes2"),
        ("edge-update-small", "float16", "sm90-spatial-cluster-lanes1"),
        ("edge-phase-small", "bfloat16", "sm90-vertical-resident-lanes2"),
        ("edge-phase-small", "float32", "sm90-vertical-streamed-cluster1-lanes2"),
        ("interaction-small", "float32", "sm80-vertical-resident-lanes1"),
        ("interaction", "bfloat16", "sm90-vertical-resident-lanes2"),
        ("interaction", "float32", "sm90-vertical-resident-lanes2"),
        ("edge-phase-small", "bfloat16", "sm90-vertical-resident-lanes2-unordered"),
        ("heads", "bfloat16", "sm90-vertical-resident-lanes3"),
        ("mlp", "float32", "sm90-vertical-streamed-cluster1-lanes1"),
        ("swiglu-small", "bfloat16", "sm90-spatial-l2-lanes1"),
        ("swiglu-small", "float16", "sm90-vertical-streamed-cluster1-lanes1"),
        ("loss", "bfloat16", "sm90-vertical-resident-lanes2"),
        ("loss", "float32", "sm80-vertical-resident-lanes1"),
        ("nerf-small", "bfloat16", "sm90-vertical-resident-lanes3"),
        ("swiglu-small", "bfloat16", "sm80-vertical-streamed-cluster1-lanes1"),
        ("mlp", "bfloat16", "sm80-spatial-l2-lanes1"),
        # Half of A is zero: a compiler that knows the zeros uses their registers while the product is in flight.
        ("narrow", "bfloat16", "sm90-vertical-resident-lanes2"),
        ("narrow", "float16", "sm90-spatial-cluster-lanes2"),
    ],
)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_arrangement_becomes_the_instructions_it_was_planned_for(
    family: str, dtype: str, arrangement: str, compiler: str
) -> None:
    check(made(of_family(family, dtype), plans(family, dtype)[arrangement], compiler))


# Kernels of which ptxas says C7512 and waits for each product before the next one: 64 x 256 float32 values and a product beside
# them do not fit its registers. The results are right. One that is mended must leave this list.
SERIALISED = {
    *(("nerf", "float32", f"sm90-spatial-l2-lanes{lanes}") for lanes in (2, 3)),
    *(("nerf", dtype, "sm90-spatial-l2-lanes3") for dtype in ("bfloat16", "float16")),
}


@pytest.mark.slow
@pytest.mark.parametrize("family, dtype", [(name, dtype) for name in NETWORKS for dtype in FAMILIES[name].dtypes])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_arrangement_of_every_family(family: str, dtype: str, compiler: str, subtests: Any) -> None:
    """Whether they spill is not asked here: some do, and docs/kernels.md has the numbers."""
    for name, plan in plans(family, dtype).items():
        with subtests.test(arrangement=name):
            one = made(of_family(family, dtype), plan, compiler)
            check_promises(one)
            known = (family, dtype, name) in SERIALISED
            assert one.products.serialised == known
            skips = one.skipped if one.code.count("CALL") == 0 else ()  # as of training steps, below
            check_products(dataclasses.replace(one.products, serialised=False), skips)


# --- training steps

GRADIENT = re.compile(r"\bGradient<(?P<type>\w+), \d+, \d+, \d+, \d+, (?P<columns>\d+), \w+>")
TRANSPOSED = re.compile(r"x(?P<columns>\d+)x16\b.*\.tnspA\.tnspB")


def check_gradients(one: Made) -> None:
    """Rows are what a weight gradient contracts: the tensor core, or ldmatrix, transposes 16-bit operands on their way."""
    gradients = list(GRADIENT.finditer(one.kernel.source))
    assert gradients, "the kernel has no weight gradient"
    opcodes = {i.opcode for i in one.code.instructions}
    if gradients[0]["type"] == "Tf32":  # wgmma transposes none of 32 bits
        assert any(o.startswith("HMMA.") and o.endswith("TF32") for o in opcodes)
    elif one.arrangement.sm < 900:
        assert any(o.startswith("LDSM.") and ".MT88" in o for o in opcodes)
    else:
        products = [found for i in one.code.instructions if (found := TRANSPOSED.search(i.operands))]
        assert {p["columns"] for p in products} == {g["columns"] for g in gradients}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family, dtype, arrangement",
    [
        ("tanh-step", "bfloat16", "sm90-vertical-resident-lanes2"),
        ("tanh-step", "bfloat16", "sm80-vertical-resident-lanes1"),
        ("labels-step", "bfloat16", "sm90-spatial-cluster-lanes1"),
        pytest.param("silu-step", "float32", "sm90-spatial-l2-lanes1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_training_step_becomes_transposed_products_without_local_memory(
    family: str, dtype: str, arrangement: str, compiler: str
) -> None:
    one = made(of_family(family, dtype), plans(family, dtype)[arrangement], compiler)
    check(one)
    check_gradients(one)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in TRAINING if name != "rms-norm-step"])  # it has no matrix product
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_arrangement_of_every_training_step(family: str, dtype: str, compiler: str, subtests: Any) -> None:
    """Whether they spill is not asked here, but wgmma must run as it was issued."""
    for name, plan in plans(family, dtype).items():
        with subtests.test(arrangement=name):
            one = made(of_family(family, dtype), plan, compiler)
            check_promises(one)
            # Behind a call (a division's slow path) the lint does not know which caller threads return to, so that every branch
            # in front of any of the calls seems to divide them. The emulator asks for whole warps at every shuffle and barrier.
            check_products(one.products, one.skipped if one.code.count("CALL") == 0 else ())
            check_gradients(one)
            assert not COMPLAINT.search(one.log), one.log


# --- what the planner picks


def picked(name: str, mode: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, compilers.Compiled]:
    """The kernels of an application by their source, as lowering for a GPU that is not there makes them. ``mode``: "infer", or how
    a training step is pipelined (see ``benchmarks.training``)."""
    results: dict[str, compilers.Compiled] = {}
    real = compilers.cubin

    def cubin(source: str, arch: str) -> compilers.Compiled:
        assert arch == "sm_90a"
        made = real(source, arch)
        return made if source == lower.PACKER else results.setdefault(source, made)

    monkeypatch.setattr(compilers, "cubin", cubin)
    lowering._routed.cache_clear()  # another test of this process may have lowered the same application
    app = APPS[name]
    params = {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in app.shapes.items()}
    x = jax.ShapeDtypeStruct((max(app.rows), app.width), dtype)
    if mode == "infer":
        traced = jax.jit(kj.pipeline(app.function, strict=True)).trace(params, x)
    else:
        moments = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in app.shapes.items()}
        state = State(params, moments, moments, jax.ShapeDtypeStruct((), jnp.int32))
        traced = TRAIN_STEPS[mode](app.function).trace(state, x, jax.eval_shape(app.function, params, x))
    images = [one.image for one in kernels_in(traced.lower(lowering_platforms=("cuda",)))]
    monkeypatch.setattr(compilers, "cubin", real)
    assert set(images) == {one.cubin for one in results.values()}
    return results


@pytest.mark.parametrize(
    "app, dtype",
    [
        ("mgn", "bfloat16"),
        *(
            pytest.param(app, dtype, marks=pytest.mark.slow)
            for app in ("nerf", "mgn")
            for dtype in DTYPES
            if (app, dtype) != ("mgn", "bfloat16")
        ),
    ],
)
def test_what_the_planner_picks_is_tensor_code_without_local_memory(app: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = picked(app, "infer", jnp.dtype(dtype), monkeypatch)
    assert kernels
    for source, newest in kernels.items():
        for compiler in COMPILERS:
            one = newest if compiler == NEWEST else compilers.cubin(source, "sm_90a", folder_of(compiler))
            code = sass.disassemble(one.cubin, "kitsune_region")
            assert code.count("HGMMA.") > 0 and code.count("UBLKCP.S.G") > 0
            assert not COMPLAINT.search(one.log), one.log
            assert not code.has_local_memory, f"{code.stack} bytes of stack"
            paths = flow(code.instructions)
            check_products(in_flight(paths), skipped(paths))


@pytest.mark.slow
@pytest.mark.parametrize("app", ["nerf", "mgn"])
@pytest.mark.parametrize("mode", ["network", "whole"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_steps_that_the_planner_picks_run_as_they_were_issued(
    app: str, mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch, subtests: Any
) -> None:
    """Some spill, and docs/kernels.md says which; none may touch a product in flight, or wait for each."""
    kernels = picked(app, mode, jnp.dtype(dtype), monkeypatch)
    assert kernels
    for source, newest in kernels.items():
        for compiler in COMPILERS:
            with subtests.test(kernel=source.partition("\n")[0], compiler=compiler):
                one = newest if compiler == NEWEST else compilers.cubin(source, "sm_90a", folder_of(compiler))
                assert not COMPLAINT.search(one.log), one.log
                paths = flow(sass.disassemble(one.cubin, "kitsune_region").instructions)
                check_products(in_flight(paths), skipped(paths))


def test_the_loop_over_tiles_stands_once() -> None:
    """13.0 unrolls a loop whose number of rounds has a bound that it knows, whatever the pragma says: 33 times for 32 tiles."""
    plan = plans("nerf", "bfloat16")["sm90-vertical-streamed-cluster2-lanes2"]
    products = [made(of_family("nerf", "bfloat16"), plan, compiler).code.count("HGMMA.") for compiler in COMPILERS]
    assert 0 < products[0] == products[1]


# --- the portable path


@pytest.mark.parametrize("arch", PORTABLE)
def test_the_portable_path_compiles_for_every_architecture(arch: str) -> None:
    one = made(of_family("loss", "bfloat16"), plans("loss", "bfloat16")["sm80-vertical-resident-lanes1"], arch=arch)
    check(one)
    assert f"'{arch}'" in one.log


# --- the cubin as a thing to ship


def test_names_for_the_emulator_are_not_shipped() -> None:
    """Barriers have names for the emulator's messages; a device has no messages, and its modules need not load strings."""
    one = made(of_family("edge-update-small", "bfloat16"), plans("edge-update-small", "bfloat16")["sm90-spatial-cluster-lanes1"])
    assert '"resident"' in one.kernel.source and b"resident\0" not in one.cubin


@pytest.mark.slow
def test_a_nerf_compiles_in_seconds() -> None:
    """A first call waits for it. Seconds of this process's own time: others may load the machine."""
    plan = plans("nerf", "bfloat16")["sm90-vertical-streamed-cluster2-lanes2"]
    of = of_family("nerf", "bfloat16")
    program = of.program(plan)
    source = lower.generate_kernel(program, arrangement_of(plan, program), "region").source
    nvrtc.compile('extern "C" __global__ void kitsune_region() {}', "sm_90a")  # the first call in a process loads the compiler
    start = time.process_time()
    nvrtc.compile(source, "sm_90a")
    assert time.process_time() - start < 10.0
