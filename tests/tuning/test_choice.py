"""The choice of a plan by time: the fastest wins, ``jax.jit`` where no other gains, and a choice is made once."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kitsune_jax import cache, tuning
from kitsune_jax.tuning import FORCED, JIT, MODELLED, Budget, Choice

PROGRAM = jax.make_jaxpr(lambda x: jnp.tanh(x) * 2)(jnp.ones((4, 3)))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KITSUNE_TUNE", "on")
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "ran_and_waited", lambda: (1.0, 0.0))


def takes(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[str]:
    """Candidates take these seconds by the clock of the measurement. Returns the names in the order in which they ran."""
    ran: list[str] = []

    def compiled(jaxpr: Any, args: Any, mesh: Any) -> Callable[[], float]:
        name = JIT if jaxpr is PROGRAM else jaxpr
        return lambda: ran.append(name) or seconds[name]  # type: ignore[func-returns-value]

    monkeypatch.setattr(tuning, "_compiled", compiled)
    monkeypatch.setattr(tuning, "_seconds", lambda run: run())
    return ran


def chosen(*names: str, key: str = "k", budget: float = 5.0) -> Choice | None:
    return tuning.choose(key, PROGRAM, {name: lambda name=name: name for name in names}, "cpu", Budget(budget))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        ({JIT: 0.1, MODELLED: 0.05, FORCED: 0.07}, MODELLED),
        ({JIT: 0.1, MODELLED: 0.05, FORCED: 0.03}, FORCED),
        ({JIT: 0.1, MODELLED: 0.15, FORCED: 0.2}, JIT),
        ({JIT: 0.1, MODELLED: 0.099, FORCED: 0.0985}, JIT),  # repeated measurements of one program differ by more
    ],
)
def test_the_fastest_wins(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], want: str) -> None:
    ran = takes(monkeypatch, seconds)
    found = chosen(MODELLED, FORCED)
    assert found is not None and found.name == want
    assert found.seconds == pytest.approx(seconds)
    # After one run each, all take turns, and the first of a turn is the last of the next.
    assert ran[:3] == [JIT, MODELLED, FORCED] and ran[3:9] == [FORCED, MODELLED, JIT, JIT, MODELLED, FORCED]


def test_one_lucky_run_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory was at hand once: XLA's allocations make the time of a call depend on what was freed before it."""
    takes(monkeypatch, {JIT: 0.019, MODELLED: 0.010})
    calls = iter(range(1000))
    monkeypatch.setattr(tuning, "_seconds", lambda run: 0.009 if (seconds := run()) == 0.019 and next(calls) == 2 else seconds)
    found = chosen(MODELLED)
    assert found is not None and found.name == MODELLED
    assert found.seconds == {JIT: 0.019, MODELLED: 0.010}


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        ({JIT: 1.0, MODELLED: 1.05}, JIT),
        ({JIT: 1.0, MODELLED: 0.95}, JIT),
        ({JIT: 1.0, MODELLED: 0.95, FORCED: 0.9}, FORCED),
        ({JIT: 1.0, MODELLED: 0.95, FORCED: 0.5}, FORCED),
        ({JIT: 1.0, FORCED: 0.95}, JIT),
    ],
)
def test_beside_other_programs_only_a_clear_gain_counts(seconds: dict[str, float], want: str) -> None:
    assert Choice.of(seconds, busy=True).name == want


@pytest.mark.parametrize(("others", "busy"), [(0.1, False), (0.5, True)])
def test_devices_that_share_cores_are_no_other_programs(monkeypatch: pytest.MonkeyPatch, others: float, busy: bool) -> None:
    """Their threads wait for each other. The seconds of all cores are those of this process and of others."""
    own, load = iter([5.0, 6.0]), iter([100.0, 101.0 + others])
    monkeypatch.setattr(tuning, "ran_and_waited", None)  # of one thread
    monkeypatch.setattr(tuning.time, "process_time", lambda: next(own))
    monkeypatch.setattr(tuning, "busy_seconds", lambda: next(load))
    takes(monkeypatch, {JIT: 0.2, MODELLED: 0.1})
    found = tuning.choose("several", PROGRAM, {MODELLED: lambda: MODELLED}, "cpu", Budget(5.0), {"rows": 2})
    assert found is not None and found.busy == busy


