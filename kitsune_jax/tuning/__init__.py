"""The plan of a program, chosen by time: candidates run in turn on this machine, and the fastest is remembered on disk.

Comes in: a program and its candidates, each a jaxpr that computes the same. Goes out: a ``Choice``, or ``None`` where nothing was
measured; the caller then keeps the model's plan. Invariants: "jit", the program without pipelines, is always among the candidates,
and wins where no other is faster by ``LEAST_GAIN``; one process measures a program while others wait for it, and all of them choose
the same from then on, unless other programs disturbed it; a failure of a candidate, of the disk or of the clock changes no result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jaxlib
import numpy as np

from kitsune_jax import _compat, cache, config
from kitsune_jax.progress import announced, in_own_thread
from kitsune_jax.targets.cpu.profile.profile import busy_seconds, ran_and_waited
from kitsune_jax.tuning.inputs import all_equations, random_arguments, why_not_timed

JIT, MODELLED, OPTIMISTIC, FORCED = "jit", "modelled", "optimistic", "forced"
LEAST_GAIN = 1.02  # of a plan over ``jax.jit``: repeated measurements of one program differ by this much
# While other programs run they differ by more. A thread that had a core in less than this part of the time it wanted one met them.
LEAST_GAIN_BUSY, _LEAST_SHARE = 1.1, 0.85
# Seconds that the programs of one lowering may take to be chosen, as XLA's own tuning of its products takes.
BUDGET = {"cpu": 5.0, "cuda": 2.0}
_COMPILE_S = 0.001  # of XLA for an equation: 0.5 ms in a hash-grid field of 2 000, 2 ms in small networks of products
_LEAST_ROUNDS, _MOST_ROUNDS, _LEAST_S = 4, 60, 0.12
# Steps of a loop that are timed at once: a call takes up to 1 ms beside its work, and the first one more.
_MOST_STEPS, _LEAST_STEPS_S = 32, 0.03
_LONG_S = 0.2  # a first run of this length of ``jax.jit`` differs from the next ones by little
_FIRST = 2  # and that of a pipeline by this factor at most
_SUFFIX = ".choice.json"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The candidate to take, and the ``seconds`` of all that were measured, JIT among them. ``busy``: other programs ran meanwhile,
    so the choice is not kept for other processes."""

    name: str
    seconds: Mapping[str, float]
    busy: bool = False

    @staticmethod
    def of(seconds: Mapping[str, float], busy: bool = False) -> Choice:
        """The fastest of ``seconds``; JIT where no other gains ``LEAST_GAIN``, or more if the machine was ``busy``."""
        best, least = min(seconds, key=lambda name: seconds[name]), LEAST_GAIN_BUSY if busy else LEAST_GAIN
        return Choice(best if seconds[best] * least < seconds[JIT] else JIT, dict(seconds), busy)

    @property
    def gain(self) -> float:
        """Time of ``jax.jit`` over the time of the best plan with pipelines."""
        return self.seconds[JIT] / min((s for name, s in self.seconds.items() if name != JIT), default=self.seconds[JIT])


class Budget:
    """Seconds that the programs of one lowering may still take to be measured."""

    def __init__(self, seconds: float):
        self.left = seconds

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.left -= time.monotonic() - began


_budgets: dict[int, tuple[weakref.ref[Any], Budget]] = {}  # by the identity of a module, which may have no hash


def budget_of(program: Any, platform: str) -> Budget | None:
    """The budget of all calls that are lowered into ``program`` (``_compat.program_of``), or ``None`` where plans are not measured:
    ``KITSUNE_TUNE=off``, a program of several processes, which must all compile the same, or a candidate's lowering."""
    if not _measures(platform):
        return None
    known = _budgets.get(id(program))
    if known is not None and known[0]() is program:
        return known[1]
    number, budget = id(program), _full_budget(platform)

    def forget(_: Any) -> None:
        _budgets.pop(number, None)

    _budgets[number] = (weakref.ref(program, forget), budget)
    return budget


def budget_of_shard(platform: str) -> Budget | None:
    """The budget of a call that XLA divides among devices, or ``None`` where the plan of a shard is the model's: where none is
    measured, and on a GPU, where it would be measured while XLA compiles another program for the same device."""
    return _full_budget(platform) if platform == "cpu" and _measures(platform) else None


def _measures(platform: str) -> bool:
    return config.tune() != "off" and not is_measuring() and jax.process_count() == 1 and platform in BUDGET


def _full_budget(platform: str) -> Budget:
    return Budget(float("inf") if config.tune() == "all" else BUDGET[platform])


# --- choices on disk and in this process ------------------------------------------------------------------------------------------


def key_of(program: Any, options: Any, target: str, surroundings: Sequence[Any]) -> str:
    """A key of all that a choice depends on: the program, the options and everything that plans and machine code depend on."""
    return cache.key(
        program=_compat.text_of(_compat.open_parts(program)[0]),
        options=repr(options),
        target=target,
        surroundings=repr(surroundings),
        package=config.__version__,
        code=_code(),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        flags=config.xla_flags(),
        threads=str(config.num_threads()),
    )


