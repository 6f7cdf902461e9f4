"""The kernels of ``cuda/bench`` in the emulator and through NVRTC: what is timed on a device computes what it should."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.micro import suite
from benchmarks.micro.__main__ import main
from benchmarks.micro.backends import Emulator, Geometry
from benchmarks.micro.kernels import Kind, Multicast, QueueRing, WrongResult, run_atomics
from kernel_checks import sass
from kitsune_jax.targets.cuda import hostcc, nvrtc, runtime
from tests.support.cuda_run import kernel_cache  # noqa: F401, a fixture

pytestmark = pytest.mark.usefixtures("kernel_cache")
needs_emulator = pytest.mark.skipif(
    not (hostcc.available() and runtime.available()), reason=hostcc.why_not() or runtime.why_not() or "no emulator"
)
needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.why_not() or "")


@pytest.fixture(scope="module")
def emulator(kernel_cache: Any) -> Iterator[Emulator]:  # noqa: F811
    yield Emulator()


@needs_emulator
@pytest.mark.parametrize("token", [False, True], ids=["stream", "token"])
@pytest.mark.parametrize(("kind", "members"), [("smem", 2), ("cluster", 4), ("l2", 3)])
def test_rings_hand_on_every_entry_in_order(emulator: Emulator, kind: Kind, members: int, token: bool) -> None:
    measured = QueueRing(kind, 2, 3, members).run(emulator, rings=2, entries=7, token=token)
    assert len(measured.cycles) == 2 * members
    assert np.all(measured.cycles > 0)


@needs_emulator
def test_products_beside_a_ring_are_exact(emulator: Emulator) -> None:
    measured = QueueRing("cluster", 2, 2, 2, multipliers=2).run(emulator, rings=1, entries=4, batches=2)
    assert len(measured.multiplier_cycles) == 4


@needs_emulator
@pytest.mark.parametrize("cluster", [1, 2])
def test_weights_arrive_in_every_block(emulator: Emulator, cluster: int) -> None:
    assert len(Multicast(4096, 3, cluster).run(emulator, clusters=2, chunks=3, rounds=3).cycles) == 2 * cluster


@needs_emulator
@pytest.mark.parametrize("fetch", [False, True])
def test_counters_are_counted(emulator: Emulator, fetch: bool) -> None:
    assert len(run_atomics(emulator, additions=9, fetch=fetch).cycles) == emulator.multiprocessors


class Spoiled(Emulator):
    """Changes one word of the checksums after the kernel has run."""

    def run(
        self, source: str, geometry: Geometry, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], repeats: int = 1
    ) -> list[float | None]:
        seconds = super().run(source, geometry, operands, results, repeats)
        results[0].view(np.uint32).reshape(-1)[5] ^= 1
        return seconds


@needs_emulator
def test_a_wrong_checksum_is_no_measurement() -> None:
    with pytest.raises(WrongResult, match="1 of 256 checksums"):
        QueueRing("smem", 2, 3, 2).run(Spoiled(), rings=1, entries=3)


@needs_nvrtc
@pytest.mark.parametrize(
    "source",
    [
        QueueRing("smem", 8, 2, 2).source,
        QueueRing("l2", 32, 3, 2).source,
        QueueRing("cluster", 32, 3, 2).source,
        QueueRing("cluster", 8, 3, 4, 2).source,
        Multicast(16384, 8, 4).source,
    ],
    ids=["smem", "l2", "cluster", "with products", "multicast"],
)
def test_what_is_timed_neither_spills_nor_serialises(source: str) -> None:
    made = nvrtc.compile(source, "sm_90a")
    used = sass.resources(made.log, made.cubin)
    assert (used.spill_bytes, used.stack_bytes) == (0, 0)
    assert not re.search(r"\(C7\d\d\d\)", made.log), made.log


@needs_nvrtc
@pytest.mark.parametrize("kind", ["smem", "l2"])
def test_rings_compile_for_older_devices(kind: Kind) -> None:
    assert nvrtc.compile(QueueRing(kind, 4, 2, 2).source, "sm_80").cubin


class Pretended:
    """A device whose clock says what a test wants: 2 GHz, and launches of a millisecond."""

    emulated, sm, multiprocessors = False, 900, 132

    def __init__(self) -> None:
        self.right = True

    def compile(self, source: str) -> bytes:
        return b""

    def max_active_clusters(self, source: str, *, cluster: int, block: int, shared_bytes: int) -> int:
        return self.multiprocessors // cluster


def test_units_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    case = QueueRing("l2", 16, 3, 2)
    entries = suite.FULL.stream_bytes // case.payload
    cycles = np.full(132, 2_000_000, np.uint64)
    monkeypatch.setattr(QueueRing, "run", lambda *_, **__: suite.Measured(cycles, cycles[:0], [1e-3]))
    record = suite._stream(Pretended(), case, suite.FULL)  # type: ignore[arg-type]
    assert record["bytes_per_cycle"] == pytest.approx(entries * 32768 / 2e6)
    assert record["terabytes_per_second"] == pytest.approx(132 * entries * 32768 / 1e-3 / 1e12)


def test_a_machine_without_a_device_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    if not isinstance(runtime.driver_info(), str):
        pytest.skip("there is a driver")
    assert main([]) == 2
    assert "no cuda backend here" in capsys.readouterr().out
