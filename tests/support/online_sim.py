"""Online sums in the simulator of the CPU program format: a part of its machine (``bytecode_sim``)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.targets.cpu import bytecode as bc


class OnlineSums:
    p: bc.CpuProgram
    sinks: list[Any]
    tops: dict[int, tuple[Any, Any]]  # of scaled sums: their tops so far, and which are NaN in the end
    _read: Any  # an operand's elements over (rows, *extents)
    _write: Any
    _memory: Any
    _folded: Any  # adds rows to a sink by their indices

    def _accumulatescaled(self, x: bc.AccumulateScaled) -> None:
        self._scaled(x, self._read(x.x, x.extents))

    def _accumulatetaken(self, x: bc.AccumulateTaken) -> None:
        assert tuple(x.x.strides) == tuple(dim_strides(x.extents))
        value = self._rows(bc.CpuRows(x.x, x.rows, x.mode, x.fill, x.taken), math.prod(x.extents))
        if x.factors:
            factor = self._read(x.factor, (x.factors,))
            assert factor.dtype == np.float32
            value *= np.repeat(factor, value.shape[1] // x.factors, axis=1)
        self._scaled(x, value) if x.heads else self._folded(x, value)

    def _rows(self, x: bc.CpuRows, width: int) -> np.ndarray:
        if x.rows == 0:
            return self._read(x.x, (width,)).astype(np.float64)
        taken = self._read(x.taken, ()).astype(np.int64)
        at = np.clip(taken, 0, x.rows - 1)[:, None] * x.x.row_stride + np.arange(width)
        value = self._memory(x.x.ref, False)[x.x.ref.offset + at].astype(np.float64)
        if x.mode == bc.FILL:
            value[(taken < 0) | (taken >= x.rows)] = x.fill[0]
        return value

    def _takendot(self, d: bc.CpuTakenDot) -> None:
        x, y = (self._rows(side, d.heads * d.inner) for side in (d.x, d.y))
        self._write(d.out, (d.heads,), (x * y).reshape(-1, d.heads, d.inner).sum(-1))

    def _scaled(self, x: bc.AccumulateScaled, rows: np.ndarray) -> None:
        width, index = math.prod(x.extents), self._read(x.index, ()).astype(np.int64)
        value = rows.reshape(-1, x.heads, width // x.heads).astype(np.float64)
        tops = self._read(x.top, (x.heads,)).astype(np.float64)
        assert x.sorted and not x.ordered and bc.REDUCTIONS[self.p.sinks[x.sink].how] == "sum"
        if self.sinks[x.sink] is None:
            self.sinks[x.sink] = np.zeros(x.count * width)
            self.tops[x.sink] = np.full((x.count, x.heads), -np.inf), np.full((x.count, x.heads), False)
        total = self.sinks[x.sink].reshape(x.count, x.heads, -1)
        known, spoiled = self.tops[x.sink]
        for r, i in enumerate(index):
            if not 0 <= i < x.count:
                continue
            to = np.maximum(known[i], tops[r])
            with np.errstate(all="ignore"):
                parts = [(total[i], known[i]), (value[r], tops[r])]
                finite = [(part, np.where(np.isfinite(at), at, 0) - np.where(np.isfinite(to), to, 0), at) for part, at in parts]
                total[i] = sum(part * np.where((at == -np.inf) | np.isnan(to), 1, np.exp(by))[:, None] for part, by, at in finite)
            known[i], spoiled[i] = to, ~np.isfinite(to) & (not x.finite)

    def _runmax(self, x: bc.RunMax) -> None:
        index, value = self._read(x.index, ()), self._read(x.x, x.extents)
        runs = np.cumsum(np.r_[0, index[1:] != index[:-1]])
        largest = [value[runs == k].astype(np.float64).max(0) for k in range(runs[-1] + 1)]
        self._write(x.out, x.extents, np.stack(largest)[runs])
