"""How a machine is measured pass by pass, on machines that are not there: their clocks and their disturbances are made up."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kitsune_jax.targets.cpu.profile import kernels, measure, profile, xla

TRUE = {f"piece/{k}": 1e-4 * (1 + k % 7) for k in range(100)}
REFERENCE = 1e-4
REFERENCE_PROFILE = profile.shipped("zen5-2")


@dataclasses.dataclass
class Machine:
    """Pieces of work take what ``TRUE`` says, times ``slowness`` of the moment and of the piece's key."""

    slowness: Callable[[float, str], float] = lambda now, key: 1.0
    taken: Callable[[float], float] = lambda now: 0.0
    now: float = 1000.0
    ran: int = 0

    def piece(self, key: str) -> kernels.Piece:
        def seconds() -> float:
            self.ran += 1
            return self.work(TRUE[key], key)

        return kernels.Piece(key, seconds)

    def work(self, seconds: float, key: str) -> float:
        found = seconds * self.slowness(self.now, key)
        self.now += found
        return found

    def passes(self) -> kernels.Passes:
        return kernels.Passes(
            lambda: self.work(REFERENCE, "reference"), clock=lambda: self.now, stolen=lambda: self.taken(self.now), cores=2
        )

    def measure(self, seconds: float = 1.0, at_most: float = 4.0) -> kernels.Passes:
        found, pieces = self.passes(), [self.piece(key) for key in TRUE]
        found.run(pieces)
        self.now += 1.0  # while XLA compiles
        found.settle(pieces, self.now + seconds, self.now + at_most)
        return found


def worst(found: kernels.Passes) -> float:
    """Over the pieces, how many times as long as it takes a piece was found to take."""
    return max(seconds / TRUE[key] for key, seconds in found.seconds().items())


