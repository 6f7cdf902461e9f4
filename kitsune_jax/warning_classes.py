"""The classes of this package's warnings, so that ``warnings.filterwarnings`` can match each of them.

They import nothing, because the modules below ``errors`` warn too; users find them in ``kitsune_jax.errors``. Invariant: each
warning of this package has one of these classes, and its text says what to do.
"""

from __future__ import annotations


class KitsuneWarning(Warning):
    """The base of all warnings of this package. Example::

    warnings.filterwarnings("error", category=kitsune_jax.errors.KitsuneWarning)
    """


class UnknownVariableWarning(KitsuneWarning, RuntimeWarning):
    """An environment variable ``KITSUNE_...`` that does not exist, so it has no effect."""


class UnsupportedJaxWarning(KitsuneWarning, RuntimeWarning):
    """This version of JAX does not fit, so functions run as plain ``jax.jit``."""


class MissingExtensionWarning(KitsuneWarning, RuntimeWarning):
    """The CPU extension cannot be loaded, so functions run as plain JAX on a CPU."""


class NoCudaKernelsWarning(KitsuneWarning, RuntimeWarning):
    """No CUDA kernel can be made here, so functions run as plain JAX on a GPU, or in place of the emulator."""


class FallbackWarning(KitsuneWarning, RuntimeWarning):
    """A bug of this package kept a part of a function from being pipelined; ``kitsune_jax.fallbacks()`` lists it."""


class ResidualsWarning(KitsuneWarning, RuntimeWarning):
    """A bug of this package kept it from choosing the residuals of a gradient, which keeps those of ``jax.grad``."""


class ShardingWarning(KitsuneWarning, UserWarning):
    """A function of sharded arrays cannot keep its pipelines."""


class CacheWarning(KitsuneWarning, RuntimeWarning):
    """Nothing can be kept on disk, so each process compiles and measures again."""
