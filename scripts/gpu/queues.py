"""Queues between CTAs: microbenchmarks of each, and many launches from several threads on streams of their own.

Comes in: a device, or the emulator. Goes out: the records of ``benchmarks.micro``; of the soak how many results differed. Kernels
that wait for each other must not hang when another kernel that needs the whole device meets them there, and give the same bits
every time.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.micro import suite
from benchmarks.micro.backends import Backend, Device, Emulator
from benchmarks.micro.kernels import QueueRing
from scripts.gpu.programs import ALL, PLANNED, Program, programs
from scripts.gpu.worker import Findings, failure, note_kernels, wait_for_turn

THREADS = 2
SECONDS = 12.0  # of each part of the soak
_REPEATS = 20  # launches of a ring between two looks at its checksums
_CHECKED_TOGETHER = 50  # results that are compared on the device before the host asks for the outcome
_CASE_S = 15.0

Part = Callable[[int, float], dict[str, Any]]


class _Sources:
    """What the sources of the microbenchmarks ask of a backend."""

    emulated = False

    def __init__(self) -> None:
        from kitsune_jax.targets.cuda import nvrtc, runtime

        self.sm = nvrtc.sm_of(runtime.arch())


def compile_kernels() -> None:
    """Into the cache on disk. Needs no device."""
    from kitsune_jax.targets.cuda import compile, runtime

    backend: Any = _Sources()
    for source in (*suite.sources(backend, quick=False), *(ring.source for ring in rings_of(backend))):
        compile.cubin(source, runtime.arch())


def measure(found: Findings, dry_run: bool, without_device: bool) -> None:
    """The microbenchmarks, each of which may hang or fail alone."""
    kernels_since = note_kernels()
    if without_device:
        compile_kernels()
        found.content["cubins"] = kernels_since()
        return
    backend: Backend = Emulator() if dry_run else Device()
    with concurrent.futures.ThreadPoolExecutor(2 if dry_run else 8) as pool:
        list(pool.map(backend.compile, suite.sources(backend, quick=dry_run)))
    wait_for_turn()
    findings = found.content["findings"] = []
    for name, measured in itertools.islice(suite.cases(backend, quick=dry_run), 2 if dry_run else None):
        with found.watch(name, 10 * _CASE_S if dry_run else _CASE_S):
            try:
                one = measured()
            except Exception as error:
                one = failure(error)
        findings.append({"name": name, "ok": "error" not in one, **one})
        found.write()


@jax.jit
def differing(a: Any, b: Any) -> jax.Array:
    """Elements whose bits differ."""

    def words(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])

    return sum((jnp.sum(words(x) != words(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.int32(0))


def rings_of(backend: Backend) -> list[QueueRing]:
    """Of the backend only ``sm`` and ``emulated`` are asked."""
    sizes = (2,) if backend.emulated else (2, 4)
    return [QueueRing("l2", 2, 2, 2)] + [QueueRing("cluster", 2, 2, n) for n in sizes if backend.sm >= 900]


def soak(found: Findings, dry_run: bool, without_device: bool) -> None:
    """Threads that call jitted programs, which share JAX's stream, then threads that launch rings on streams of their own."""
    if without_device:
        return
    names = [name for name, family in ALL.items() if family.small][: 1 if dry_run else 8]
    chosen = [p for name in names for p in programs(PLANNED, name, dry_run) if p.dtype != "float16"]
    for program in chosen:
        jax.block_until_ready(program.function(*program.arguments(0)))
    make: Callable[[], Backend] = Emulator if dry_run else functools.partial(Device, own_stream=True)
    parts: dict[str, Part] = {
        "jitted programs": functools.partial(_call_programs, chosen, 3 if dry_run else 1 << 30),
        "queues on streams of their own": functools.partial(_launch_rings, make, 3 if dry_run else 1 << 30),
    }
    wait_for_turn()
    findings = found.content["findings"] = []
    for name, part in parts.items():
        with found.watch(name, 10 * SECONDS if dry_run else SECONDS + 20):
            results = _in_threads(part, time.monotonic() + (5 * SECONDS if dry_run else SECONDS))
        findings += [{"name": f"{name}, thread {thread}", **one} for thread, one in enumerate(results)]
        found.write()


def _call_programs(chosen: list[Program], launches: int, seed: int, deadline: float) -> dict[str, Any]:
    """Random programs; the first result of each is what all later ones must equal."""
    rng = random.Random(seed)
    cases = [(p.function, p.arguments(seed)) for p in chosen]
    first = [function(*args) for function, args in cases]
    wrong, done = 0, 0
    while done < launches and time.monotonic() < deadline:
        counts = []
        for _ in range(min(_CHECKED_TOGETHER, launches - done)):
            k = rng.randrange(len(cases))
            function, args = cases[k]
            counts.append(differing(function(*args), first[k]))
        wrong += sum(int(c) > 0 for c in counts)
        done += len(counts)
    return {"launches": done, "wrong": wrong, "ok": wrong == 0 and done > 0}


def _launch_rings(make: Callable[[], Backend], launches: int, seed: int, deadline: float) -> dict[str, Any]:
    """Rings through the L2 (cooperative: all CTAs or none) and through clusters; ``run`` checks every checksum."""
    backend = make()
    rings = rings_of(backend)
    rng, done = random.Random(seed), 0
    while done < launches and time.monotonic() < deadline:
        ring = rng.choice(rings)
        count = 1 if backend.emulated else max(1, backend.multiprocessors // ring.members // 2)
        repeats = 1 if backend.emulated else _REPEATS
        ring.run(backend, rings=count, entries=rng.randrange(3, 6 if backend.emulated else 300), repeats=repeats)
        done += repeats
    return {"launches": done, "wrong": 0, "ok": done > 0}


def _in_threads(work: Part, deadline: float) -> list[dict[str, Any]]:
    """``work(seed, deadline)`` in every thread at once; an exception is a finding."""
    found: list[dict[str, Any]] = [{"ok": False, "error": "did not end"} for _ in range(THREADS)]

    def one(k: int) -> None:
        try:
            found[k] = work(k, deadline)
        except Exception as error:
            found[k] = {"ok": False, **failure(error)}

    threads = [threading.Thread(target=one, args=(k,)) for k in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found