def test_a_choice_beside_other_programs_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, {JIT: 0.1, MODELLED: 0.05})
    readings = iter([(0.0, 0.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)])
    monkeypatch.setattr(tuning, "ran_and_waited", lambda: next(readings))
    found = chosen(MODELLED)
    assert found is not None and found.busy and chosen(MODELLED) is found
    tuning._known.clear()  # another process
    assert tuning.known("k") is None
    again = chosen(MODELLED)
    assert again is not None and not again.busy
    tuning._known.clear()
    assert tuning.known("k") == again


def test_long_programs_run_once_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """But a pipeline, which touches its memory in the first run, runs a second time unless it is far slower."""
    ran = takes(monkeypatch, {JIT: 3.0, MODELLED: 2.0})
    assert chosen(MODELLED) == Choice(MODELLED, {JIT: 3.0, MODELLED: 2.0})
    assert ran == [JIT, MODELLED, MODELLED]


def test_a_long_program_that_is_far_slower_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = takes(monkeypatch, {JIT: 3.0, MODELLED: 7.0})
    found = chosen(MODELLED)
    assert found is None or found.name == JIT
    assert ran == [JIT, MODELLED]


def test_a_choice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = takes(monkeypatch, {JIT: 0.1, MODELLED: 0.05})
    first = chosen(MODELLED)
    count = len(ran)
    assert chosen(MODELLED) == first
    tuning._known.clear()  # another process
    assert chosen(MODELLED) == first == tuning.known("k")
    assert len(ran) == count
    assert chosen(MODELLED, key="another") == first and len(ran) == 2 * count


def test_a_torn_file_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = takes(monkeypatch, {JIT: 0.1, MODELLED: 0.05})
    chosen(MODELLED)
    (file,) = (tmp_path / "choices").glob("*.json")
    file.write_bytes(file.read_bytes()[:-3])
    tuning._known.clear()
    count = len(ran)
    assert tuning.known("k") is None
    assert chosen(MODELLED) == Choice(MODELLED, {JIT: 0.1, MODELLED: 0.05}) and len(ran) > count


def test_a_failure_leaves_the_choice_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, {JIT: 1.0})  # running another one is a KeyError
    assert chosen(MODELLED) is None
    assert not list(cache.default().folder.parent.rglob("*.json"))  # type: ignore[union-attr]


def test_no_other_plan_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, {JIT: 1.0})
    assert tuning.choose("k", PROGRAM, {MODELLED: lambda: None}, "cpu", Budget(5.0)) is None


def test_what_is_spent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, {JIT: 0.1, MODELLED: 0.05})
    made: list[str] = []

    def slow() -> str:
        made.append("slow")
        time.sleep(1.6)
        return MODELLED

    budget = Budget(1.5)
    assert tuning.choose("k", PROGRAM, {MODELLED: slow, FORCED: slow}, "cpu", budget) is not None
    assert made == ["slow"] and budget.left < 0  # the second was not begun
    assert tuning.choose("other", PROGRAM, {MODELLED: slow}, "cpu", budget) is None


