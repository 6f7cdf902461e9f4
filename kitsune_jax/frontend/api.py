"""``pipeline``, ``Pipeline`` and ``explain``: the functions that users call.

Comes in: a Python function of arrays and pytrees. Goes out: the same function, each call of which is one ``kitsune_pipeline``
equation, or a ``Report``. Invariants: the function is traced as often as ``jax.jit`` would trace it, because the traced callable
(``Body``) is one object per function and options, however often ``pipeline`` is applied to it; for a type checker the result has
the parameters and the result type of the function.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, Never, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, cast, overload

import jax

from kitsune_jax import _compat, config, targets
from kitsune_jax.config import Options, resolve
from kitsune_jax.errors import NotPipelined
from kitsune_jax.frontend import explain as preview
from kitsune_jax.frontend import lowering, tracing
from kitsune_jax.frontend.residuals import compare_calls, compare_gradients, is_derivative, override, policy_name
from kitsune_jax.frontend.tracing import Residuals, body_of, expected_platform
from kitsune_jax.report.render import Report

_compat.hide_from_tracebacks(__file__)

P = ParamSpec("P")  # the parameters of a user's function
Q = ParamSpec("Q")  # those of a method, without ``self``
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class PipelineOptions(TypedDict, total=False):
    """The options of ``pipeline``, for type checkers."""

    residuals: Literal["save", "recompute"] | Callable[..., Any]
    strict: bool
    force: bool | None
    target: Literal["emulator"] | None
    export: Literal["plain", "calls"]
    deterministic: bool
    network: tuple[float, float] | None
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None


class Decorator(Protocol):
    """``pipeline(**options)``: makes a ``Pipeline`` of a function."""

    def __call__(self, fn: Callable[P, R], /) -> Pipeline[P, R]: ...


@overload
def pipeline(fn: Callable[P, R], **options: Unpack[PipelineOptions]) -> Pipeline[P, R]: ...
@overload
def pipeline(fn: None = None, **options: Unpack[PipelineOptions]) -> Decorator: ...
def pipeline(
    fn: Callable[P, R] | None = None,
    *,
    residuals: Literal["save", "recompute"] | Callable[..., Any] = "save",
    strict: bool = False,
    force: bool | None = None,
    target: Literal["emulator"] | None = None,
    export: Literal["plain", "calls"] = "plain",
    deterministic: bool = True,
    network: tuple[float, float] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Pipeline[P, R] | Decorator:
    """Compile ``fn`` so that tiles of its arrays stay on chip from one operator to the next, instead of whole arrays in memory.

    ``jax.jit`` finishes one layer for the whole batch, writes it to memory, and reads it back for the next layer. A pipeline cuts
    the batch into tiles and takes each tile through all layers while it is on chip. Like ``jax.checkpoint``, the result takes and
    returns the same pytrees as ``fn`` and works with every JAX transformation. Parts that cannot be pipelined, or would not get
    faster, are compiled by XLA as usual. ``fn`` must be traceable by ``jax.jit``. Leaves of arguments that are not arrays or
    numbers (strings, callables, configuration objects) must be hashable and are static.

    Args:
      fn: the function. Without it, ``pipeline(**options)`` is a decorator.
      residuals: what the forward pass saves for the backward pass: ``"save"`` (as JAX does), ``"recompute"`` (the arguments only),
        or a policy of ``jax.checkpoint_policies``.
      strict: raise ``NotPipelined`` when the function is lowered and nothing of it could be pipelined.
      force: pipeline every legal region, even if the cost model expects it to be slower. ``None`` reads ``KITSUNE_FORCE``.
      target: ``None``: pipelines for the platform that runs the function. ``"emulator"``: on a CPU, run the CUDA kernels of a GPU,
        compiled by the host's C++ compiler and emulated thread by thread. For tests and debugging; slow.
      export: ``"plain"``: ``jax.export`` writes the function as HLO without this package. ``"calls"``: it keeps the pipelines as
        custom calls, which JAX exports only with ``disabled_checks`` and which need this package where they run. With symbolic
        shapes pipelines are planned where the program is called.
      deterministic: equal arguments give equal bits in every run. ``False``: a GPU may use atomic scatter-adds (of ``segment_sum``
        and the gradient of a gather), so the last bits of such sums may differ from run to run.
      network: several devices only: (seconds of an empty message, bytes per second) between them, where XLA runs collectives beside
        other operators. A call is then divided where the all-reduce of its first gradients is modelled to take longer beside the
        rest than the division costs. XLA's CPU client runs nothing beside an all-reduce: leave it ``None`` there.
      static_argnums, static_argnames, donate_argnums: as in ``jax.jit``; donation matters only to calls outside of ``jit``.

    Returns:
      A ``Pipeline``, called like ``fn``; a decorator if ``fn`` is not given.

    Raises:
      TypeError: ``fn`` is not callable. ValueError: an option has no such value.

    Example:
      >>> import jax, jax.numpy as jnp, kitsune_jax as kj
      >>> @kj.pipeline
      ... def mlp(w, x):
      ...     return jax.nn.relu(x @ w[0]) @ w[1]
      >>> w = [jnp.ones((8, 16)), jnp.ones((16, 4))]
      >>> jax.jit(jax.grad(lambda w, x: mlp(w, x).sum()))(w, jnp.ones((32, 8)))[0].shape
      (8, 16)
    """
    given = dict(locals())  # all arguments by name, so that an option is named here once
    config.check_environment()
    if fn is None:
        options_alone = {name: value for name, value in given.items() if name != "fn"}
        return cast(Decorator, functools.partial(pipeline, **options_alone))
    if not callable(fn):
        raise TypeError(f"kitsune_jax.pipeline takes a function of arrays, not {type(fn).__name__}: write pipeline(fn)(*args)")
    if not (residuals in ("save", "recompute") or callable(residuals)):
        raise ValueError(
            f"residuals={residuals!r} is not known: use 'save', 'recompute', or a policy such as "
            "jax.checkpoint_policies.dots_saveable"
        )
    if target is not None and target not in targets.INSTEAD:
        names = ", ".join(map(repr, targets.INSTEAD))
        raise ValueError(f"target={target!r} is not known: use {names}, or None for the platform's own")
    statics = tracing.Statics.of(fn, static_argnums, static_argnames, donate_argnums)
    # The policy of residuals is asked for at each call.
    options = {field.name: given[field.name] for field in dataclasses.fields(Options) if field.name != "residuals"}
    return Pipeline(fn, residuals, config.check_options(options), statics)


class Pipeline(Generic[P, R_co]):
    """A pipelined function: ``pipeline(fn)`` returns it. Call it like ``fn``; ``fn`` itself is ``__wrapped__``.

    It has the name, the docstring and the signature of ``fn``, and the methods of a ``jax.jit`` function: ``lower``, ``trace``,
    ``eval_shape`` and ``clear_cache``. Where leaves of the arguments are static though they are not named as static (strings,
    callables), the compiled function of ``lower`` and ``trace`` takes two lists instead of the arguments: the donated arrays and
    the others.

    Example:
      >>> import jax.numpy as jnp, kitsune_jax as kj
      >>> double = kj.pipeline(lambda x: x + x)
      >>> float(double(jnp.ones(()))), double.lower(jnp.ones(8)).out_info.shape
      (2.0, (8,))
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fn: Callable[P, R_co],
        residuals: Residuals,
        options: Mapping[str, Any],
        statics: tracing.Statics,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        if not hasattr(self, "__name__"):
            self.__name__ = type(fn).__name__
        self._residuals = residuals
        self._given = options  # for ``config.resolve``, without the name of the policy
        self._statics = statics
        self._jits: dict[tuple[Residuals, Options | None], tuple[Any, Any]] = {}

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        fn, given, named = self._jitted_for(args, kwargs)
        result: R_co = fn(*given, **named)
        return result

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """``jax.jit(fn).lower(*args)``: lower for these arguments (arrays or ``jax.ShapeDtypeStruct``) without running.

        Example:
          >>> import jax, jax.numpy as jnp, kitsune_jax as kj
          >>> kj.pipeline(jnp.tanh).lower(jax.ShapeDtypeStruct((4, 8), jnp.float32)).compile()(jnp.ones((4, 8))).shape
          (4, 8)
        """
        fn, given, named = self._jitted_for(args, kwargs)
        return cast(jax.stages.Lowered, fn.lower(*given, **named))

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """``jax.jit(fn).trace(*args)``: trace for these arguments (arrays or ``jax.ShapeDtypeStruct``), without lowering.

        The result has ``jaxpr``, in which ``fn`` is one equation ``kitsune_pipeline``, ``out_info`` and ``lower()``.

        Example:
          >>> import jax, jax.numpy as jnp, kitsune_jax as kj
          >>> traced = kj.pipeline(jnp.tanh).trace(jax.ShapeDtypeStruct((4, 8), jnp.float32))
          >>> [eqn.primitive.name for eqn in traced.jaxpr.eqns], traced.out_info.shape
          (['kitsune_pipeline'], (4, 8))
        """
        fn, given, named = self._jitted_for(args, kwargs)
        return cast(jax.stages.Traced, fn.trace(*given, **named))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit(fn).eval_shape(*args)``: the result with a ``jax.ShapeDtypeStruct`` for each array. Runs nothing.

        Example:
          >>> import jax, jax.numpy as jnp, kitsune_jax as kj
          >>> kj.pipeline(jnp.sum).eval_shape(jax.ShapeDtypeStruct((4, 8), jnp.float32)).shape
          ()
        """
        fn, given, named = self._jitted_for(args, kwargs)
        return fn.eval_shape(*given, **named)

    def clear_cache(self) -> None:
        """``jax.jit(fn).clear_cache()``: forget traces and compiled code, so that the next call traces ``fn`` again.

        Use it after a change of a global value that ``fn`` reads.

        Example:
          >>> import jax.numpy as jnp, kitsune_jax as kj
          >>> scale = 2.0
          >>> scaled = kj.pipeline(lambda x: scale * x)
          >>> before, scale = scaled(1.0), 3.0
          >>> scaled.clear_cache()
          >>> float(before), float(scaled(1.0))
          (2.0, 3.0)
        """
        for jits in self._jits.values():
            for fn in jits:
                fn.clear_cache()

    def options(self) -> Options | None:
        """The options of a call made now; ``None`` if the package is switched off (``KITSUNE_DISABLE``) or cannot work with this
        JAX."""
        if config.disabled():
            return None
        options = self.resolved()
        if preview.jax_is_supported():
            return options
        if options.strict:
            raise NotPipelined(f"kitsune_jax: nothing was pipelined: {preview.why_jax_is_unsupported()}")
        return None

    def resolved(self) -> Options:
        """The options of a call made now, if the package were not switched off."""
        return resolve({**self._given, "residuals": policy_name(self.residuals())})

    def residuals(self) -> Residuals:
        """The residual policy of a call made now: the function's own, unless ``explain`` compares another one."""
        policy: Residuals | None = override.value
        return self._residuals if policy is None else policy

    def _jitted_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The ``jax.jit`` function for a call made now, and its arguments by position and by name."""
        whole, split = self._jitted(self.options())
        if self._statics.all_arrays(args, kwargs):
            return whole, args, kwargs
        return split, self._statics.split(args, kwargs), {}

    def _jitted(self, options: Options | None) -> tuple[Any, Any]:
        """Two ``jax.jit`` functions: of the arguments as they are, and of those that ``Statics.split`` makes."""
        key = (self.residuals(), options)
        if key not in self._jits:
            body = body_of(self.__wrapped__, *key)
            whole = jax.jit(body, inline=True, **self._statics.jit_arguments())
            split = jax.jit(body.call_split, static_argnums=0, donate_argnums=1, inline=True)
            self._jits[key] = (whole, split)
        return self._jits[key]

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self: Pipeline[Concatenate[Any, Q], R], instance: object, owner: type | None = None) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A pipelined method binds like a function; ``self`` is then a pytree, or a static leaf (so it must be hashable)."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<pipeline of {_name(self)}>"


class Explanation(Generic[P]):
    """``explain(fn)``: called with arguments of ``fn``, it returns the ``Report``. It has the name and the docstring of ``fn``."""

    def __init__(self, fn: Callable[P, Any], report_of: Callable[[tuple[Any, ...], dict[str, Any]], Report]) -> None:
        functools.update_wrapper(self, fn)
        self._report_of = report_of

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Report: ...  # for completion
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Report: ...  # shapes in place of arrays
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return self._report_of(args, kwargs)

    def __repr__(self) -> str:
        return f"<explain of {_name(self)}: {_how_to_explain(self)}>"


def explain(
    fn: Callable[P, Any],
    *arguments: Never,
    platform: Literal["cpu", "cuda", "gpu"] | None = None,
    device: str | None = None,
    **options: Unpack[PipelineOptions],
) -> Explanation[P]:
    """Report what ``pipeline(fn, **options)`` would do with given arguments, without running anything.

    Call it as ``kj.explain(fn)(*args)``. A function that calls pipelined functions (a training step, the gradient of a pipelined
    loss) is explained call by call. It is traced once more for each residual policy that the report compares.

    Args:
      fn: a function, pipelined or not; a pipelined one brings its own options.
      arguments: none; those of ``fn`` go into the second pair of parentheses.
      platform: "cpu" or "cuda" (also "gpu"); default: that of ``device``, or else JAX's default backend.
      device: a machine model for a machine that need not be present, such as "h200" or "zen5-8"; default: the machine at hand.
      options: options of ``pipeline``.

    Returns:
      A function of ``fn``'s arguments (arrays or ``jax.ShapeDtypeStruct``) that returns a ``Report``.

    Raises:
      ValueError: an unknown platform, device or option value. TypeError: ``fn`` is not callable, or its arguments were given with
      it.

    Example:
      >>> import jax, jax.numpy as jnp, kitsune_jax as kj
      >>> report = kj.explain(lambda w, x: jax.nn.relu(x @ w))(jnp.ones((8, 8)), jax.ShapeDtypeStruct((4096, 8), jnp.float32))
      >>> report.ops_total >= 2
      True
    """
    if arguments:
        raise TypeError(f"explain takes a function alone, and {len(arguments)} more were given: {_how_to_explain(fn)}")
    if isinstance(fn, Pipeline) and not options:
        pipelined = fn
    else:
        pipelined = pipeline(fn.__wrapped__ if isinstance(fn, Pipeline) else fn, **options)
    chosen = _planned_platform(platform, device, pipelined._given["target"])

    def explained(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
        # With None JAX finds the traces that a run on the default platform has made, or will reuse.
        with expected_platform(None if chosen == _compat.default_platform() else chosen):
            return report_of(args, kwargs)

    def report_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
        resolved = pipelined.resolved()
        traced, lost = _traced(pipelined, pipelined.residuals(), args, kwargs)
        if why_not := preview.why_jax_is_unsupported():
            return preview.report_without_plan(traced, chosen, device, why_not)
        closed, consts = _compat.indices_inside(traced)
        flat = [*consts, *jax.tree.leaves(pipelined._statics.split(args, kwargs)[1:])]
        live = _compat.without_dead_code(_compat.without_refs(closed))
        calls = [] if isinstance(fn, Pipeline) or options else preview.pipelined_calls(live)
        of_gradient = not calls  # of the function as one call
        if of_gradient:
            if not config.disabled():  # nnx.jit around pipelined calls carries the changes of a step out
                tracing.refuse_mutations(pipelined, lost)
            live = preview.as_call(live, resolved)
            calls = preview.pipelined_calls(live)
        if of_gradient and config.disabled():
            obstacles, divided = list[str | None]([preview.DISABLED]), tuple[str, ...]()
        else:
            obstacles, divided = preview.obstacles_of(live, calls, flat, chosen, device)
        report = preview.explain_calls(calls, obstacles, chosen, device)
        if not report.ops_pipelined:
            return report

        def retrace(policy: Residuals) -> Any:
            return _compat.hoist_consts(_traced(pipelined, policy, args, kwargs)[0])[0]

        kept = None
        if not of_gradient:
            kept = compare_calls(closed, calls, retrace, chosen, device)
        elif not is_derivative(closed):
            kept = compare_gradients(closed, resolved, pipelined.residuals(), retrace, chosen, device)
        notes = [*divided, *_notes({call.options for call in calls}, chosen, device)]
        return dataclasses.replace(report, residuals=kept, notes=(*report.notes, *notes))

    return Explanation(fn, explained)


def _name(fn: Any) -> str:
    """The name of a callable in messages."""
    return str(getattr(fn, "__qualname__", getattr(fn, "__name__", type(fn).__name__)))


def _how_to_explain(fn: Any) -> str:
    name = getattr(fn, "__name__", "")
    return f"call it with arguments: explain({name if name.isidentifier() else 'fn'})(*args)"


def _planned_platform(platform: str | None, device: str | None, target: str | None) -> str:
    """The platform that ``explain`` plans for: the given one, that of the given device, or JAX's. Raises ``ValueError`` for an
    unknown one. ``target``: it has the machines instead of JAX's platform."""
    chosen = platform or jax.default_backend()
    chosen = {"gpu": "cuda"}.get(chosen, chosen)
    if device is None and chosen in targets.PLATFORMS:
        return chosen
    if device is not None:
        those_of = [name for name in sorted(targets.PLATFORMS, key=lambda name: name != chosen) if _has_model(name, device)]
        if not device or not those_of:
            raise ValueError(targets.unknown_device(device))
        if platform is None and target is None:
            return those_of[0]
        if target is None and chosen in targets.PLATFORMS and chosen not in those_of:
            raise ValueError(f"device={device!r} is one of platform={those_of[0]!r}, not of {platform!r}: leave out the platform")
    if chosen not in targets.PLATFORMS:
        raise ValueError(f"platform={chosen!r} has no machine model: use {' or '.join(map(repr, targets.PLATFORMS))}")
    return chosen


