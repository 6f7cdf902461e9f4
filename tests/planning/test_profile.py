"""Machine profiles: what they are, who measures them when, and what a plan does with them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _compat, _cpu, config
from kitsune_jax.cache import unseal
from kitsune_jax.cli import machine as command
from kitsune_jax.cli.main import main
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.targets.cpu.planning import machines
from kitsune_jax.targets.cpu.planning.machines import cpu_at_hand, cpu_of
from kitsune_jax.targets.cpu.profile import kernels, measure, store, xla
from kitsune_jax.targets.cpu.profile import profile as shipped
from kitsune_jax.targets.cpu.profile.profile import MachineProfile, numbers_of

REFERENCE = shipped.shipped("zen5-2")


@pytest.fixture(autouse=True)
def _own_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No profile is known, none is on disk, and none is named."""
    monkeypatch.delenv("KITSUNE_PROFILE")
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_known", {})


def named(name: str, **changes: Any) -> MachineProfile:
    return dataclasses.replace(REFERENCE, name=name, **changes)


def network(params: list[Any], x: Any) -> Any:
    for w in params:
        x = jax.nn.relu(x @ w)
    return x


def small() -> tuple[list[Any], Any]:
    return [jnp.ones((64, 64))] * 3, jnp.ones((4001, 64))


# -- the data