def test_programs_with_effects_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = takes(monkeypatch, {JIT: 0.1, MODELLED: 0.05})

    def prints(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    program = jax.make_jaxpr(prints)(1.0)
    assert tuning.choose("k", program, {MODELLED: lambda: MODELLED}, "cpu", Budget(5.0)) is None
    assert not ran


def test_ctrl_c_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def slow() -> str:
        time.sleep(1.0)
        ended.set()
        return MODELLED

    takes(monkeypatch, {JIT: 0.1, MODELLED: 0.05})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            tuning.choose("k", PROGRAM, {MODELLED: slow, FORCED: slow}, "cpu", Budget(60.0))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.wait(5)  # and the second candidate is not begun
    ended.clear()
    assert not ended.wait(1.5)
    assert tuning.known("k") is None
    assert chosen(MODELLED) is not None  # the next one may measure


def test_one_measures_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = takes(monkeypatch, {JIT: 0.1, MODELLED: 0.05})
    monkeypatch.setattr(tuning, "_MOST_ROUNDS", 4)
    found: list[Choice | None] = []
    threads = [threading.Thread(target=lambda: found.append(chosen(MODELLED))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Choice(MODELLED, {JIT: 0.1, MODELLED: 0.05})] * 4
    assert len(ran) == 2 * (1 + 4)


def test_keys_differ_where_plans_may() -> None:
    other = jax.make_jaxpr(lambda x: jnp.tanh(x) * 3)(jnp.ones((4, 3)))
    keys = {
        tuning.key_of(program, options, target, surroundings)
        for program in (PROGRAM, other)
        for options in ("a", "b")
        for target in ("cpu", "cuda")
        for surroundings in ((), (1,))
    }
    assert len(keys) == 16
    again = jax.make_jaxpr(lambda x: jnp.tanh(x) * 2)(jnp.ones((4, 3)))
    assert tuning.key_of(PROGRAM, "a", "cpu", ()) == tuning.key_of(again, "a", "cpu", ())


def test_keys_have_all_digits_and_inner_functions() -> None:
    def key(number: float, times: int) -> str:
        inner = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x) * number, x))
        return tuning.key_of(jax.make_jaxpr(lambda x: inner(x) + inner(x))(jnp.ones(3)), "a", "cpu", ())

    assert key(0.1, 2) == key(0.1, 2)
    assert len({key(0.1, 2), key(0.1 + 1e-8, 2), key(0.1, 3), key(-0.1, 2)}) == 4


def test_real_candidates_are_compiled_and_run() -> None:
    slow = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3000, lambda _, x: jnp.tanh(x), x) * 2)(jnp.ones((4, 3)))
    found = tuning.choose("k", slow, {MODELLED: lambda: PROGRAM}, "cpu", Budget(60.0))
    assert found is not None and found.name == MODELLED and found.gain > 2


def test_a_short_step_of_a_loop_is_timed_without_the_call() -> None:
    """A call takes longer than such a step, and would hide the difference between two plans of it."""
    program = jax.make_jaxpr(lambda x, y: (jnp.sin(y), x + y))(jnp.zeros(8), jnp.zeros(8))
    plans = {MODELLED: lambda: program}
    called = tuning.choose("called", program, plans, "cpu", Budget(60.0))
    inside = tuning.choose("inside", program, plans, "cpu", Budget(60.0), step=True)
    assert called is not None and inside is not None
    assert inside.seconds[JIT] < 0.5 * called.seconds[JIT]


def test_results_of_a_step_are_the_next_arguments() -> None:
    """So that XLA moves no more out of the loop than out of the user's."""
    x, n, key = jax.typeof(jnp.zeros(3)), jax.typeof(jnp.zeros((), jnp.int32)), jax.typeof(jax.random.key(0))
    assert tuning._handed_on([x, x, n], [x, n]) == {1: 0, 2: 1}  # a while loop's, with a constant before
    assert tuning._handed_on([n, x, x], [x, x, x]) == {1: 0, 2: 1}  # a scan's, with a number for each step
    assert tuning._handed_on([key, n], [x, key]) == {0: 1}
    assert tuning._handed_on([n], [x]) == {}


def test_a_step_that_draws_random_numbers_is_timed() -> None:
    def step(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        key, drawn = jax.random.split(key)
        return key, x + jax.random.normal(drawn, x.shape), x.max()

    program = jax.make_jaxpr(step)(jax.random.key(0), jnp.zeros(8))
    found = tuning.choose("k", program, {MODELLED: lambda: program}, "cpu", Budget(60.0), step=True)
    assert found is not None and set(found.seconds) == {JIT, MODELLED}