@functools.cache
def _code() -> str:
    """A hash of this package's code: another version's plans may be faster or slower; "" for a package that is not in files."""
    folder = Path(config.__file__).parent
    try:
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".so"))
        return cache.key(**{path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    except OSError:
        return ""


def _cache() -> cache.Cache:
    folder = config.cache_dir()
    return cache.Cache(None if folder is None else folder.absolute() / "choices", what="measured choices", made="measured")


_known: dict[str, Choice | None] = {}


def known(key: str) -> Choice | None:
    """The choice that was made under ``key`` by this process or an earlier one."""
    if key not in _known:
        content = _cache().find(key, _SUFFIX)
        if content is None:
            return None
        _known[key] = _read(content)
    return _known[key]


def _read(content: bytes) -> Choice:
    stored = json.loads(content)
    return Choice(stored["name"], stored["seconds"])


def _compile_seconds(program: Any) -> float:
    """Seconds to compile ``program`` once as it is and once with a plan, about."""
    return 2 * _COMPILE_S * sum(1 for _ in all_equations(program))


def takes_too_long(program: Any, platform: str) -> bool:
    """Would timing ``program`` take longer than the whole budget?"""
    return config.tune() != "all" and _compile_seconds(program) > BUDGET[platform]


def why_not_chosen(program: Any, budget: Budget, axes: Mapping[str, int] = MappingProxyType({})) -> str | None:
    """Why the plans of ``program`` are not timed now; ``None`` where they may be."""
    why = why_not_timed(program, axes)
    if why is None and budget.left < _compile_seconds(program):
        why = "compiling it again would take too long"
    return why


class _NotMeasured(Exception):
    pass


class _NotKept(Exception):
    """A choice that another process should make again."""

    def __init__(self, choice: Choice):
        super().__init__()
        self.choice = choice


def choose(
    key: str,
    program: Any,
    candidates: Mapping[str, Callable[[], Any]],
    platform: str,
    budget: Budget,
    axes: Mapping[str, int] = MappingProxyType({}),
    step: bool = False,
) -> Choice | None:
    """The choice under ``key``, measured now where there is none. ``candidates``: jaxprs by name, made when they are needed;
    ``None`` of one that is no other plan than those before. JIT is the ``program`` itself, compiled if there is another plan.
    ``axes``: of the mesh whose devices run the program at the same time, with their sizes; none for one device.
    ``step``: the program is a step of a loop that XLA runs."""
    if (found := known(key)) is not None:
        return found
    if key in _known:  # it was tried
        return None

    def make() -> bytes:
        if (why := why_not_chosen(program, budget, axes)) is not None:
            raise _NotMeasured(why)
        with budget.spent():
            measurement = _Measurement(candidates, program, platform, budget.left, axes, step)
            choice = Choice.of(measurement.result(), measurement.busy)
        if choice.busy:
            raise _NotKept(choice)
        return json.dumps(dataclasses.asdict(choice)).encode()

    try:
        _known[key] = _read(_cache().get(key, _SUFFIX, make))
    except _NotKept as made:
        _known[key] = made.choice
    except _NotMeasured as why:
        config.logger.debug("%s: the plan is the model's: %s", _compat.function_name(program), why)
        _known[key] = None
    return _known[key]


# --- measuring --------------------------------------------------------------------------------------------------------------------

_state = threading.local()


def is_measuring() -> bool:
    """Is this thread lowering a candidate?"""
    return getattr(_state, "measuring", False)


class _Measurement:
    """Seconds of each candidate, measured in a thread of its own: JAX keeps state of each thread, and the caller's lowers a
    program. The thread ends after the caller's wait was interrupted."""

    def __init__(
        self,
        candidates: Mapping[str, Callable[[], Any]],
        program: Any,
        platform: str,
        seconds: float,
        axes: Mapping[str, int],
        step: bool,
    ):
        self.candidates, self.program, self.platform, self.axes = candidates, program, platform, axes
        self.step = step and not axes
        self.until = time.monotonic() + seconds
        self.x64 = jax.config.jax_enable_x64
        self.stop = threading.Event()
        self.seconds: dict[str, float] = {}
        self.busy = False

    def result(self) -> dict[str, float]:
        """The seconds of JIT and of at least one other candidate. Raises ``_NotMeasured``."""
        left = self.until - time.monotonic()
        limit = "without a limit of time" if left == float("inf") else f"for at most {max(left, 0.0):.0f} s"
        line = f"timing plans of {_compat.function_name(self.program)} beside jax.jit, once, {limit}; KITSUNE_TUNE=off avoids it"
        with announced("tuning", line):
            error = in_own_thread(self._run, "kitsune_jax tuning", self.stop.set)
        if error is not None:
            raise _NotMeasured(f"timing it failed ({type(error).__name__}: {error})") from error
        if len(self.seconds) < 2:
            raise _NotMeasured("there is no other plan" if time.monotonic() < self.until else "time is up")
        return self.seconds

    def _run(self) -> None:
        _state.measuring = True
        with _compat.x64(self.x64):
            self._measure()

    @_compat.with_room_for_frames
    def _measure(self) -> None:
        devices = jax.local_devices(backend=self.platform)[: math.prod(self.axes.values())]
        mesh = jax.sharding.Mesh(np.array(devices).reshape(tuple(self.axes.values())), tuple(self.axes)) if self.axes else None
        place = devices[0] if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        args = [jax.device_put(x, place) for x in random_arguments(self.program)]
        ready: dict[str, Callable[..., None]] = {}
        first: dict[str, float] = {}
        for name, make in self.candidates.items():
            jaxpr = make() if self._goes_on() else None
            plans = {} if jaxpr is None else {name: jaxpr} if ready else {JIT: self.program, name: jaxpr}
            for key, plan in plans.items():
                ready[key] = _compiled_steps(plan, args) if self.step else _compiled(plan, args, mesh)
                first[key] = _seconds(ready[key])
        if not ready:
            return
        before = self._ran_and_waited()
        if time.monotonic() + 2 * sum(first.values()) > self.until and min(first.values()) > _LONG_S:
            # A pipeline keeps its memory for the next call, and touching it can take more than half of the first: a step of GPT-2
            # took 2.2 s, then 0.9; jax.jit takes fresh memory in every call, 1.9 s.
            again = [name for name in first if name != JIT and first[name] < _FIRST * first[JIT] and not self.stop.is_set()]
            self.seconds = first | {name: min(first[name], _seconds(ready[name])) for name in again}
        else:
            steps = max(1, min(_MOST_STEPS, int(_LEAST_STEPS_S / min(first.values())))) if self.step else 1
            self._time_in_turn({name: functools.partial(run, steps) for name, run in ready.items()} if steps > 1 else ready)
            self.seconds = {name: seconds / steps for name, seconds in self.seconds.items()}
        ran, waited = (b - a for a, b in zip(before, self._ran_and_waited(), strict=True))
        self.busy = ran < _LEAST_SHARE * (ran + waited)

    def _ran_and_waited(self) -> tuple[float, float]:
        """Seconds that the measurement had a core, and that others had it. The threads of several devices wait for each other."""
        if not self.axes:
            return ran_and_waited()
        own = time.process_time()
        return own, busy_seconds() - own

    def _goes_on(self) -> bool:
        return not self.stop.is_set() and time.monotonic() < self.until

    def _time_in_turn(self, ready: Mapping[str, Callable[[], None]]) -> None:
        """The lower quartile of each one's times. All take turns, so that another program's load meets all. The least time is luck
        where memory decides: ``jax.jit`` took a softmax of 49 MB in 9 ms once of twelve calls, and in 19 ms otherwise."""
        times, began, rounds = {name: list[float]() for name in ready}, time.monotonic(), 0
        while rounds < _LEAST_ROUNDS or (rounds < _MOST_ROUNDS and time.monotonic() - began < _LEAST_S * len(ready)):
            if self.stop.is_set() or (rounds >= 2 and not self._goes_on()):
                break
            for name in list(ready) if rounds % 2 else list(ready)[::-1]:
                times[name].append(_seconds(ready[name]))
            rounds += 1
        if rounds > 1:
            self.seconds = {name: sorted(of)[rounds // 4] for name, of in times.items()}


def _compiled_steps(jaxpr: Any, args: Sequence[Any]) -> Callable[..., None]:
    """A run of ``jaxpr`` as a step of a loop, as often as asked. Called by themselves, short steps take as long as their calls."""
    run = _compat.jaxpr_as_fun(jaxpr)

    def loop(steps: Any, *args: Any) -> Any:
        made = run(*args)
        back = _handed_on([jax.typeof(x) for x in args], [jax.typeof(x) for x in made])

        def step(_: Any, state: Any) -> Any:
            given, made = state
            given = [made[back[k]] if k in back else x for k, x in enumerate(given)]
            return given, run(*given)

        return jax.lax.fori_loop(1, steps, step, (list(args), made))

    executable = jax.jit(loop, keep_unused=True).lower(np.int32(1), *args).compile()
    return lambda steps=1: jax.block_until_ready(executable(np.int32(steps), *args)) and None


def _handed_on(arguments: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    """Arguments of a step -> the results that the next step gets in their place: those of a ``while`` are its last arguments; of
    other steps each takes the first argument of its type."""
    first = len(arguments) - len(results)
    if first >= 0 and list(arguments[first:]) == list(results):
        return {first + k: k for k in range(len(results))}
    back: dict[int, int] = {}
    for r, result in enumerate(results):
        k = next((k for k, a in enumerate(arguments) if k not in back and a == result), None)
        if k is not None:
            back[k] = r
    return back


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _compiled(jaxpr: Any, args: Sequence[Any], mesh: jax.sharding.Mesh | None) -> Callable[[], None]:
    """A run of ``jaxpr``; with a ``mesh`` by all its devices, each on a copy of ``args``: devices of one CPU share its cores."""
    run = _compat.jaxpr_as_fun(jaxpr)
    if mesh is not None:
        whole = jax.sharding.PartitionSpec()
        run = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    executable = jax.jit(run, keep_unused=True).lower(*args).compile()
    return lambda: jax.block_until_ready(executable(*args)) and None
