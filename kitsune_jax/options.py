"""What a pipelined function was asked for: the static parameter that travels with the primitive through every transformation.

Comes in: arguments of ``pipeline`` and the switches of ``config``. Goes out: ``Options``, frozen and hashable. Invariant:
everything that changes what a lowering does is in here, because JAX keys its caches on it.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax import config


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Resolved options. ``force``: ignore the cost model.

    ``target``: None, the platform's own, or "emulator": CUDA kernels, run on the CPU. ``residuals``: the name of the policy, for
    reports; what it does is in the jaxpr. ``export``: what ``jax.export`` is given, "plain" HLO or custom "calls".
    ``deterministic``: equal arguments give equal bits in every run. ``fetch_ahead``: arguments lie in memory, so a call may ask for
    parts of them that XLA reads behind it.
    """

    strict: bool = False
    force: bool = False
    target: str | None = None
    residuals: str = "save"
    export: str = "plain"
    deterministic: bool = True
    fetch_ahead: bool = False


def resolve(
    *,
    strict: bool,
    force: bool | None,
    target: str | None = None,
    residuals: str = "save",
    export: str = "plain",
    deterministic: bool = True,
    fetch_ahead: bool = False,
) -> Options:
    """Options of a call made now: ``force=None`` takes ``KITSUNE_FORCE``; ``strict`` is also set by ``KITSUNE_STRICT``."""
    return Options(
        strict=strict or config.strict(),
        force=config.forced() if force is None else force,
        target=target,
        residuals=residuals,
        export=export,
        deterministic=deterministic,
        fetch_ahead=fetch_ahead,
    )
