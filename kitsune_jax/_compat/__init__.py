"""Everything that depends on the version of JAX, and the only folder that imports private JAX.

Comes in: JAX objects (jaxprs, equations, lowering contexts). Goes out: the few operations the rest of the package needs on them,
with one meaning for every supported version (0.10.2 to 0.12). Invariants: nothing outside this folder knows whether a jaxpr is
"closed"; importing it works with every JAX, and what a JAX lacks fails where it is used (``jax_support`` tries that first).
"""

from __future__ import annotations

from kitsune_jax._compat.call_rules import *
from kitsune_jax._compat.jaxprs import *
