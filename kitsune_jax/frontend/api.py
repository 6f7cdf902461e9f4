"""``pipeline``, ``Pipeline`` and ``explain``: the functions that users call.

In: a Python function of arrays and pytrees. Out: the same function, each call of which is one ``kitsune_pipeline`` equation, or a
``Report``. Invariant: the function is traced as often as ``jax.jit`` would trace it, because the traced callable (``Body``) is one
object per function and options, however often ``pipeline`` is applied to it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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


def pipeline(
    fn: Callable[..., Any] | None = None,
    *,
    residuals: Residuals = "save",
    strict: bool = False,
    force: bool | None = None,
    target: str | None = None,
    export: str = "plain",
    deterministic: bool = True,
    fetch_ahead: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Any:
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
        custom calls, which JAX exports only with ``disabled_checks`` and which need this package where they run.
      deterministic: equal arguments give equal bits in every run. ``False``: a GPU may use atomic scatter-adds (of ``segment_sum``
        and the gradient of a gather), so the last bits of such sums may differ from run to run.
      fetch_ahead: GPU only, for decoding one token at a time: a kernel may prefetch weights of the next matrix product into the L2
        cache. Do not set it if the weights are slices made by a surrounding ``lax.scan``: the arguments must lie in memory.
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
        return functools.partial(pipeline, **{name: value for name, value in given.items() if name != "fn"})
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


class Pipeline:
    """A pipelined function: what ``pipeline(fn)`` returns. Call it like ``fn``; ``fn`` itself is ``__wrapped__``.

    Example:
      >>> import jax.numpy as jnp, kitsune_jax as kj
      >>> double = kj.pipeline(lambda x: x + x)
      >>> float(double(jnp.ones(()))), double.lower(jnp.ones(8)).out_info.shape
      (2.0, (8,))
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fn: Callable[..., Any],
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
        self._jits: dict[tuple[Residuals, Options | None], tuple[Callable[..., Any], Callable[..., Any]]] = {}

    @_compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        whole, split = self._jitted(self.options())
        if self._statics.all_arrays(args, kwargs):
            return whole(*args, **kwargs)
        static, donated, kept = self._statics.split(args, kwargs)
        return split(static, donated, kept)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit(fn).lower(*args)``: lower for these arguments (arrays or ``jax.ShapeDtypeStruct``) without running."""
        whole, split = self._jitted(self.options())
        if self._statics.all_arrays(args, kwargs):
            return whole.lower(*args, **kwargs)  # type: ignore[attr-defined]
        return split.lower(*self._statics.split(args, kwargs))  # type: ignore[attr-defined]

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

    def _jitted(self, options: Options | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
        key = (self.residuals(), options)
        if key not in self._jits:
            body = body_of(self.__wrapped__, *key)
            whole = jax.jit(body, inline=True, **self._statics.jit_arguments())
            split = jax.jit(body.call_split, static_argnums=0, donate_argnums=1, inline=True)
            self._jits[key] = (whole, split)
        return self._jits[key]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A pipelined method binds like a function; ``self`` is then a pytree, or a static leaf (so it must be hashable)."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<pipeline of {getattr(self, '__qualname__', self.__name__)}>"


def explain(
    fn: Callable[..., Any],
    *,
    platform: str | None = None,
    device: str | None = None,
    **options: Any,
) -> Callable[..., Report]:
    """Report what ``pipeline(fn, **options)`` would do with given arguments, without running anything.

    Call it as ``kj.explain(fn)(*args)``. A function that calls pipelined functions (a training step, the gradient of a pipelined
    loss) is explained call by call. It is traced once more for each residual policy that the report compares.

    Args:
      fn: a function, pipelined or not; a pipelined one brings its own options.
      platform: "cpu" or "cuda"; default: JAX's default backend.
      device: a machine model for a machine that need not be present, such as "h200" (with ``platform="cuda"``); default: the
        machine at hand.
      options: options of ``pipeline``.

    Returns:
      A function of ``fn``'s arguments (arrays or ``jax.ShapeDtypeStruct``) that returns a ``Report``.

    Raises:
      ValueError: an unknown platform, device or option value. TypeError: ``fn`` is not callable.

    Example:
      >>> import jax, jax.numpy as jnp, kitsune_jax as kj
      >>> report = kj.explain(lambda w, x: jax.nn.relu(x @ w))(jnp.ones((8, 8)), jax.ShapeDtypeStruct((4096, 8), jnp.float32))
      >>> report.ops_total >= 2
      True
    """
    if isinstance(fn, Pipeline) and not options:
        pipelined = fn
    else:
        pipelined = pipeline(fn.__wrapped__ if isinstance(fn, Pipeline) else fn, **options)
    chosen = platform or jax.default_backend()
    chosen = {"gpu": "cuda"}.get(chosen, chosen)
    if chosen not in targets.PLATFORMS:
        raise ValueError(f"platform={chosen!r} has no machine model: use {' or '.join(map(repr, targets.PLATFORMS))}")

    @functools.wraps(fn)
    def explained(*args: Any, **kwargs: Any) -> Report:
        # With None JAX finds the traces that a run on the default platform has made, or will reuse.
        with expected_platform(None if chosen == _compat.default_platform() else chosen):
            return report_of(args, kwargs)

    def report_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
        resolved = pipelined.resolved()
        traced, lost = _traced(pipelined, pipelined.residuals(), args, kwargs)
        if why_not := preview.why_jax_is_unsupported():
            return preview.report_without_plan(traced, chosen, device, why_not)
        closed, consts = _compat.hoist_consts(traced)
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
            obstacles, divided = list[str | None]([preview.DISABLED]), False
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
        notes = [*([lowering.DIVIDED] if divided else []), *_notes({call.options for call in calls}, chosen, device)]
        return dataclasses.replace(report, residuals=kept, notes=(*report.notes, *notes))

    return explained


def _notes(options: Iterable[Options], platform: str, device: str | None) -> list[str]:
    """Notes of a report: what ``jax.export`` does with the pipelines, and why this machine cannot run a plan for another one."""
    kinds = {o.export for o in options}
    notes = [note for kind, note in (("plain", lowering.EXPORTED), ("calls", lowering.EXPORTED_CALLS)) if kind in kinds]
    missing = {why for o in options if (why := lowering.missing_target(lowering.target_of(o, platform)))} if device else ()
    return [*notes, *(f"planned for another machine; on this one nothing would be pipelined: {why}" for why in sorted(missing))]


def _traced(pipelined: Pipeline, policy: Residuals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
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