def test_a_profile_is_json_and_back() -> None:
    found = named("measured-here-2", passes=3, doubtful=(("touch", 1.5),))
    assert MachineProfile.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"numbers": {"touch": -1.0}},
        {"numbers": {"touch": float("nan")}},
        {"workers": 0},
        {"l2": "much"},
        {"passes": "two"},
        {"doubtful": None},
        {"doubtful": {"touch": 0.5}},
        {"more": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_profile_is_refused(change: dict[str, Any]) -> None:
    data = json.loads(REFERENCE.to_json()) | change
    with pytest.raises(ValueError):
        MachineProfile.from_json(json.dumps(data))


@pytest.mark.parametrize("family", shipped.FAMILIES)
@pytest.mark.parametrize("cores", [1, 2, 16, 192])
def test_every_shipped_profile_plans(family: str, cores: int) -> None:
    profile = shipped.shipped(f"{family}-{cores}")
    assert profile.workers == cores and MachineProfile.from_json(profile.to_json()) == profile
    machine = cpu_of(profile)
    assert machine.workers == cores and machine.dram_bandwidth > 0
    graph = graph_of(network, *small())
    assert route(graph, "cpu", RouteOptions(force=True, device=profile.name, code=False)).regions


def test_shipped_profiles_have_the_products_of_their_instruction_set() -> None:
    for name in shipped.FAMILIES:
        profile = shipped.shipped(f"{name}-4")
        ways = {key.split("/")[2] for key, _ in profile.numbers if key.startswith("gemm/bfloat16/")}
        assert ways == {"widened"} | ({"dots"} & kernels_of(profile.isa)) | ({"tiles"} & kernels_of(profile.isa)), name


def kernels_of(isa: str) -> set[str]:
    return {way for way, isas in (("dots", kernels.DOTS), ("tiles", kernels.TILES)) if isa in isas}


def test_an_unknown_profile_names_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_PROFILE", "zen6-2")
    with pytest.raises(ValueError, match=r"KITSUNE_PROFILE='zen6-2' is no profile: use <family> or <family>-<cores>.*zen5"):
        cpu_at_hand()
    with pytest.raises(ValueError, match=r"'zen6-2' is not a CPU profile: write <family>-<cores>.*zen5"):
        shipped.shipped("zen6-2")
    assert tuple(shipped.FAMILIES) == config.CPU_FAMILIES


def test_a_family_stands_for_the_cores_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_PROFILE", "avx2")
    monkeypatch.setenv("KITSUNE_NUM_THREADS", "6")
    assert cpu_at_hand().name == "avx2-6"


# -- measuring


class EverythingTakesAMicrosecond:
    """An extension on whose machine every piece of work takes as long, however many threads do it."""

    def isa(self) -> str:
        return "generic"

    def __getattr__(self, name: str) -> Callable[..., list[float]]:
        return lambda *args: [1e-6] * 3


def test_more_workers_than_were_measured_share_the_memory() -> None:
    """Sixteen threads are measured: a larger machine has their bandwidth of memory, and a cache for each of its own cores."""
    few, many = (cpu_bandwidths(workers) for workers in (16, 64))
    assert many["dram"] == pytest.approx(few["dram"]) and many["touch"] == pytest.approx(few["touch"])
    assert many["l2"] == pytest.approx(4 * few["l2"])


def cpu_bandwidths(workers: int) -> dict[str, float]:
    pieces = kernels.pieces(EverythingTakesAMicrosecond(), workers)
    found = kernels.numbers(pieces, {piece.key: piece.seconds() for piece in pieces})
    return {name: workers / found[key] for name, key in (("dram", "copy/dram"), ("touch", "touch/huge"), ("l2", "copy/l2"))}


def test_this_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number that a plan may ask for is there, whatever else the machine does meanwhile, and whatever the program that asks
    has set."""
    monkeypatch.setattr(measure, "_KEPT", (1.0, 0.0))
    monkeypatch.setattr(kernels, "_MOST_PASSES", 1)  # and one of our own pieces before it, whether they agree or not
    params, x = small()
    with (
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.transfer_guard("disallow"),
        jax.numpy_dtype_promotion("strict"),
    ):
        y = jax.jit(kj.pipeline(network))(params, x)
    np.testing.assert_array_equal(y, jax.jit(network)(params, x))
    assert len(store._known) == 1 and not kj.fallbacks()
    profile = store.stored(config.num_threads())
    assert (profile.isa, profile.workers) == (_cpu.isa(), config.num_threads())
    reference = {key for key, _ in shipped.shipped(f"{'zen5' if profile.isa == 'avx512bf16' else profile.isa}-2").numbers}
    assert {key for key, _ in profile.numbers} == reference


# -- who measures when


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The groups that were measured, by a stand-in that returns the reference; ``None`` for all in one."""
    calls: list[str | None] = []

    def stand_in(workers: int, group: str | None = None, known: MachineProfile | None = None) -> MachineProfile:
        calls.append(group)
        return dataclasses.replace(of_reference(group), name="measured-here-2", workers=workers, made="anew")

    monkeypatch.setattr(store, "measure", stand_in)
    return calls


def of_reference(group: str | None) -> MachineProfile:
    """The numbers of one group, or all."""
    return named("reference", numbers=tuple((k, v) for k, v in REFERENCE.numbers if group in (None, measure.group_of(k))), passes=2)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_known", {})
    machines.cpu_of.cache_clear()
    machines.times.cache_clear()
    shipped.table.cache_clear()


def test_a_number_is_measured_once_with_its_group_and_kept(measured: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    profile = store.at_hand()
    assert not measured
    assert profile.seconds("touch") == REFERENCE.seconds("touch") and measured == ["kernels"]
    assert profile.seconds("copy/dram") == REFERENCE.seconds("copy/dram") and measured == ["kernels"]
    another_process(monkeypatch)
    assert store.at_hand() == profile and store.at_hand().seconds("touch") == REFERENCE.seconds("touch")
    assert measured == ["kernels"]


def test_a_group_comes_behind_those_whose_numbers_are_subtracted_from_its_own(measured: list[str | None]) -> None:
    store.at_hand().seconds("take/l2/16")
    assert measured == ["kernels", "calls", "rows"]


def test_a_number_that_no_machine_has_is_a_key_error(measured: list[str | None]) -> None:
    with pytest.raises(KeyError):
        store.at_hand().seconds("gemm/float32/widened/3x3")
    assert store.at_hand().get("no number") is None and not measured


def test_a_program_measures_what_it_needs(measured: list[str | None]) -> None:
    """A network in float32 needs no number of 16-bit operands, of indices, of loops, nor of functions that it does not have."""
    route(graph_of(network, *small()), "cpu", RouteOptions(code=False))
    assert measured and not [g for g in measured if re.search("float16|bfloat16|float64|rows|while|picked|erf|pow", str(g))]


def test_numbers_are_the_same_measured_in_groups_and_in_one() -> None:
    rng = np.random.default_rng()
    raw = {key: rng.uniform(1e-9, 1e-6) for key, _ in REFERENCE.numbers}
    whole, known = dict(raw), {}
    measure._subtract_other_work(whole, {})

    def add(group: str) -> None:
        for before in measure.groups_before(group):
            add(before)
        numbers = {key: seconds for key, seconds in raw.items() if measure.group_of(key) == group}
        measure._subtract_other_work(numbers, known)
        known.update(numbers)

    for group in sorted({measure.group_of(key) for key in raw}, reverse=True):
        add(group)
    assert known == whole


def test_explain_names_the_profile(measured: list[str | None]) -> None:
    assert f"planned for cpu, measured-{shipped.slug()}-{config.num_threads()}" in str(kj.explain(kj.pipeline(network))(*small()))


def test_many_threads_measure_once(measured: list[str | None]) -> None:
    threads = [threading.Thread(target=lambda: store.at_hand().seconds("xla/while")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measured == ["kernels", "calls", "xla/while"]


def test_other_workers_other_flags_and_other_versions_are_measured_again(
    measured: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.identity(2)
    assert store.identity(3) != before
    for change in (
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false"),
        lambda patch: patch.setattr(jax, "__version__", "0.99"),
        lambda patch: patch.setattr(store.jaxlib, "__version__", "0.99"),
        lambda patch: patch.setattr("kitsune_jax.config.__version__", "9"),
        lambda patch: patch.setattr(store.profiles, "model_name", lambda: "another"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert store.identity(2) != before
    assert store.identity(2) == before


def test_the_key_of_a_kept_profile_knows_the_code_that_measures() -> None:
    assert len(store._measurement()) == 64, "a file of _MEASURING is not there"


def test_two_processes_measure_once(tmp_path: Path) -> None:
    program = """
import dataclasses, sys, time
from kitsune_jax.targets.cpu.profile import measure, profile as shipped, store
def stand_in(workers, group, known):
    with open(sys.argv[1], "a") as log:
        log.write(group + "\\n")
    time.sleep(0.5)
    reference = shipped.shipped("zen5-2")
    numbers = tuple((k, v) for k, v in reference.numbers if measure.group_of(k) == group)
    return dataclasses.replace(known, numbers=numbers)
store.measure = stand_in
print(store.at_hand().seconds("xla/while"))
"""
    log = tmp_path / "log"
    command = [sys.executable, "-c", program, str(log)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert {process.communicate(timeout=120)[0].strip() for process in running} == {str(REFERENCE.seconds("xla/while"))}
    assert log.read_text().split() == ["kernels", "calls", "xla/while"]


def test_an_interrupted_measurement_ends_the_process_as_ctrl_c_does() -> None:
    """Not with an abort, because a thread of Python's was in C++."""
    program = """
import os, signal, threading, time
import jax.numpy as jnp
import kitsune_jax as kj
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
def ctrl_c():  # while it measures: what interrupts an import or a trace may end in a callback that drops it
    while all(thread.name != "kitsune_jax profile" for thread in threading.enumerate()):
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=ctrl_c, daemon=True).start()
kj.explain(lambda x: x + 1)(jnp.ones(8))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    told = ended.stderr
    assert ended.returncode == -signal.SIGINT and "store.py" in told and told.endswith("KeyboardInterrupt\n"), told


def test_a_damaged_profile_is_measured_again(measured: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = store.at_hand()
    before.seconds("touch")
    (kept,) = (tmp_path / "cache" / "profiles").glob("*.profile.json")
    kept.write_bytes(kept.read_bytes().replace(b"touch", b"t0uch"))
    another_process(monkeypatch)
    assert store.at_hand().seconds("touch") and store.at_hand() != before and measured == ["kernels", "kernels"]


def test_a_cache_that_cannot_be_written_costs_a_warning(
    measured: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(blocked))
    with pytest.warns(RuntimeWarning, match="cannot keep measured machine profiles.*measured again in every process"):
        assert cpu_at_hand().profile.seconds("touch") == REFERENCE.seconds("touch")


def test_what_was_measured_beside_other_programs_is_used_and_not_kept(
    measured: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def busy(workers: int, group: str, known: MachineProfile) -> MachineProfile:
        raise store.Disturbed("other programs were running", of_reference(group))

    with monkeypatch.context() as patch:
        patch.setattr(store, "measure", busy)
        report = str(kj.explain(kj.pipeline(network))(*small()))
        assert report.count("not kept: other programs were running") == 1
        assert store.at_hand().seconds("touch") == REFERENCE.seconds("touch")
    (kept,) = tmp_path.rglob("*.profile.json")
    content = unseal(kept.read_bytes())
    assert content is not None and MachineProfile.from_json(content.decode()).numbers == ()
    another_process(monkeypatch)  # when they are gone
    assert store.at_hand().seconds("touch") and not store.notes() and measured == ["kernels"]


@pytest.mark.parametrize(("doubtful", "share", "kept"), [(0.05, 0.95, True), (0.05, 0.6, False), (0.2, 0.95, False)])
def test_doubtful_numbers_and_lost_cores_decide_whether_numbers_are_kept(
    doubtful: float, share: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found(kernels.Passes):
        def settle(self, pieces: Any, until: float, at_most: float) -> None:
            self.asked = sorted(piece.key for piece in pieces)

        def run(self, pieces: Any, until: float = 0.0) -> None:
            self.made += 1

        def seconds(self) -> dict[str, float]:
            return dict.fromkeys(self.asked, 1e-3)

        def doubtful(self) -> dict[str, float]:
            return dict.fromkeys(self.asked[: int(doubtful * len(self.asked))], 2.0)

    told = iter([(5.0, 7.0), (5.0 + share, 8.0 - share)])
    monkeypatch.setattr(measure.profiles, "ran_and_waited", lambda: next(told))
    monkeypatch.setattr(measure, "Passes", Found)
    monkeypatch.setattr(xla, "pieces", lambda workers, *_: [kernels.Piece(p.key, lambda: 1e-3) for p in xla.programs(workers)])
    try:
        profile: MachineProfile | None = measure.measure(2)
        assert kept
    except store.Disturbed as why:
        profile = why.profile
        assert not kept and f"had {share:.0%} of a core" in str(why) and "in each of 1 passes" in str(why)
    assert profile is not None and profile.passes == 1 and len(profile.doubtful) > 0


def test_a_measurement_that_fails_costs_no_program_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> list[kernels.Piece]:
        raise RuntimeError("the clock stands still")

    monkeypatch.setattr(xla, "pieces", broken)
    params, x = small()
    np.testing.assert_array_equal(jax.jit(kj.pipeline(network))(params, x), jax.jit(network)(params, x))
    (note,) = store.notes()
    assert "the clock stands still" in note and f"the shipped profile {store.shipped_name(config.num_threads())}" in note


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_has_its_parents_profile_and_no_lock(measured: list[str | None]) -> None:
    store.at_hand().seconds("touch")
    with store._lock, warnings.catch_warnings():  # as if another thread were measuring for other cores
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            store._known.clear()
            os._exit(0 if store.at_hand().seconds("touch") == REFERENCE.seconds("touch") and len(measured) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0


class KeyValues:
    """The key-value store of a distributed program."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]


def test_all_processes_of_a_program_plan_with_the_profile_of_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = KeyValues()
    profiles = []
    for index, speed in enumerate((1.0, 2.0)):
        own = numbers_of({k: v * speed for k, v in REFERENCE.numbers})
        monkeypatch.setattr(_compat, "distributed_client", lambda index=index: (index, shared))
        monkeypatch.setattr(store, "measure", lambda workers, group, known, own=own: dataclasses.replace(known, numbers=own))
        monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path / str(index)))
        monkeypatch.setattr(store, "_known", {})
        profiles.append(store.at_hand())
    assert profiles[0] == profiles[1] and dict(profiles[0].numbers)["touch"] == REFERENCE.seconds("touch")
    assert "process 0" in store.notes()[0]


def test_processes_that_cannot_agree_take_a_shipped_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "distributed_client", lambda: (1, KeyValues()))
    assert store.at_hand().name == store.shipped_name(config.num_threads())
    assert "DEADLINE_EXCEEDED" in store.notes()[0]


# -- what a plan does with it


def graph_of(function: Callable[..., Any], *args: Any) -> Any:
    from kitsune_jax.capture.jaxpr import capture

    return capture(jax.make_jaxpr(function)(*args)).graph


def test_a_virtual_machine_has_not_the_cache_of_a_whole_socket() -> None:
    mib = 1 << 20
    few, many = (cpu_of(named(f"socket-{n}", workers=n, l3=480 * mib)) for n in (2, 32))
    assert (few.shared_bytes, many.shared_bytes) == (64 * mib, 480 * mib)


def test_plans_are_a_pure_function_of_the_graph_and_the_profile() -> None:
    graph = graph_of(network, *small())
    plans = [route(graph, "cpu", RouteOptions(device="zen5-2", code=False)).regions for _ in range(2)]
    assert [r.plan for r in plans[0]] == [r.plan for r in plans[1]]


def test_slow_dots_are_left_for_widened_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """VDPBF16PS is half as fast as float32 on Intel, twice as fast on Zen 5."""
    params, x = [jnp.ones((64, 64), jnp.bfloat16)] * 3, jnp.ones((4001, 64), jnp.bfloat16)
    graph = graph_of(network, params, x)
    chosen = {}
    for speed in (0.5, 4.0):
        numbers = {k: v * speed if "/dots" in k else v for k, v in REFERENCE.numbers}
        profile = named("measured-here-2", numbers=numbers_of(numbers))
        monkeypatch.setattr(store, "_known", {(config.num_threads(), _cpu.isa()): store._FoundProfile(profile, ())})
        (region,) = route(graph, "cpu", RouteOptions(force=True, code=False)).regions
        chosen[speed] = region.plan.products[0]
    assert chosen == {0.5: "dots", 4.0: "widened"}


# -- the command


def test_the_command_prints_what_people_want_to_see(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "--shipped", "zen4-8"]) == 0
    told = capsys.readouterr().out
    assert "zen4-8" in told and "GF/s" in told and "GB/s" in told and "tanh" in told


@pytest.mark.parametrize(
    ("doubtful", "told"), [((), "in 3 passes, all numbers agree"), ((("call", 1.5), ("touch", 2.0)), "3 passes; .*: call, touch")]
)
def test_the_command_says_how_well_passes_agreed(doubtful: tuple[tuple[str, float], ...], told: str) -> None:
    assert re.search(told, command.text(named("measured-here-2", passes=3, doubtful=doubtful)))
    assert "passes" not in command.text(REFERENCE)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "--shipped", "avx2-4", "--json"]) == 0
    assert MachineProfile.from_json(capsys.readouterr().out) == shipped.shipped("avx2-4")


def test_the_command_measures_again(measured: list[str | None], capsys: pytest.CaptureFixture[str]) -> None:
    store.at_hand().seconds("touch")
    assert main(["machine", "--kept"]) == 0 and measured[0] == "kernels" and len(set(measured)) == len(measured) > 20
    assert main(["machine"]) == 0 and measured[-1] is None
    assert capsys.readouterr().out.count("measured-") == 2


def test_the_command_says_why_there_is_no_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def busy(workers: int) -> MachineProfile:
        raise store.Disturbed("other programs were running")

    monkeypatch.setattr(store, "measure", busy)
    assert main(["machine"]) == 1
    assert "other programs were running" in capsys.readouterr().err
    assert main(["machine", "--shipped", "fast"]) == 2
    assert "write <family>-<cores>" in capsys.readouterr().err