def test_a_quiet_machine_is_measured_in_two_passes() -> None:
    machine = Machine()
    found = machine.measure()
    assert (found.made, machine.ran, found.doubtful()) == (2, 2 * len(TRUE), {})
    assert found.seconds() == pytest.approx(TRUE)


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_a_few_percent_costs_no_pass(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = Machine(lambda now, key: rng.uniform(1.0, 1.06)).measure()
    assert found.made == 2 and worst(found) < 1.06


@pytest.mark.parametrize("factor", [1.5, 2.0, 5.0])
@pytest.mark.parametrize("begin", [0.0, 0.01, 1.0, 1.03])
def test_a_core_that_is_slow_for_a_while_is_told_by_the_reference(factor: float, begin: float) -> None:
    """Neighbouring pieces all take longer then: what they say agrees with nothing, and costs the passes that it takes."""
    found = Machine(lambda now, key: factor if begin <= now - 1000.0 < begin + 0.2 else 1.0).measure()
    assert worst(found) < 1.01 and not found.doubtful()


def test_two_slow_passes_are_not_taken_for_two_that_agree() -> None:
    """The first pass is slow from end to end, and the second one nearly: once the reference is faster, both count for nothing."""
    found = Machine(lambda now, key: 2.0 if now < 1001.15 else 1.0).measure()
    assert found.made > 2 and worst(found) < 1.01


def test_a_core_that_becomes_slow_in_the_middle_of_some_pieces_disturbs_all_of_them() -> None:
    machine = Machine()
    found, pieces = machine.passes(), [machine.piece(key) for key in list(TRUE)[:4]]
    begin = machine.now + REFERENCE + TRUE[pieces[0].key]  # behind the first one
    machine.slowness = lambda now, key: 2.0 if now >= begin - 1e-9 else 1.0
    found.run(pieces)
    machine.slowness = lambda now, key: 1.0
    found.run(pieces)
    assert list(found.doubtful()) == sorted(piece.key for piece in pieces)  # one clean repetition of each
    found.run(pieces)
    assert not found.doubtful() and found.seconds() == pytest.approx({p.key: TRUE[p.key] for p in pieces})


def test_a_few_doubtful_pieces_end_with_the_usual_time() -> None:
    """One piece of a hundred takes another time whenever it is asked."""
    rng = np.random.default_rng(0)
    machine = Machine(lambda now, key: rng.uniform(1.0, 1000.0) if key == "piece/7" else 1.0)
    found = machine.measure(seconds=0.5, at_most=1e9)
    assert list(found.doubtful()) == ["piece/7"] and machine.now < 1000 + 1.0 + 1.0


def test_half_speed_from_the_first_to_the_last_repetition_of_a_piece_is_taken_out() -> None:
    """Nothing is left to compare with, but the reference says by how much."""
    machine = Machine()
    found, (piece, *others) = machine.passes(), [machine.piece(key) for key in list(TRUE)[:20]]
    found.run(others)
    machine.slowness = lambda now, key: 2.0
    found.run([piece])
    assert found.seconds()[piece.key] == pytest.approx(TRUE[piece.key])
    assert piece.key in found.doubtful()


def neighbour(busy: float, seed: int) -> Callable[[float, str], float]:
    """Another program has a core now and then, and whoever wants it waits: that hits pieces, and not the reference, which is over
    between two of its turns."""
    rng = np.random.default_rng(seed)
    return lambda now, key: 1.0 if key == "reference" or rng.random() > busy else rng.uniform(1.2, 8.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_neighbour_costs_passes_and_not_the_numbers(seed: int) -> None:
    """A third of all repetitions take up to eight times as long. Four of them that do, and nearly as much, are one in thousands."""
    found = Machine(neighbour(1 / 3, seed)).measure()
    wrong = [key for key, seconds in found.seconds().items() if seconds > 1.2 * TRUE[key]]
    assert 4 <= found.made < 16 and len(wrong) <= 1 and len(found.doubtful()) <= 2


@pytest.mark.parametrize("seed", range(3))
def test_where_nothing_settles_the_numbers_are_doubtful(seed: int) -> None:
    rng = np.random.default_rng(seed)
    machine = Machine(lambda now, key: 1.0 if key == "reference" else rng.uniform(1.0, 1000.0))
    found = machine.measure(at_most=1.0)
    assert len(found.doubtful()) > kernels.MOST_DOUBTFUL * len(TRUE)
    assert machine.now < 1000 + 1.0 + 1.0 + 120  # two passes of all, and none after the last moment


def test_two_disturbed_repetitions_that_agree_do_not_settle_a_piece() -> None:
    times = iter([4.0, 2.0, 2.1, 1.0, 1.0, 1.02])
    found = Machine().passes()
    piece = kernels.Piece("a", lambda: next(times))
    settled = []
    for _ in range(6):
        found.run([piece])
        settled.append(found.is_settled(piece))
    assert settled == [False, False, False, False, False, True]
    assert found.seconds() == {"a": 1.0}


def test_what_a_hypervisor_takes_disturbs() -> None:
    """Half of the time of the first pass was somebody else's, though the reference was as fast as ever."""
    machine = Machine(
        slowness=lambda now, key: 1.5 if now < 1000.2 and key != "reference" else 1.0,
        taken=lambda now: min(now - 1000.0, 0.2),  # of two cores: half
    )
    found = machine.measure()
    assert found.made == 3 and worst(found) < 1.01


def test_a_piece_that_the_machine_has_not_is_no_number() -> None:
    found = Machine().passes()
    found.settle([kernels.Piece("a", lambda: None), kernels.Piece("b", lambda: 1.0)], until=1e9, at_most=1e9)
    assert found.seconds() == {"b": 1.0} and not found.doubtful()


def test_a_piece_says_how_alike_two_repetitions_must_be() -> None:
    for agree, settled in ((1.1, False), (1.3, True)):
        times = iter([1.0, 1.2])
        found, piece = Machine().passes(), kernels.Piece("a", lambda times=times: next(times), agree=agree)
        found.run([piece])
        found.run([piece])
        assert found.is_settled(piece) == settled


# -- calls of a slice


def endless(*calls: tuple[float, float]) -> tuple[Iterator[tuple[float, float]], list[float]]:
    """The calls, seconds and those of all threads together, again and again; and the seconds of those that were made."""
    made: list[float] = []

    def again() -> Iterator[tuple[float, float]]:
        while True:
            for seconds, together in calls:
                made.append(seconds)
                yield seconds, together

    return again(), made


ALONE, SHARED = (1e-4, 2e-4), (3e-4, 2.2e-4)  # a call of two threads that have their cores, and one that waits for one of them


def test_a_slice_of_equal_calls_ends_in_time() -> None:
    calls, made = endless(ALONE)
    assert kernels.fastest(calls, 2) == 1e-4 and len(made) == 12


def test_a_slice_of_long_calls_has_three() -> None:
    calls, made = endless((0.02, 0.04))
    assert kernels.fastest(calls, 2) == 0.02 and len(made) == 3


def test_a_slice_goes_on_while_calls_wait_for_their_cores() -> None:
    """One of ten calls has both cores to itself: three of them are waited for."""
    calls, made = endless(SHARED, ALONE, *[SHARED] * 8)
    assert kernels.fastest(calls, 2) == 1e-4 and 20 < len(made) <= 40


def test_a_slice_ends_though_calls_wait_for_their_cores() -> None:
    """One call of many had its cores nearly all the time: it took 1.3 times as long as one that has them does."""
    calls, made = endless(SHARED, (1.3e-4, 2e-4), *[(3e-4 + k * 2e-5, 2e-4) for k in range(1000)])
    assert kernels.fastest(calls, 2) == pytest.approx(1e-4 * 1.3**0.5) and sum(made) < 11e-3


def test_a_call_of_one_thread_takes_what_its_fastest_did() -> None:
    """Nothing says that its work could be shared out; nor does what the operating system counts too late."""
    calls, _ = endless(*[(1.3e-4 + k * 2e-5, 1.25e-4) for k in range(1000)])
    assert kernels.fastest(calls, 2) == 1.3e-4
    calls, _ = endless((1.3e-4, 9e-4), *[(1.5e-4 + k * 2e-5, 1.25e-4) for k in range(1000)])
    assert kernels.fastest(calls, 2) == 1.3e-4


def test_a_long_call_is_what_its_fastest_took_where_all_took_that() -> None:
    assert kernels.fastest_long(iter([(0.02, 0.017), (0.0205, 0.018), (0.0202, 0.017)])) == 0.02


def test_a_long_call_that_waits_is_what_its_busiest_thread_ran() -> None:
    """Four times as long as alone, which is 20 ms; and where the system does not say how long threads ran."""
    assert kernels.fastest_long(iter([(0.08, 0.021), (0.06, 0.019), (0.09, 0.02)])) == 0.019
    assert kernels.fastest_long(iter([(0.08, float("inf")), (0.06, float("inf")), (0.09, float("inf"))])) == 0.06


def test_a_short_call_that_waits_is_no_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call takes 10 ms, of which all threads together run 50 us: calls of a slice are timed, and not three of them."""
    clock = {"wall": 0.0, "own": 0.0}
    taken = iter([(10e-3, 5e-5), *[(1e-4, 5e-5)] * 1000])

    def run() -> None:
        wall, own = next(taken)
        clock["wall"] += wall
        clock["own"] += own

    monkeypatch.setattr(xla, "time", SimpleNamespace(perf_counter=lambda: clock["wall"], process_time=lambda: clock["own"]))
    assert xla._seconds(2, run, ()) == pytest.approx(1e-4)
    assert 980 < len(list(taken)) < 992


def test_threads_say_how_long_they_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = str(threading.get_native_id())
    for name, text in (("11", "1500000000 7 3\n"), ("12", "0 7 3\n"), (own, "9000000000 7 3\n"), ("13", None)):
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "schedstat").write_text(text)
    monkeypatch.setattr(profile, "_THREADS", tmp_path)
    assert profile.other_threads_seconds() == {"11": 1.5, "12": 0.0}


def test_a_thread_says_how_long_it_waited_for_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile, "_OWN", tmp_path)
    assert profile.ran_and_waited() == (0.0, 0.0) and measure._share((0.0, 0.0), (0.0, 0.0)) == 1.0
    (tmp_path / "schedstat").write_text("3000000000 1000000000 12\n")
    assert profile.ran_and_waited() == (3.0, 1.0)
    assert measure._share((1.0, 0.5), (3.0, 1.0)) == 0.8


@pytest.mark.parametrize(
    ("text", "stolen"), [("cpu  1 2 3 4 5 6 7 250 0 0\ncpu0 1 2 3 4 5 6 7 9 0 0\n", 2.5), ("cpu 1 2 3\n", 0), ("", 0)]
)
def test_a_hypervisor_says_what_it_took(text: str, stolen: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_read", lambda path: text)
    monkeypatch.setattr(profile.os, "sysconf", lambda name: 100)
    assert profile.stolen_seconds() == stolen


# -- what numbers are made of the seconds


def test_an_activation_is_what_it_takes_beyond_a_relu() -> None:
    pieces = [kernels.Piece(f"activation/{name}/float32", lambda: 1.0, elements=100.0) for name in ("relu", "gelu_tanh")]
    found = kernels.numbers(pieces, {"activation/relu/float32": 2.0, "activation/gelu_tanh/float32": 5.0})
    assert found == {"activation/gelu_tanh/float32": 0.03}


def test_handing_a_program_over_takes_no_less_than_waking_nobody() -> None:
    for handed, found in ((6e-7, 5e-6), (8e-6, 8e-6)):
        numbers = dict(REFERENCE_PROFILE.numbers) | {"xla/call/handed": handed, "call/short": 1e-6}
        numbers["call"] = 6e-6 + numbers["gemm/float32/widened/64x64"]
        measure._subtract_other_work(numbers, {})
        assert numbers["xla/call/handed"] == pytest.approx(found)


def test_a_kernel_is_what_it_takes_beyond_a_call() -> None:
    pieces = [kernels.Piece("xla/call", lambda: 1.0), kernels.Piece("a", lambda: 1.0, 10.0), kernels.Piece("b", lambda: 1.0)]
    pieces.append(kernels.Piece("xla/call/handed", lambda: 1.0))
    found = xla.numbers(pieces, {"xla/call": 6.0, "a": 106.0, "b": 6.5, "xla/call/handed": -1.0}, 6.0)
    assert found == pytest.approx({"xla/call": 6.0, "a": 10.0, "b": 0.65, "xla/call/handed": 0.6})
