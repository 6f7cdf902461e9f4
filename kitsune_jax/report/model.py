"""The Report that ``kj.explain`` returns: data that prints itself."""

from __future__ import annotations

import dataclasses

from kitsune_jax.report.data import ReportData
from kitsune_jax.report.html import render_html
from kitsune_jax.report.text import render_text


@dataclasses.dataclass(frozen=True, slots=True)
class Report(ReportData):
    """What ``kj.explain(fn)(*args)`` found out about ``fn`` for ``platform``, without running it.

    ``ops_total`` counts the function's operators after calls were inlined, views (reshapes, broadcasts, iota) apart, because they
    move nothing of their own; ``ops_pipelined`` counts those inside a region;
    ``traffic_bulk_sync`` and ``traffic_pipeline`` are the modelled off-chip bytes of the whole function without and with its
    regions. ``flops`` are its useful operations: those of a matrix product, and those of the pointwise operators as the cost model
    counts them. ``residuals`` says what is kept for a backward pass, where there is one or the function could have one.
    ``obstacles`` say what keeps all pipelines away from the function, or from some of its pipelined calls: nothing of those counts
    as pipelined.

    Example::

        report = kj.explain(mlp)(params, x)
        print(report)                      # regions, stages, queues, and the reason for every operator left out
        assert report.coverage > 0.9
        json.dumps(report.to_dict())
    """

    def __str__(self) -> str:
        return render_text(self)

    def _repr_html_(self) -> str:
        return render_html(self)
