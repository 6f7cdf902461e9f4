"""A model, not a measurement: training steps on up to 1 024 devices, from the step of one device and the time of collectives.

    python -m benchmarks.scaling                                       # prints the table
    python -m benchmarks.scaling --latency 50e-6 --bandwidth 3.1e9     # of another network
    python -m benchmarks.scaling --write                               # into docs/devices.md

Comes in: a ``Link`` (seconds of a message, bytes per second), the newest stored step times of ``benchmarks.devices`` and the bytes
of each gradient. Goes out: for each way to train, the share of its time in which a device computes, and the speed relative to
``jax.jit``. The batch grows with the devices. Nothing overlaps: a step computes, and then communicates.

A message of n bytes takes ``latency + n / bandwidth``, and a device sends one and receives one at a time, as in Thakur,
Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH*, IJHPCA 19 (2005).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import table
from kitsune_jax.report.data import byte_text

DOCUMENT = Path(__file__).parents[1] / "docs" / "devices.md"
RESULTS = Path(__file__).parent / "results"
MARKER = "scaling"
DEVICES = (8, 64, 256, 1024)


@dataclasses.dataclass(frozen=True)
class Link:
    """``latency``: seconds of an empty message. ``bandwidth``: bytes per second that a device sends, and at once receives."""

    latency: float
    bandwidth: float

    def message(self, n: float) -> float:
        return self.latency + n / self.bandwidth


# The rate is that of 100 Gbit/s Ethernet or EDR InfiniBand. The latency is an assumption: that of a collective's step between
# processes on two hosts lies between 2 us (RDMA) and 50 us (TCP).
DEFAULT = Link(10e-6, 12.5e9)


def ring_all_reduce(n: float, devices: int, link: Link) -> float:
    """Seconds to add up ``n`` bytes of each device so that all have the sums: a reduce-scatter, and an all-gather."""
    return 2 * ring_pass(n, devices, link)


def ring_pass(n: float, devices: int, link: Link) -> float:
    """Seconds of an all-gather into ``n`` bytes, or a reduce-scatter of ``n`` bytes, along a ring."""
    return (devices - 1) * link.message(n / devices)


def tree_all_reduce(n: float, devices: int, link: Link) -> float:
    """The same as ``ring_all_reduce`` along a binomial tree: to its root, and back. Whole arrays in each of few steps."""
    return 2 * (devices - 1).bit_length() * link.message(n)


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step: ``seconds`` on one device by column ("jit", "pipeline"), and the bytes of each weight's gradient."""

    name: str
    seconds: dict[str, float]
    gradients: tuple[int, ...]


def data_parallel(all_reduce: Callable[[float, int, Link], float]) -> Callable[[Step, int, Link], float]:
    """One all-reduce for each gradient."""
    return lambda step, devices, link: sum(all_reduce(n, devices, link) for n in step.gradients)


def fully_sharded(step: Step, devices: int, link: Link) -> float:
    """Each weight is gathered for the forward pass and for the backward pass, and its gradient is scattered."""
    return sum(3 * ring_pass(n, devices, link) for n in step.gradients)


WAYS: dict[str, Callable[[Step, int, Link], float]] = {
    "data parallel, ring": data_parallel(ring_all_reduce),
    "data parallel, tree": data_parallel(tree_all_reduce),
    "FSDP, ring": fully_sharded,
}


def steps(results: Path = RESULTS) -> list[Step]:
    """Of the newest stored measurement of ``benchmarks.devices``. Raises ``FileNotFoundError`` where there is none."""
    from benchmarks import devices

    stored = sorted(results.glob("devices-*.json"), key=lambda path: json.loads(path.read_text())["date"])
    if not stored:
        raise FileNotFoundError(f"{results} has no devices-*.json: python -m benchmarks.devices makes one")
    cases = [case for case in json.loads(stored[-1].read_text())["cases"] if case["mode"] == "training" and case["devices"] == 2]
    networks = devices.networks()
    found = []
    for case in cases:
        _, arguments, _, wrt = networks[case["network"]]
        found.append(Step(case["network"], case["median_seconds"], tuple(arguments[k].nbytes for k in wrt)))
    return found


def markdown(found: Sequence[Step], link: Link) -> str:
    """The table, under a sentence that states the link."""
    head = ["network", "gradients", "way", *(f"{n:,}".replace(",", " ") + " devices" for n in DEVICES)]
    lines = [
        f"Modelled, not measured, for messages of {1e6 * link.latency:g} us + bytes / ({link.bandwidth / 1e9:g} GB/s):",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for step in found:
        for way, communicate in WAYS.items():
            cells = [f"{step.name}, {1e3 * step.seconds['pipeline']:.0f} ms", byte_text(sum(step.gradients)), way]
            for devices in DEVICES:
                sent = communicate(step, devices, link)
                share = step.seconds["pipeline"] / (step.seconds["pipeline"] + sent)
                cells.append(f"{100 * share:.0f} %, {(step.seconds['jit'] + sent) / (step.seconds['pipeline'] + sent):.2f}x")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="A model of training on many devices.")
    parser.add_argument("--latency", type=float, default=DEFAULT.latency, metavar="SECONDS", help="of an empty message")
    parser.add_argument("--bandwidth", type=float, default=DEFAULT.bandwidth, metavar="BYTES", help="per second, in each direction")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.latency < 0 or args.bandwidth <= 0:
        parser.error("a latency is not negative, and a bandwidth is positive")
    text = markdown(steps(args.results), Link(args.latency, args.bandwidth))
    print(text)
    if args.write:
        print(f"{DOCUMENT.name} {'updated' if table.update(DOCUMENT, text, MARKER) else 'is up to date'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
