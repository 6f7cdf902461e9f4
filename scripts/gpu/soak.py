"""Many launches from several threads: kernels that wait for each other must not hang, and must give the same bits every time.

Comes in: a number of launches. Goes out: how many results differed. Two parts: threads that call jitted programs of random shapes
from a fixed set, which share JAX's stream; and threads that launch rings of queues on streams of their own, so that kernels that
need the whole device meet another one on it.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.micro.backends import Backend, Device, Emulator
from benchmarks.micro.kernels import QueueRing
from scripts.gpu.programs import Program, programs
from scripts.gpu.record import Record, arguments

Part = Callable[[int, float], dict[str, Any]]

THREADS = 2
REPEATS = 20  # launches of a ring between two looks at its checksums
CHECKED_TOGETHER = 50  # results that are compared on the device before the host asks for the outcome


@jax.jit
def differing(a: Any, b: Any) -> jax.Array:
    """Elements whose bits differ."""

    def words(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])

    return sum((jnp.sum(words(x) != words(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.int32(0))


def call_programs(chosen: list[Program], launches: int, seed: int, deadline: float) -> dict[str, Any]:
    """Random programs; the first result of each is what all later ones must equal, and ``correctness`` has checked it."""
    rng = random.Random(seed)
    cases = [(p.function, p.arguments(seed)) for p in chosen]
    first = [function(*args) for function, args in cases]
    wrong, done = 0, 0
    while done < launches and time.monotonic() < deadline:
        counts = []
        for _ in range(min(CHECKED_TOGETHER, launches - done)):
            k = rng.randrange(len(cases))
            function, args = cases[k]
            counts.append(differing(function(*args), first[k]))
        wrong += sum(int(c) > 0 for c in counts)
        done += len(counts)
    return {"launches": done, "wanted": launches, "wrong": wrong, "ok": wrong == 0 and done > 0}


def rings_of(backend: Backend) -> list[QueueRing]:
    """Of the backend only ``sm`` and ``emulated`` are asked."""
    sizes = (2,) if backend.emulated else (2, 4)
    return [QueueRing("l2", 2, 2, 2)] + [QueueRing("cluster", 2, 2, n) for n in sizes if backend.sm >= 900]


def launch_rings(make: Callable[[], Backend], launches: int, seed: int, deadline: float) -> dict[str, Any]:
    """Rings through the L2 (cooperative: all CTAs or none) and through clusters; ``run`` checks every checksum."""
    backend = make()
    rings = rings_of(backend)
    rng, done = random.Random(seed), 0
    while done < launches and time.monotonic() < deadline:
        ring = rng.choice(rings)
        count = 1 if backend.emulated else max(1, backend.multiprocessors // ring.members // 2)
        repeats = 1 if backend.emulated else REPEATS
        ring.run(backend, rings=count, entries=rng.randrange(3, 6 if backend.emulated else 300), repeats=repeats)
        done += repeats
    return {"launches": done, "wanted": launches, "wrong": 0, "ok": done > 0}


def in_threads(work: Part, deadline: float) -> list[dict[str, Any]]:
    """``work(seed, deadline)`` in every thread at once; an exception is a finding."""
    found: list[dict[str, Any]] = [{"ok": False, "error": "did not end"} for _ in range(THREADS)]

    def one(k: int) -> None:
        try:
            found[k] = work(k, deadline)
        except Exception as error:
            found[k] = {"ok": False, "error": f"{type(error).__name__}: {error}"}

    threads = [threading.Thread(target=one, args=(k,)) for k in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--launches", type=int, default=10_000, help="of each part, all threads together")
    parser.add_argument("--seconds", type=float, default=40.0, help="end earlier than that, with what was done")
    args = parser.parse_args()
    record = Record("soak", args.output, patience=args.patience)
    each = (6 if args.dry_run else args.launches) // THREADS
    small = [p for p in programs(args.dry_run) if p.family.small and p.dtype != "float16" and p.plan is None]
    chosen = list(itertools.islice(small, 1 if args.dry_run else 24))
    make: Callable[[], Backend] = Emulator if args.dry_run else functools.partial(Device, own_stream=True)
    parts: dict[str, Part] = {
        "jitted programs": functools.partial(call_programs, chosen, each),
        "queues on two streams": functools.partial(launch_rings, make, each),
    }
    record.content["expected"] = THREADS * len(parts)
    with record.case("compiling", 90):  # before the clock starts
        for program in chosen:
            jax.block_until_ready(program.function(*program.arguments(0)))
    for name, part in parts.items():
        if not (record.wants(name) and record.wants(f"{name}, thread 0")):
            continue
        seconds = args.seconds / len(parts)
        with record.case(name, seconds + 20):
            found = in_threads(part, time.monotonic() + seconds)
        for thread, finding in enumerate(found):
            record.tell({"name": f"{name}, thread {thread}", **finding})
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())
