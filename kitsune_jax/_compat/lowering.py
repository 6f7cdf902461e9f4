"""Lowering rules and what surrounds them: devices, meshes, exports, processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from kitsune_jax._compat.versions import jax_module, jaxpr_as_fun, mlir


def default_platform() -> str:
    """The platform that a program is most likely traced for: that of JAX's default device."""
    device = jax.config.jax_default_device
    name = device if isinstance(device, str) else device.platform if device is not None else jax.default_backend()
    return {"gpu": "cuda"}.get(name, name)


def runs_on_one_device(ctx: Any) -> bool:
    """May a custom call stand in the module that ``ctx`` lowers: one device, or every mesh axis manual?

    Elsewhere XLA would gather the call's operands on every device without a word (jax issue 32098).
    """
    axes = ctx.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return axes.mesh.size == 1 or frozenset(axes.manual_axes) == frozenset(axes.mesh.axis_names)
    return getattr(axes, "num_devices", 2) == 1


def is_exported(ctx: Any) -> bool:
    """Is the module that ``ctx`` lowers one of ``jax.export``, to be run by another process?"""
    return bool(getattr(ctx.module_context.lowering_parameters, "for_export", False))


def lower_jaxpr(ctx: Any, closed: Any, args: Sequence[Any]) -> Any:
    """The MLIR values of ``closed`` on the MLIR values ``args``: what a lowering rule returns."""
    return mlir.lower_fun(jaxpr_as_fun(closed), multiple_results=True)(ctx, *args)


def register_lowering(prim: Any, rule: Any, **how: Any) -> None:
    """Lower ``prim`` by ``rule``, for ``platform=`` or for all of them."""
    mlir.register_lowering(prim, rule, **how)


def aval_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result of another shape and dtype that varies over the same mesh axes as ``aval`` (``shard_map`` checks that)."""
    if hasattr(aval, "update"):
        return aval.update(shape=shape, dtype=jax.numpy.dtype(dtype), weak_type=False)
    return jax.ShapeDtypeStruct(shape, dtype)


def varies(aval: Any) -> bool:
    """Whether a value differs along a manual mesh axis."""
    return bool(_varying_axes(aval))


def varying_like(x: Any, aval: Any) -> Any:
    """``x``, which varies over the manual mesh axes that ``aval`` varies over as well, if not yet (``shard_map`` checks that)."""
    axes = _varying_axes(aval)
    missing = tuple(a for a in axes if a not in _varying_axes(jax.typeof(x))) if axes else ()
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying_axes(aval: Any) -> Any:
    return aval.mat.varying if hasattr(aval, "mat") else getattr(aval, "vma", None) or ()


def distributed_client() -> tuple[int, Any] | None:
    """(number of this process, the key-value store of all processes) of a program of several; None for one alone."""
    state = jax_module("jax._src.distributed").global_state
    if state.client is None or (state.num_processes or 1) < 2:
        return None
    return int(state.process_id), state.client


def has_cpu_backend() -> bool:
    """Whether JAX can run something on the CPU here (``JAX_PLATFORMS`` may leave it out)."""
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError:
        return False