def _has_model(platform: str, device: str) -> bool:
    try:
        targets.get(platform).machine(device)
    except ValueError:
        return False
    return True


def _notes(options: Iterable[Options], platform: str, device: str | None) -> list[str]:
    """Notes of a report: what ``jax.export`` does with the pipelines, and why this machine cannot run a plan for another one."""
    kinds = {o.export for o in options}
    notes = [note for kind, note in (("plain", lowering.EXPORTED), ("calls", lowering.EXPORTED_CALLS)) if kind in kinds]
    missing = {why for o in options if (why := lowering.missing_target(lowering.target_of(o, platform)))} if device else ()
    return [*notes, *(f"planned for another machine; on this one nothing would be pipelined: {why}" for why in sorted(missing))]


def _traced(
    pipelined: Pipeline[..., Any], policy: Residuals, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[str, ...]]:
    """The jaxpr of a call with ``args``, and the names of the argument arrays that the function changes and does not return."""
    fn = body_of(pipelined.__wrapped__, policy, None).watched()
    static, donated, kept = pipelined._statics.split(args, kwargs)
    trees: list[Any] = []

    def arrays(*args: Any) -> Any:
        """The arrays among ``fn``'s results. A program may return modules that hold functions (equinox's do): those are left
        out."""
        a, k = static.join(*args)
        out = fn(*a, **k)
        changed = out if isinstance(out, tracing.Changed) else None
        results = [x for x in jax.tree.leaves(changed.result if changed else out) if _compat.valid_jaxtype(x)]
        outs = dataclasses.replace(changed, result=results) if changed else results
        trees.append(jax.tree.structure(outs))
        return outs

    closed = jax.make_jaxpr(arrays)(donated, kept)
    closed, _, lost = tracing.find_lost_mutations(closed, trees[-1])
    return closed, lost
