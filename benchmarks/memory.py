"""Memory of one call: what XLA says it allocates, and what the operating system sees.

Comes in: a compiled function, or a call. Goes out: bytes, or None where they cannot be had. XLA's count leaves out what a
pipeline's workers keep (tiles, partial sums), because it belongs to threads, not to a call; the system's leaves out nothing, but
must be asked in a fresh process, whose allocators keep nothing back from earlier calls.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def temp_bytes(compiled: Any) -> int | None:
    """Intermediates, by XLA's own analysis."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def rise(call: Callable[[], Any]) -> int | None:
    """How far this process's resident memory rises while ``call`` makes its result, the result included. Linux only."""
    gc.collect()
    try:
        _CLEAR.write_text("5")  # resets the peak: proc_pid_clear_refs(5)
        before = _kilobytes("VmRSS")
        jax.block_until_ready(call())
        return 1024 * (_kilobytes("VmHWM") - before)
    except OSError:
        return None


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{_STATUS} has no {field}")
    return int(found.group(1))
