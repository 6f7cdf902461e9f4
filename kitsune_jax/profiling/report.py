"""The result of ``kj.profile``: frozen data that prints as text, as HTML in a notebook, and as JSON.

Comes in: metrics, shares and chains of a program, and what a pipeline would do with each. Goes out: strings of at most ``WIDTH``
columns, the verdict first. Nothing here measures or decides anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kitsune_jax.config import printable
from kitsune_jax.profiling.metrics import Bound, Metrics, Shares
from kitsune_jax.report.data import count_text, percent_text, plural, time_text
from kitsune_jax.report.page import escape
from kitsune_jax.report.text import WIDTH

_DOES = {
    "overhead": "is overhead",
    "memory": "moves data",
    "compute": "computes",
    "other": "is in kernels whose operations are not known",
}
_MOST_LINES, _MOST_OPS = 3, 6  # source lines of a chain, and operators of one of its kernels, that are printed


@dataclasses.dataclass(frozen=True, slots=True)
class KernelChain:
    """Kernels that run one after the other, and recur ``times`` times in a call.

    ``ops``: the JAX operators of each kernel. ``seconds``: of all occurrences together. ``sources``: the user's lines. ``bound``:
    of its kernels. ``gain``: the time of ``jax.jit`` over that of the pipelines that its operators are in, or ``None`` where they
    are in none; ``measured``, or modelled, and then most measured ones are in the range ``likely``. ``why``: the bottleneck and the
    bytes saved, or the reason why they are left to XLA.
    """

    ops: tuple[tuple[str, ...], ...]
    times: int
    seconds: float
    sources: tuple[str, ...]
    bound: Bound
    gain: float | None
    why: str
    measured: bool = False
    likely: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSize:
    """One size of the leading dimension that was tried: the latency of the call, its parts and its bound."""

    size: int
    latency: float
    shares: Shares
    bound: Bound


@dataclasses.dataclass(frozen=True, slots=True)
class Gain:
    """Seconds of a call with ``jax.jit`` and as a pipeline: the fastest calls of each, made in turns without the profiler. The
    modelled times are those of the regions alone. ``None``: nothing of the function is pipelined, so nothing was timed;
    ``why_not``."""

    jit: float | None
    pipeline: float | None
    modelled_jit: float
    modelled_pipeline: float
    regions: int
    why_not: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as fast the pipeline is as ``jax.jit``, measured."""
        return None if self.jit is None or not self.pipeline else self.jit / self.pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """The result of ``kj.profile(fn)(*args)``. Times in seconds.

    ``platform``: "cpu" or "cuda"; ``machine``: the machine model whose rates the bound is judged by. ``bound``: the
    largest part of the latency: "overhead", "memory", "compute" or "other" (``kitsune_jax.profiling.metrics`` defines them);
    ``shares``: all parts. ``metrics``: SKIP's numbers. ``batch``: the leading dimension that ``batch_arguments`` share, or
    ``None``, for the reason in ``batch_note``. ``sizes``: the sizes that were tried, in order, this one among them.
    ``chains``: the chains of kernels that take the most time. ``gain``: the whole function as a pipeline. ``runs``: traced calls,
    of which the fastest is reported.

    Example:
      >>> import jax.numpy as jnp, kitsune_jax as kj
      >>> found = kj.profile(jnp.tanh, batches=(), repeats=1)(jnp.ones((32, 8)))
      >>> found.bound in ("overhead", "memory", "compute", "other"), found.to_dict()["batch"]
      (True, 32)
    """

    name: str
    platform: str
    machine: str
    bound: Bound
    shares: Shares
    metrics: Metrics
    runs: int
    batch: int | None
    batch_arguments: tuple[str, ...]
    batch_note: str
    sizes: tuple[BatchSize, ...]
    chains: tuple[KernelChain, ...]
    gain: Gain
    notes: tuple[str, ...] = ()

    @property
    def turns_at(self) -> int | None:
        """The size from which on no size tried has the bound of the smallest; ``None`` if the largest has it too."""
        behind = list(itertools.takewhile(lambda s: s.bound != self.sizes[0].bound, reversed(self.sizes)))
        return behind[-1].size if behind else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries, lists, strings and numbers, for ``json.dumps``; ``turns_at`` and the gain's ``ratio`` too."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return {**plain, "turns_at": self.turns_at, "gain": {**plain["gain"], "ratio": self.gain.ratio}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to ``path``: a page if it ends in ".html", its numbers if in ".json". Raises ``ValueError`` for another
        ending."""
        target = Path(path)
        if target.suffix == ".json":
            text = json.dumps(self.to_dict(), indent=1) + "\n"
        elif target.suffix == ".html":
            head = f'<meta charset="utf-8"><title>Profile of {escape(self.name)}</title>'
            text = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{self._repr_html_()}\n</body></html>\n'
        else:
            raise ValueError(f"a profile is saved as .html or .json, not as {target.name!r}")
        target.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return render_text(self)

    def _repr_html_(self) -> str:
        return render_html(self)


# --- sentences that text and HTML share -------------------------------------------------------------------------------------------


def verdict(p: Profile) -> list[str]:
    """The first sentences: the bound, the batch size at which it changes, and the gain of a pipeline."""
    at = "" if p.batch is None else f" at batch {count_text(p.batch)}"
    parts = sorted(_DOES, key=lambda name: -getattr(p.shares, name))
    shares = [
        f"{percent_text(getattr(p.shares, n), p.metrics.latency)} {_DOES[n]}" for n in parts if _is_seen(getattr(p.shares, n), p)
    ]
    if p.metrics.kernels:
        first = f"{bound_text(p.bound)}{at}: of {time_text(p.metrics.latency)}, {', '.join(shares)}"
    else:
        first = f"no kernel ran in {time_text(p.metrics.latency)}"
    return [first, _turn(p), gain_text(p.gain)]


def _is_seen(seconds: float, p: Profile) -> bool:
    return 200 * seconds >= p.metrics.latency  # others are 0 % in words


def bound_text(bound: Bound) -> str:
    """``overhead-bound``; for "other" a text of its own."""
    return "bound by kernels of unknown work" if bound == "other" else f"{bound}-bound"


def _turn(p: Profile) -> str:
    if p.batch is None:
        return f"other batch sizes were not tried: {p.batch_note}"
    if len(p.sizes) < 2:
        return f"other batch sizes were not tried{': ' + p.batch_note if p.batch_note else ''}"
    smallest, largest, turn = p.sizes[0], p.sizes[-1], p.turns_at
    note = f"; {p.batch_note}" if p.batch_note else ""
    if turn is None:
        all_same = all(s.bound == smallest.bound for s in p.sizes)
        which = "all sizes tried, {} to {}, are" if all_same else "the smallest and the largest size tried, {} and {}, are"
        return f"{which.format(count_text(smallest.size), count_text(largest.size))} {bound_text(smallest.bound)}{note}"
    later = {s.bound for s in p.sizes if s.size >= turn}
    now = bound_text(later.pop()) if len(later) == 1 else f"no longer {bound_text(smallest.bound)}"
    before = max(s.size for s in p.sizes if s.size < turn)
    text = f"from batch {count_text(turn)} on it is {now}, up to {count_text(before)} {bound_text(smallest.bound)}"
    return f"{text} (of the sizes tried{note})"


def gain_text(gain: Gain) -> str:
    """The whole function as a pipeline: measured, and as the model sees its regions."""
    if gain.ratio is None or gain.jit is None or gain.pipeline is None:
        return f"a pipeline gives nothing: {gain.why_not}"
    text = f"as a pipeline {time_text(gain.pipeline)}, with jax.jit {time_text(gain.jit)}: {gain.ratio:.2f}x, measured"
    if gain.modelled_pipeline > 0:
        text += f"; {plural(gain.regions, 'region')} modelled at {gain.modelled_jit / gain.modelled_pipeline:.2f}x"
    return text


def chain_text(chain: KernelChain, longest: int) -> str:
    """The operators of a chain, each kernel's joined by "+", at most ``longest`` kernels, and its source lines."""
    kernels = [_joined(ops) for ops in chain.ops]
    shown = ", ".join(kernels[:longest]) + (f", and {len(kernels) - longest} more" if len(kernels) > longest else "")
    lines = ", ".join(chain.sources[:_MOST_LINES])
    lines += f" and {plural(len(chain.sources) - _MOST_LINES, 'other line')}" if len(chain.sources) > _MOST_LINES else ""
    return f"{shown} ({lines})" if lines else shown


