"""What can be wrong with a kernel's machine code although its source is right: hazards that the compiler makes.

Comes in: a disassembled function (``sass.disassemble``). Goes out: findings, each a sentence with an address. For tests and
documentation, as ``sass`` is: nothing that runs a program imports this package.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda.lint.aligned import Skipped, skipped
from kitsune_jax.targets.cuda.lint.flow import Flow, flow
from kitsune_jax.targets.cuda.lint.operands import UnknownOpcode
from kitsune_jax.targets.cuda.lint.wgmma import Hazard, InFlight, Wait, in_flight

__all__ = ["Flow", "Hazard", "InFlight", "Skipped", "UnknownOpcode", "Wait", "flow", "in_flight", "skipped"]
