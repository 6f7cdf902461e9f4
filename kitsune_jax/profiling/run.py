"""``profile``: run a function under ``jax.profiler``, and find its bound and the gain of a pipeline.

Comes in: a function and its arguments. Goes out: a ``Profile``. The function runs with ``jax.jit`` alone, without the pipelines
that it may hold; the pipelined function runs beside it, in turns, without the profiler.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Never, ParamSpec, Unpack

import jax

from kitsune_jax import _compat, config, targets
from kitsune_jax.frontend import explain as preview
from kitsune_jax.frontend.api import Pipeline, PipelineOptions, explain, pipeline
from kitsune_jax.frontend.tracing import Arguments
from kitsune_jax.profiling import hlo
from kitsune_jax.profiling.batches import Batch, argument_names, batch_of
from kitsune_jax.profiling.metrics import PeakRates, Recurring, chains, kernel_shares, metrics_of, shares_of
from kitsune_jax.profiling.rates import rates_of
from kitsune_jax.profiling.report import BatchSize, Gain, KernelChain, Profile
from kitsune_jax.profiling.trace import CALL, Event, TracedCall, events_of, profile_data, runs_of
from kitsune_jax.report.data import MeasuredTimes, RegionReport, Rejected, byte_text, count_text, plural
from kitsune_jax.report.render import Report, with_measured
from kitsune_jax.report.text import bottleneck_text

_CHAINS = 6  # that a profile lists
_LEAST_SHARE = 0.01  # of the kernel time, for a chain to be listed
_MOST_KERNELS = 10_000  # of a call in which chains are looked for
_FACTORS = (1 / 4, 4, 1 / 16, 16, 1 / 64, 64)  # sizes that are tried, over the size given, in this order
_DISTURBED = 1.5  # the median of traced calls over the fastest, beyond which a profile says so
_PRODUCTS = ("dot_general", "conv_general_dilated")
_MOST_BYTES = 2 << 30  # of a call that a larger batch may take, by XLA's own count


P = ParamSpec("P")  # the parameters of a user's function


def profile(
    fn: Callable[P, Any],
    *arguments: Never,
    batches: Sequence[int] | None = None,
    repeats: int = 5,
    budget_s: float = 10.0,
    **options: Unpack[PipelineOptions],
) -> Profiler[P]:
    """Run ``fn`` under ``jax.profiler``; report what bounds it, which chains of operators recur, and what a pipeline would give.

    Call it as ``kj.profile(fn)(*args)``. ``fn`` runs as ``jax.jit(fn)``, without pipelines, ``repeats`` times under the profiler.
    The numbers are those of SKIP (arXiv 2504.11750): launches, launch and queue time (TKLQT), kernel time, mean kernel, idle time,
    latency. On a CPU a kernel is a thunk of XLA; thunks are not launched, so there is no TKLQT. The profiler itself takes about a
    microsecond a thunk, which is in these numbers. Side effects of ``fn`` happen in each of its calls.

    The **bound** is the largest of these parts of the latency. *Overhead*: no kernel runs, and of each kernel the time that one
    without work takes. *Compute*: the rest of the kernels whose operations, at the peak rates of the machine, take longer than
    their bytes, at its bandwidth (of the last level cache for kernels whose bytes fit there). *Memory*: the rest of the others.
    *Other*: kernels whose operations are not known, such as sorts. Rates of a CPU are measured, as for plans (``KITSUNE_PROFILE``).

    What a pipeline gives is measured for the whole function: ``jit`` and ``pipeline`` called in turns, ``repeats`` times, without
    the profiler. For a chain it is that of the regions that hold operators at the chain's source lines: the measured one where a
    single region does almost all of the function, else as in ``kj.explain``.

    Args:
      fn: a function, pipelined or not; a pipelined one brings its own options. Of one that calls pipelined functions JAX's caches
        are cleared, since JAX would run what it has traced with pipelines.
      arguments: none; those of ``fn`` go into the second pair of parentheses.
      batches: sizes of the batch to try; ``None``: a quarter, four times, and so on up to 64 times. ``()`` tries none. The batch is
        the leading dimension that arguments share; arrays are cut, or repeated.
      repeats: traced calls of each size; the fastest is reported, which other programs have disturbed the least.
      budget_s: seconds for other sizes: one that would take longer than what is left is not begun.
      options: options of ``pipeline``.

    Returns:
      A function of ``fn``'s arguments (arrays) that returns a ``Profile``.

    Raises:
      TypeError: ``fn`` is not callable, or an argument is no array but a shape. ValueError: an option has no such value, or the
        platform is neither a CPU nor a GPU. RuntimeError: another trace of ``jax.profiler`` is running, it recorded no call, or
        this JAX cannot read traces.

    Example:
      >>> import jax, jax.numpy as jnp, kitsune_jax as kj
      >>> def layer(w, x):
      ...     return jnp.tanh(x @ w)
      >>> p = kj.profile(layer, batches=(), repeats=1)(jnp.ones((8, 8)), jnp.ones((32, 8)))
      >>> p.batch, p.batch_arguments, p.metrics.tklqt
      (32, ('x',), None)
      >>> kj.profile(layer)
      <profile of layer: call it with arguments, kj.profile(layer)(*args)>
    """
    if arguments:
        name = getattr(fn, "__name__", "")
        how = f"call it with arguments: profile({name if name.isidentifier() else 'fn'})(*args)"
        raise TypeError(f"profile takes a function alone, and {len(arguments)} more were given: {how}")
    if not callable(fn):
        raise TypeError(f"kitsune_jax.profile takes a function of arrays, not {type(fn).__name__}: write profile(fn)(*args)")
    if not (isinstance(repeats, int) and repeats > 0):
        raise ValueError(f"repeats={repeats!r} is not a positive integer")
    if not budget_s >= 0:
        raise ValueError(f"budget_s={budget_s!r} is not a number of seconds")
    if batches is not None and not all(isinstance(b, int) and b > 0 for b in batches):
        raise ValueError(f"batches={batches!r} must be positive integers")
    inside = getattr(fn, "__wrapped__", None)
    if isinstance(inside, Pipeline) and hasattr(fn, "lower"):  # jax.jit(pipeline(fn))
        fn = inside
    plain = fn.__wrapped__ if isinstance(fn, Pipeline) else fn
    pipelined = fn if isinstance(fn, Pipeline) and not options else pipeline(plain, **options)
    return Profiler(plain, pipelined, None if batches is None else tuple(batches), repeats, budget_s)


@dataclasses.dataclass(frozen=True, repr=False)
class Profiler(Generic[P]):
    """The result of ``profile(fn)``: call it with ``fn``'s arguments."""

    plain: Callable[..., Any]
    pipelined: Pipeline[P, Any]
    batches: tuple[int, ...] | None
    repeats: int
    budget_s: float

    def __repr__(self) -> str:
        name = getattr(self.pipelined, "__name__", "fn")
        return f"<profile of {name}: call it with arguments, kj.profile({name})(*args)>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Profile:
        _check(args, kwargs)
        arguments: Arguments = (args, kwargs)
        platform = _compat.default_platform()
        if platform not in targets.PLATFORMS:
            raise ValueError(f"kj.profile reads traces of {' and '.join(targets.PLATFORMS)}, not of {platform!r}")
        rates = rates_of(targets.get(platform).machine())
        traced = self._traced(arguments)
        run, works = traced.run, traced.works
        metrics, shares = metrics_of(run), shares_of(run, works, rates)
        batch = batch_of(arguments, argument_names(self.plain, len(args)), self._shapes)
        sizes: tuple[BatchSize, ...] = ()
        note = str(batch)
        if isinstance(batch, Batch):
            given = BatchSize(batch.size, metrics.latency, shares, shares.bound)
            sizes, note = self._sizes(arguments, batch, given, traced, rates)
        gain, report = self._gain(arguments, traced)
        times = [k.end - k.start for k in run.kernels[:_MOST_KERNELS]]
        recurring = chains([w.ops for w in works[:_MOST_KERNELS]], times, _CHAINS)
        found = (chain_of(r, run, works, rates, report) for r in recurring)
        listed = tuple(c for c in found if c.seconds >= _LEAST_SHARE * metrics.kernel_time)
        if gain.ratio is None and not report.obstacles and listed and listed[0].sources:  # what takes the most time
            gain = dataclasses.replace(gain, why_not=listed[0].why)
        notes = (
            [f"the program runs on {plural(traced.devices, 'device')}, of which the first was read"] if traced.devices > 1 else []
        )
        if traced.spread > _DISTURBED:
            notes.append(
                f"the median call took {traced.spread:.1f} times as long as the fastest: other programs run on this machine"
            )
        if len(works) > _MOST_KERNELS:
            notes.append(f"chains are those of the first {count_text(_MOST_KERNELS)} kernels")
        return Profile(
            name=getattr(self.pipelined, "__name__", "fn"),
            platform=platform,
            machine=rates.machine,
            bound=shares.bound,
            shares=shares,
            metrics=metrics,
            runs=traced.count,
            batch=batch.size if isinstance(batch, Batch) else None,
            batch_arguments=batch.names if isinstance(batch, Batch) else (),
            batch_note=note,
            sizes=sizes,
            chains=listed,
            gain=gain,
            notes=tuple(notes),
        )

    def _sizes(
        self, arguments: Arguments, batch: Batch, given: BatchSize, first: Traced, rates: PeakRates
    ) -> tuple[tuple[BatchSize, ...], str]:
        """The sizes that could be tried within the budget, and why no more were."""
        deadline = time.monotonic() + self.budget_s
        found, note = {given.size: given}, ""
        asked = self.batches if self.batches is not None else [int(batch.size * f) for f in _FACTORS]
        for size in dict.fromkeys(asked):
            began = time.monotonic()
            if size < 1 or size in found or (self.batches is None and first.bytes * size > _MOST_BYTES * batch.size):
                continue
            # Compiling and overhead take as long as for the size given; the work of a call grows in proportion.
            work = (given.latency - given.shares.overhead) * (self.repeats + 2)
            if began + first.seconds + first.calls_seconds + work * size / batch.size > deadline:
                note = f"the budget of {self.budget_s:g} s did not suffice for all"
                continue
            try:
                traced = self._traced(batch.resized(arguments, size))
            except Exception as error:  # of the user's function, or out of memory
                note = f"batch {count_text(size)} failed: {type(error).__name__}"
                continue
            shares = shares_of(traced.run, traced.works, rates)
            found[size] = BatchSize(size, metrics_of(traced.run).latency, shares, shares.bound)
        return tuple(found[size] for size in sorted(found)), note

    def _traced(self, arguments: Arguments) -> Traced:
        began = time.monotonic()
        with self._without_pipelines(arguments):
            compiled, call = self._compiled(self.plain, arguments)
        jax.block_until_ready(call())
        compiled_at = time.monotonic()
        jax.block_until_ready(call())
        runs, module = trace(compiled.as_text(), call, self.repeats)
        latencies = [metrics_of(run).latency for run in runs]
        run = runs[latencies.index(min(latencies))]
        works = [module.work(k.op) for k in run.kernels]
        return Traced(
            call=call,
            run=run,
            works=works,
            count=len(runs),
            spread=statistics.median(latencies) / min(latencies),
            devices=len({d for s in jax.tree.leaves(compiled.output_shardings) for d in s.device_set}),
            seconds=compiled_at - began,
            calls_seconds=time.monotonic() - compiled_at,
            bytes=_peak_bytes(compiled),
        )

    @contextlib.contextmanager
    def _without_pipelines(self, arguments: Arguments) -> Iterator[None]:
        """In the block functions are traced without pipelines. JAX remembers its traces: those with pipelines are forgotten before,
        those without after."""
        holds = bool(preview.pipelined_calls(self._jitted(self.plain, arguments).jaxpr))
        if holds:
            jax.clear_caches()
        try:
            with config.override(disable=True):
                yield
        finally:
            if holds:
                jax.clear_caches()

    def _compiled(self, fn: Callable[..., Any], arguments: Arguments) -> tuple[Any, Callable[[], Any]]:
        """``fn`` compiled for ``arguments``, and a call of it."""
        _, donated, kept = self.pipelined._statics.split(*arguments)
        compiled = self._jitted(fn, arguments).lower().compile()
        return compiled, functools.partial(compiled, donated, kept)

    def _jitted(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        """``fn`` traced by ``jax.jit`` for ``arguments``, with static leaves inside."""
        static, donated, kept = self.pipelined._statics.split(*arguments)

        def arrays(donated: Any, kept: Any) -> Any:
            a, k = static.join(donated, kept)
            return [x for x in jax.tree.leaves(fn(*a, **k)) if _compat.valid_jaxtype(x)]

        arrays.__name__ = getattr(self.pipelined, "__name__", "fn")
        return jax.jit(arrays).trace(donated, kept)

    def _shapes(self, arguments: Arguments) -> list[Any]:
        """The shapes of the results for ``arguments``."""
        return list(self._jitted(self.plain, arguments).out_info)

    def _gain(self, arguments: Arguments, traced: Traced) -> tuple[Gain, Report]:
        """The function as a pipeline, timed beside ``traced``, and its report. It is compiled first, since a plan that is chosen by
        time then is the one that the report describes."""
        _, call = self._compiled(self.pipelined, arguments)
        report = explain(self.pipelined)(*arguments[0], **arguments[1])
        modelled = modelled_times(report.regions)
        if not report.ops_pipelined:
            return Gain(None, None, *modelled, 0, why_nothing(report)), report
        times: tuple[list[float], list[float]] = ([], [])
        jax.block_until_ready(call())
        for _ in range(self.repeats):
            for function, spent in zip((traced.call, call), times, strict=True):
                began = time.perf_counter()
                jax.block_until_ready(function())
                spent.append(time.perf_counter() - began)
        report = with_measured(report, MeasuredTimes(min(times[1]), min(times[0])))
        return Gain(min(times[0]), min(times[1]), *modelled, len(report.regions)), report


@dataclasses.dataclass(frozen=True)
class Traced:
    """A compiled function (``call``), the fastest of ``count`` traced calls and the work of its kernels. ``spread``: the median
    traced call over the fastest. ``seconds``: to compile and first call it; ``calls_seconds``: of all later calls, with the trace.
    ``bytes``: that a call takes."""

    call: Callable[[], Any]
    run: TracedCall
    works: list[hlo.KernelWork]
    count: int
    spread: float
    devices: int
    seconds: float
    calls_seconds: float
    bytes: int


def _check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    profile_data()
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise TypeError("kj.profile runs the function: pass arrays, not jax.ShapeDtypeStruct")
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError("kj.profile runs the function, so it cannot be called inside of jit, grad or vmap: call it outside")


def _peak_bytes(compiled: Any) -> int:
    found = compiled.memory_analysis()
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return sum(int(getattr(found, name, 0)) for name in names)


def trace(text: str, call: Callable[[], Any], repeats: int) -> tuple[tuple[TracedCall, ...], hlo.Module]:
    """``repeats`` calls under the profiler. ``text``: of the module that ``call`` runs. Raises ``RuntimeError`` if another trace is
    running, or the trace holds no call."""
    module = hlo.read(text)
    runs = runs_of(_events(call, repeats), module.name, module.holders)
    if not runs:
        raise RuntimeError("the trace of jax.profiler holds none of the calls: is another profiler running in this process?")
    return runs, module


def _events(call: Callable[[], Any], repeats: int) -> list[Event]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # an event for each call of Python would take longer than many a program
    with tempfile.TemporaryDirectory(prefix="kitsune_jax_profile_") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise RuntimeError(f"kj.profile needs jax.profiler for itself: stop the trace that is running ({error})") from error
        try:
            for _ in range(repeats):
                with jax.profiler.TraceAnnotation(CALL):
                    jax.block_until_ready(call())
        finally:
            jax.profiler.stop_trace()
        path = next(Path(folder).rglob("*.xplane.pb"))
        return events_of(profile_data().from_file(str(path)))


# --- what a pipeline would give ---------------------------------------------------------------------------------------------------


def chain_of(
    recurring: Recurring, run: TracedCall, works: Sequence[hlo.KernelWork], rates: PeakRates, report: Report
) -> KernelChain:
    """A recurring chain of kernels, and what the plan in ``report`` does with its operators."""
    at = recurring.kernels()
    kernels, own = [run.kernels[k] for k in at], [works[k] for k in at]
    sources = tuple(dict.fromkeys(line for w in own for line in w.sources))
    gain, why = pipeline_of(report, sources, {op for w in own for op in w.ops})
    measured = gain is not None and all(r.measured is not None for r in _at_lines(report, sources))
    likely = None if gain is None or measured else report.likely(gain)
    if gain is None:  # the reason of the kernel that takes the most time
        heaviest = max(range(len(at)), key=lambda k: kernels[k].end - kernels[k].start)
        why = pipeline_of(report, own[heaviest].sources, set(own[heaviest].ops))[1]
    seconds = sum(k.end - k.start for k in kernels) * 1e-9
    first = tuple(works[recurring.starts[0] + k].ops for k in range(recurring.length))
    bound = kernel_shares(kernels, own, rates).bound
    return KernelChain(first, len(recurring.starts), seconds, sources, bound, gain, why, measured, likely)


def pipeline_of(report: Report, sources: Sequence[str], ops: set[str]) -> tuple[float | None, str]:
    """(gain, reason) of the plan in ``report`` for operators ``ops`` at the lines ``sources``. The gain is XLA's time over that of
    their regions, measured if it was, else modelled; ``None`` where they have no region."""
    inside = _at_lines(report, sources)
    left = [r for r in report.rejected if r.source in sources and r.op in ops]
    reason = _main_reason(left)
    if not inside:
        own = "XLA has left no source line with these kernels" if not sources else "the plan has no operator at these lines"
        return None, reason or (report.obstacles[0] if report.obstacles else own)
    baseline = sum(r.jit_seconds * r.times for r in inside)
    seconds = sum(r.pipeline_seconds * r.times for r in inside)
    names = ", ".join(r.name for r in inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
    bounds = "; ".join(dict.fromkeys(map(bottleneck_text, inside)))
    why = f"{names}, {bounds}, saves {byte_text(sum(r.bytes_saved * r.times for r in inside))} of memory traffic"
    if left:
        why += f"; {plural(sum(r.count for r in left), 'operator')} at these lines left to XLA: {reason}"
    return baseline / seconds if seconds > 0 else None, why


def _at_lines(report: Report, sources: Sequence[str]) -> list[RegionReport]:
    """The regions with operators at the lines ``sources``."""
    return [r for r in report.regions if not set(sources).isdisjoint(r.sources)]


def modelled_times(regions: Sequence[RegionReport]) -> tuple[float, float]:
    """Seconds of ``regions`` with ``jax.jit`` and as pipelines, in all steps of the loops around them."""
    return sum((r.baseline_seconds * r.times for r in regions), 0.0), sum((r.seconds * r.times for r in regions), 0.0)


def why_nothing(report: Report) -> str:
    """The main reason, when nothing of a function is pipelined."""
    return report.obstacles[0] if report.obstacles else _main_reason(report.rejected) or "it has no operators"


def _main_reason(left: Sequence[Rejected]) -> str:
    """The reason of most of the operators in ``left``: of products, which take the most time, if there are any; "" of none."""
    reasons = collections.Counter[str]()
    for r in [r for r in left if r.op in _PRODUCTS] or left:
        reasons[r.reason] += r.count
    return reasons.most_common(1)[0][0] if reasons else ""