def _joined(ops: Sequence[str]) -> str:
    more = len(ops) - _MOST_OPS
    return " + ".join(ops) if more <= 0 else f"{' + '.join(ops[:_MOST_OPS])} + {more} more"


def chain_gain(chain: KernelChain) -> str:
    """The gain of a pipeline for a chain, with the reason."""
    if chain.gain is None:
        return f"left to XLA: {chain.why}"
    likely = "" if chain.likely is None else f", likely {chain.likely[0]:.2g}x to {chain.likely[1]:.2g}x"
    return f"pipeline {chain.gain:.2f}x, {'measured' if chain.measured else f'modelled{likely}'}: {chain.why}"


def _metric_rows(p: Profile) -> list[tuple[str, str]]:
    m, thunks = p.metrics, p.platform == "cpu"
    kernel = "thunk" if thunks else "kernel"
    tklqt = "not available: a CPU thread calls its thunks itself" if thunks else "not in the trace"
    return [
        ("launches", count_text(m.launches) + (f" of {count_text(m.kernels)} kernels" if m.launches != m.kernels else "")),
        ("launch and queue time (TKLQT)", tklqt if m.tklqt is None else time_text(m.tklqt)),
        (f"{kernel} time", time_text(m.kernel_time)),
        (f"mean {kernel}", "-" if m.mean_kernel is None else time_text(m.mean_kernel)),
        (f"no {kernel} runs", time_text(m.idle)),
        (f"until the first {kernel}", "-" if m.first_kernel is None else time_text(m.first_kernel)),
        ("latency", f"{time_text(m.latency)}, the fastest of {plural(p.runs, 'traced call')}"),
    ]


