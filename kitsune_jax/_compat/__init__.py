"""Everything that depends on the version of JAX, and the only folder that imports private JAX.

Comes in: JAX objects (jaxprs, equations, lowering contexts). Goes out: the few operations on them that the rest of the package
needs, with one meaning for every supported version (0.10.2 to 0.12). Invariants: nothing outside this folder knows whether a jaxpr
is "closed"; importing it works with every JAX, and a missing part of JAX fails where it is used (``frontend.explain`` tries that
first).
"""

from __future__ import annotations

from kitsune_jax._compat.call_rules import *
from kitsune_jax._compat.jaxprs import *
from kitsune_jax._compat.sharding import *
