"""The call-like primitive ``kitsune_pipeline[call_jaxpr, options]``.

Comes in: a closed jaxpr without constants, and ``Options``. Goes out: the primitive, with the rules of every transformation.
Invariant: a transformation only ever rewrites ``call_jaxpr`` and binds the same primitive again; regions are sought when it is
lowered, so forward, backward, batched and recomputed programs all reach the same matcher. Where this JAX does not take the rules,
``pipeline_p`` is None and ``failure`` says why; only ``jax_support`` asks.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax

from kitsune_jax import _compat, config, handover, lowering, targets
from kitsune_jax.options import Options

_jitted: weakref.WeakKeyDictionary[Any, dict[Options, Callable[..., list[jax.Array]]]] = weakref.WeakKeyDictionary()
_jitted_lock = threading.Lock()


def _impl(*args: Any, call_jaxpr: Any, options: Options) -> list[Any]:
    """Evaluate eagerly: compiled, so that an evaluated jaxpr reaches its pipelines too.

    Under ``disable_jit``, and where ``debug_nans`` looks for the guilty operator, evaluate op by op instead: a compiled copy would
    hide what the user wants to see, and would come back here.
    """
    if jax.config.jax_disable_jit or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return _compat.jaxpr_as_fun(call_jaxpr)(*args)
    return _compiled(call_jaxpr, options)(*args)


def _compiled(call_jaxpr: Any, options: Options) -> Callable[..., list[Any]]:
    """The jitted call, kept as long as ``call_jaxpr`` lives. It holds a copy, as JAX's own caches would keep the key alive."""
    key = _compat.open_parts(call_jaxpr)[0]
    with _jitted_lock:
        per_options = _jitted.setdefault(key, {})
        if options not in per_options:
            copy = _compat.copy_jaxpr(call_jaxpr)
            per_options[options] = jax.jit(functools.partial(pipeline_p.bind, call_jaxpr=copy, options=options))
        return per_options[options]


# The platform that a program is traced for while ``explain`` looks at another one than JAX's own. JAX keys its caches on it; made
# at import, because making one empties them.
expected_platform = jax.make_user_context(None)


def _lean(*parts: Any, options: Options) -> Any:
    """``handover.lean``; what it fails on is divided as JAX divides it, and costs bytes, not the user's gradient."""
    try:
        return handover.lean(*parts, large=_repeats_products(options))
    except Exception as error:
        if config.strict():
            raise
        config.logger.exception("a gradient keeps the residuals of JAX's own linearization")
        warnings.warn(
            f"kitsune_jax could not choose what a gradient keeps from the forward pass ({type(error).__name__}: {error}): it keeps "
            "what jax.grad would. This is a bug of kitsune_jax: please report it. KITSUNE_STRICT=1 raises.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _repeats_products(options: Options) -> bool:
    """Does the target repeat products that a program traced now will most likely run on? One that is traced for one platform and
    lowered for another is right all the same."""
    platform = expected_platform.value or _compat.default_platform()
    target = lowering.target_of(options, platform if platform in targets.PLATFORMS else None)
    return target is not None and targets.get(target).repeats_products


def _primitive() -> Any:
    primitive = _compat.new_primitive(lowering.PRIMITIVE_NAME)
    _compat.register_call_rules(primitive, _lean)
    # Lowering is cacheable: equal calls in a module share one function, and multi-platform export asks for it.
    _compat.register_lowering(primitive, functools.partial(lowering.lower, platform=None), cacheable=True)
    for platform in targets.PLATFORMS:
        rule = functools.partial(lowering.lower, platform=platform)
        _compat.register_lowering(primitive, rule, platform=platform, cacheable=True)
    primitive.def_impl(_impl)
    return primitive


try:
    pipeline_p, failure = _primitive(), ""
except Exception as error:  # a JAX that is not known: nothing is bound then, and functions run as plain ``jit``
    pipeline_p, failure = None, f"{type(error).__name__}: {error}"