_SIZES_HEAD = ("batch", "latency", "overhead", "memory", "compute", "other", "bound")


def _size_rows(p: Profile) -> list[tuple[str, ...]]:
    return [
        (
            count_text(s.size),
            time_text(s.latency),
            *(percent_text(getattr(s.shares, n), s.latency) for n in ("overhead", "memory", "compute", "other")),
            s.bound,
        )
        for s in p.sizes
    ]


def _head_of_sizes(p: Profile) -> str:
    return f"sizes of the leading dimension of {', '.join(p.batch_arguments)}"


# --- text -------------------------------------------------------------------------------------------------------------------------


def render_text(p: Profile) -> str:
    """The text of ``str(profile)``."""
    blocks = [[line for text in verdict(p) for line in _wrap(text)]]
    widest = max(len(name) for name, _ in _metric_rows(p))
    title = f"{p.name} with jax.jit on {p.platform}, judged by {p.machine}"
    blocks.append([*_wrap(title), *(f"  {name:{widest}}  {value}" for name, value in _metric_rows(p))])
    if len(p.sizes) > 1:
        blocks.append([_head_of_sizes(p), *_columns([_SIZES_HEAD, *_size_rows(p)])])
    if p.chains:
        lines, told = ["chains of operators, by time in a call"], set[str]()
        for chain in p.chains:
            times = f"{count_text(chain.times)} x {plural(len(chain.ops), 'kernel')}"
            share = percent_text(chain.seconds, p.metrics.kernel_time)
            text = f"{time_text(chain.seconds)} ({share}), {times}, {bound_text(chain.bound)}: {chain_text(chain, 6)}"
            gain = chain_gain(chain)
            lines += _wrap(text, "  ", "    ") + _wrap(
                f"{gain.partition(':')[0]}: as above" if gain in told else gain, "    ", "    "
            )
            told.add(gain)
        blocks.append(lines)
    if p.notes:
        blocks.append([line for note in p.notes for line in _wrap(f"note: {note}")])
    return "\n\n".join("\n".join(block) for block in blocks)


def _wrap(text: str, first: str = "", rest: str = "  ") -> list[str]:
    return textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=rest)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Right-aligned columns but for the last."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  " + "  ".join([*(c.rjust(w) for c, w in zip(row[:-1], widths[:-1], strict=True)), row[-1]]) for row in rows]


# --- HTML -------------------------------------------------------------------------------------------------------------------------


def render_html(p: Profile) -> str:
    """The HTML of ``Profile._repr_html_``: one piece without scripts and style sheets."""
    first, *others = verdict(p)
    parts = [f"<div><p><b>{escape(first)}</b><br>{'<br>'.join(map(escape, others))}</p>"]
    parts += [
        f"<p>{escape(p.name)} with jax.jit on {escape(p.platform)}, judged by {escape(p.machine)}</p>",
        _table(_metric_rows(p)),
    ]
    if len(p.sizes) > 1:
        parts += [f"<p>{escape(_head_of_sizes(p))}</p>", _table(_size_rows(p), _SIZES_HEAD)]
    if p.chains:
        rows = [
            (
                time_text(c.seconds),
                percent_text(c.seconds, p.metrics.kernel_time),
                count_text(c.times),
                chain_text(c, len(c.ops)),
                bound_text(c.bound),
                chain_gain(c),
            )
            for c in p.chains
        ]
        head = ("time", "of kernel time", "times", "operators", "bound", "as a pipeline")
        parts += ["<p>chains of operators, by time in a call</p>", _table(rows, head)]
    parts += [f"<p>note: {escape(note)}</p>" for note in p.notes]
    return "\n".join([*parts, "</div>"])


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table; without ``head`` the first cell of each row is the row's header."""

    def cells(row: Sequence[str], headers: int, scope: str) -> str:
        tags = [f"<th scope='{scope}' style='text-align:left'>{escape(c)}</th>" for c in row[:headers]]
        return "<tr>" + "".join([*tags, *(f"<td style='text-align:left'>{escape(c)}</td>" for c in row[headers:])]) + "</tr>"

    top = cells(head, len(head), "col") if head else ""
    return "<table>" + top + "".join(cells(row, 0 if head else 1, "row") for row in rows) + "</table>"
