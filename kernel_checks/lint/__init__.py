"""What can be wrong with a kernel's machine code although its source is right: hazards that the compiler makes.

Comes in: a disassembled function (``sass.disassemble``). Goes out: findings, each a sentence with an address. For tests and
documentation, as ``sass`` is: nothing that runs a program imports this package.
"""

from __future__ import annotations

from kernel_checks.lint.aligned import Skipped, skipped
from kernel_checks.lint.flow import Flow, flow
from kernel_checks.lint.operands import UnknownOpcode
from kernel_checks.lint.wgmma import Hazard, InFlight, Wait, in_flight

__all__ = ["Flow", "Hazard", "InFlight", "Skipped", "UnknownOpcode", "Wait", "flow", "in_flight", "skipped"]
