"""The emulator's counts, on kernels of a few lines whose counts are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from kernel_checks import counters
from kernel_checks.counters import Counts
from kitsune_jax.targets.cuda import compile as compiler
from kitsune_jax.targets.cuda import hostcc, runtime
from tests.cuda.test_emulator import Shim

pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.skipif(not runtime.available(), reason="no CUDA extension"),
]

SOURCE = """
#include "kitsune/kitsune.h"
using namespace kitsune::arch;
struct Params {{ const u8* x; u8* y; }};
struct Shared {{ alignas(1024) u8 bytes[65536]; Mbar bar; }};
KITSUNE_KERNEL(kitsune_region, Params, p, {threads}) {{
  auto& s = shared<Shared>();
  u8* const m = s.bytes;
  const u32 t = thread_id();
  (void)m, (void)t, (void)p;
  {body}
}}
"""


@dataclasses.dataclass
class Counted:
    counts: Counts

    def access(self, op: str) -> counters.Access:
        (found,) = [a for a in self.counts.accesses if a.op == op]
        return found

    def event(self, name: str) -> counters.Event:
        (found,) = [e for e in self.counts.events if e.name == name]
        return found


def counted(
    body: str,
    *,
    threads: int = 32,
    blocks: int = 1,
    cluster: int = 1,
    l1: int | None = None,
    l2: int | None = None,
    sm: int = 900,
    seed: int = 1,
) -> Counted:
    """What a launch of ``body`` counts. ``p.x`` and ``p.y`` have 256 KiB, and so many blocks as ``Shim`` has elements of x."""
    runtime.use_emulator(compiler.emulator_library())
    driver = counters.emulator()
    shim = Shim(driver, hostcc.compile(SOURCE.format(body=body, threads=threads), sm))
    assert driver.cuFuncSetAttribute(shim.function, 8, 65536 + 1024) == 0
    x, y = (np.zeros(1 << 18, np.uint8) for _ in range(2))
    runtime.set_emulator_seed(seed)
    with counters.counting(sm, l1=l1, l2=l2) as found:
        grid = cast(np.ndarray, _Blocks(x, blocks))
        status = shim.launch(grid, y, cluster=cluster, block=threads, shared=65536 + 1024, cooperative=cluster == 1)
    runtime.set_emulator_seed(1)
    assert status == 0, shim.error()
    assert len(found) == 1
    assert found[0].ok
    return Counted(found[0])


class _Blocks:
    """An array whose length is a number of blocks: what ``Shim.launch`` takes for the grid."""

    def __init__(self, array: np.ndarray, blocks: int) -> None:
        self.ctypes, self.nbytes, self.blocks = array.ctypes, array.nbytes, blocks

    def __len__(self) -> int:
        return self.blocks


_SIZE = {"u8": 1, "u16": 2, "u32": 4, "U2": 8, "U4": 16}
_CLEAR = "for (u32 i = t; i < 4096; i += block_threads()) st_shared(reinterpret_cast<U4*>(m) + i, U4{0, 0, 0, 0});\n"
_START = "if (t == 0) { mbar_init(s.bar, 1); fence_mbar_init(); }\n"


def each(patterns: Sequence[tuple[Any, ...]], text: str) -> str:
    """``text`` of the type and address of each pattern, in a stage of its own."""
    lines = (f"section({k}, 0); {text.format(type=pattern[0], at=pattern[1])} syncwarp();" for k, pattern in enumerate(patterns))
    return "\n".join(lines)


# -- global memory

SECTORS = [
    ("u32", "t * 4", 4),
    ("U4", "t * 16", 16),
    ("U2", "t * 8", 8),
    ("u16", "t * 2", 2),
    ("u8", "t", 1),
    ("u32", "t * 32", 32),
    ("u32", "t * 64", 32),
    ("u32", "0", 1),
    # Eight rows of 126 bytes, four words of each: where a row begins moves back by 2 bytes a row, so most cross a sector.
    ("u16", "t / 4 * 126 + t % 4 * 16", len({(t // 4 * 126 + t % 4 * 16) // 32 for t in range(32)})),
    ("u32", "(t ^ 5) * 4", 4),
]


def test_sectors_of_a_warps_load() -> None:
    found = counted(each(SECTORS, "ld_global(reinterpret_cast<const {type}*>(p.x + ({at})));")).counts.accesses
    assert [(a.requests, a.threads, a.bytes, a.width) for a in found] == [(1, 32, 32 * _SIZE[t], _SIZE[t]) for t, *_ in SECTORS]
    assert [a.sectors for a in found] == [sectors for *_, sectors in SECTORS]


def test_the_second_load_of_a_line_is_served_by_l1() -> None:
    found = counted("for (int i = 0; i < 3; ++i) { ld_global(reinterpret_cast<const u32*>(p.x) + t); syncwarp(); }")
    assert found.access("ld_global").requests == 3
    x = found.counts.buffer("x")
    assert (x.wanted, x.l2_read, x.memory_read) == (3 * 128, 128, 128)


def test_strong_loads_pass_by_l1() -> None:
    x = counted("for (int i = 0; i < 3; ++i) { ld_l2(reinterpret_cast<const u32*>(p.x) + t); syncwarp(); }").counts.buffer("x")
    assert (x.wanted, x.l2_read, x.memory_read) == (0, 3 * 128, 128)


def test_an_l1_without_room_serves_nothing() -> None:
    line = "ld_global(reinterpret_cast<const u32*>(p.x) + 32 * k + t);"
    body = f"for (int i = 0; i < 2; ++i) for (u32 k = 0; k < 64; ++k) {{ {line} syncwarp(); }}"
    shared = 100 << 10  # what a CTA of 65 KiB and the system's 1 KiB sets aside
    roomy, tight = (counted(body, l1=shared + lines * 128).counts for lines in (64, 63))
    assert (roomy.l1, roomy.buffer("x").l2_read) == (64 * 128, 64 * 128)
    assert (tight.l1, tight.buffer("x").l2_read) == (63 * 128, 2 * 64 * 128)  # LRU forgets a line just before it is read again
    assert tight.buffer("x").memory_read == 64 * 128


def test_an_acquire_at_gpu_scope_empties_l1() -> None:
    body = "ld_global(reinterpret_cast<const u32*>(p.x) + t); fence_gpu(); ld_global(reinterpret_cast<const u32*>(p.x) + t);"
    found = counted(body)
    assert found.counts.buffer("x").l2_read == 2 * 128
    assert (found.event("fence.acq_rel.gpu").count, found.event("fence.acq_rel.gpu").threads) == (1, 32)


def test_two_sms_share_the_l2_but_no_l1() -> None:
    x = counted("ld_global(reinterpret_cast<const u32*>(p.x) + t);", blocks=2).counts.buffer("x")
    assert (x.wanted, x.l2_read, x.memory_read) == (256, 256, 128)


def test_an_l2_without_room_reads_memory_again_and_writes_back_what_it_evicts() -> None:
    def nine_lines_twice(access: str) -> str:
        return f"for (int i = 0; i < 2; ++i) for (u32 k = 0; k < 9; ++k) {{ {access}; syncwarp(); }}"

    reads = nine_lines_twice("ld_l2(reinterpret_cast<const u32*>(p.x) + 32 * k + t)")
    assert counted(reads, l2=9 * 128).counts.buffer("x").memory_read == 9 * 128
    assert counted(reads, l2=8 * 128).counts.buffer("x").memory_read == 2 * 9 * 128
    writes = nine_lines_twice("st_global(reinterpret_cast<u32*>(p.y) + 32 * k + t, k)")
    assert counted(writes, l2=9 * 128).counts.buffer("y").memory_written == 9 * 128
    small = counted(writes, l2=8 * 128).counts.buffer("y")
    assert (small.l2_written, small.memory_written, small.l2_read) == (2 * 9 * 128, 2 * 9 * 128, 0)


def test_narrow_stores_write_a_sector_each_time() -> None:
    wide = counted("st_global(reinterpret_cast<U4*>(p.y) + t, U4{1, 2, 3, 4});").counts.buffer("y")
    narrow = counted("for (u32 i = 0; i < 8; ++i) st_global(reinterpret_cast<u16*>(p.y) + 8 * t + i, u16(1));").counts.buffer("y")
    assert (wide.l2_written, wide.memory_written) == (512, 512)
    assert (narrow.l2_written, narrow.memory_written) == (8 * 512, 512)


def test_lanes_that_skip_an_access_leave_the_sums_right() -> None:
    found = counted("if (t % 3) ld_global(reinterpret_cast<const u32*>(p.x) + t); syncwarp();").access("ld_global")
    assert (found.requests, found.threads, found.bytes, found.sectors) == (1, 21, 84, 4)


# -- shared memory

WAVEFRONTS = [
    ("u32", "t * 4", 1, 1),
    ("u32", "t * 8", 2, 1),
    ("u32", "t * 32", 8, 1),
    ("u32", "t * 128", 32, 1),
    ("u32", "t * 132", 1, 1),  # an odd pitch in words
    ("u16", "t * 2", 1, 1),
    ("u16", "t * 128", 32, 1),
    ("u8", "t", 1, 1),
    ("U2", "t * 8", 2, 2),
    ("U2", "t * 16", 4, 2),
    ("U4", "t * 16", 4, 4),
    ("U4", "t * 32", 8, 4),
    ("U4", "t % 8 * 128 + t / 8 * 16", 32, 4),
    ("U4", "t % 8 * 128 + ((t / 8) ^ (t % 8)) * 16", 4, 4),  # the 128-byte swizzle
]
BROADCASTS = [("u32", "64", 1, 1), ("u32", "t / 2 * 4", 1, 1), ("U2", "64", 2, 2), ("U4", "64", 4, 4)]


def test_wavefronts_of_a_warps_load() -> None:
    patterns = WAVEFRONTS + BROADCASTS
    body = _CLEAR + "syncwarp();\n" + each(patterns, "ld_shared(reinterpret_cast<{type}*>(m + ({at})));")
    found = [a for a in counted(body).counts.accesses if a.op == "ld_shared"]
    assert [(a.requests, a.wavefronts, a.ideal) for a in found] == [(1, *pattern[2:]) for pattern in patterns]


def test_wavefronts_of_a_warps_store() -> None:
    found = counted(each(WAVEFRONTS, "st_shared(reinterpret_cast<{type}*>(m + ({at})), {type}{{}});")).counts.accesses
    assert [(a.requests, a.wavefronts, a.ideal) for a in found] == [(1, *pattern[2:]) for pattern in WAVEFRONTS]


def test_wavefronts_of_ldmatrix_and_stmatrix() -> None:
    patterns = [("", "t * 16", 4, 4), ("", "t * 128", 32, 4), ("", "t * 144", 4, 4)]
    for instruction in ("ldmatrix_x4(r, m + {at});", "stmatrix_x4(m + {at}, r);"):
        body = _CLEAR + "syncwarp(); u32 r[4] = {};\n" + each(patterns, instruction)
        found = [a for a in counted(body).counts.accesses if a.op in ("ldmatrix", "stmatrix")]
        assert [(a.requests, a.bytes, a.wavefronts, a.ideal) for a in found] == [(1, 512, *pattern[2:]) for pattern in patterns]


# -- copies, barriers, matrix instructions


def test_a_bulk_copy_passes_by_l1() -> None:
    body = (
        _START + "block_sync(); if (t == 0) { mbar_expect_tx(s.bar, 4096); bulk_load(m, p.x, 4096, s.bar); } mbar_wait(s.bar, 0);"
    )
    found = counted(body)
    x = found.counts.buffer("x")
    assert (x.wanted, x.l2_read, x.memory_read) == (0, 4096, 4096)
    assert (found.event("bulk_load").count, found.event("bulk_load").amount) == (1, 4096)


def test_a_multicast_is_read_once_and_delivered_to_every_cta() -> None:
    body = (
        _START
        + "cluster_sync(); if (t == 0) { mbar_expect_tx(s.bar, 4096);"
        + " if (cluster_rank() == 0) bulk_load_multicast(m, p.x, 4096, s.bar, 15); } mbar_wait(s.bar, 0); cluster_sync();"
    )
    found = counted(body, blocks=4, cluster=4)
    assert found.counts.buffer("x").l2_read == 4096
    assert found.event("bulk_load_multicast").amount == 4096
    assert found.event("bulk_load_multicast, delivered").amount == 4 * 4096


def test_a_prefetch_reads_memory_and_not_l2() -> None:
    body = "if (t == 0) bulk_prefetch_l2(p.x, 128);\nsyncwarp();\n" + "ld_global(reinterpret_cast<const u32*>(p.x) + t);"
    x = counted(body).counts.buffer("x")
    assert (x.memory_read, x.l2_read) == (128, 128)


def test_bytes_between_ctas() -> None:
    body = (
        _START
        + "cluster_sync(); if (t == 0) mbar_expect_tx(s.bar, 512);"
        + " st_async(reinterpret_cast<U4*>(m) + t, cluster_rank() ^ 1, U4{t, t, t, t}, s.bar);"
        + " mbar_wait_cluster(s.bar, 0); cluster_sync();"
    )
    found = counted(body, blocks=2, cluster=2).access("st_async")
    assert (found.requests, found.bytes, found.wavefronts, found.ideal) == (2, 1024, 8, 8)


def test_fences_count_once_for_a_warp() -> None:
    found = counted("fence_proxy_async(); fence_proxy_async(); fence_proxy_async_global();", threads=64)
    shared = found.event("fence.proxy.async.shared::cta")
    assert (shared.count, shared.threads) == (4, 128)
    assert found.event("fence.proxy.async.global").count == 2


def test_a_wait_that_finds_its_phase_over_does_not_wait() -> None:
    found = counted(_START + "block_sync(); if (t == 0) mbar_arrive(s.bar); block_sync(); mbar_wait(s.bar, 0);")
    assert (found.event("mbar_wait").count, found.event("mbar_wait").amount) == (1, 0)


def test_a_wait_that_has_to_wait_says_so() -> None:
    body = (
        "if (t == 0) { mbar_init(s.bar, 1); fence_mbar_init(); }\nblock_sync();\n"
        + "if (t >= 32) { if (t == 32) red_add_release(reinterpret_cast<u32*>(p.y), 1); mbar_wait(s.bar, 0); }\n"
        + "else if (t == 0) { wait_ge(reinterpret_cast<u32*>(p.y), 1); mbar_arrive(s.bar); }"
    )
    waits = [counted(body, threads=64, seed=seed).event("mbar_wait") for seed in range(4)]
    assert {w.count for w in waits} == {1}
    assert {w.amount for w in waits} <= {0, 1}
    assert any(w.amount for w in waits)  # the arrival comes after it, unless the schedule says otherwise


def test_wgmma_counts_by_shape_and_operand() -> None:
    body = (
        _CLEAR
        + "fence_proxy_async(); block_sync();\n"
        + "float d[32] = {}; float e[4] = {}; u32 a[4] = {}; wgmma_fence();"
        + " for (int k = 0; k < 3; ++k) wgmma_rs<Bf16, 64>(d, a, desc_k128(m), true);"
        + " wgmma_ss<F16, 8, false, false>(e, desc_k128(m), desc_k128(m), false);"
        + " wgmma_commit(); wgmma_wait<0>();"
    )
    found = counted(body, threads=128)
    first = found.event("wgmma m64n64k16 bf16, A in registers")
    assert (first.count, first.amount) == (3, 3 * 64 * 32)
    second = found.event("wgmma m64n8k16 f16, A in shared memory")
    assert (second.count, second.amount) == (1, (64 + 8) * 32)


def test_mma_counts_by_warp() -> None:
    body = "float c[4] = {}; u32 a[4] = {}, b[2] = {}; mma<Bf16>(c, a, b); mma<Tf32>(c, a, b); mma<Tf32>(c, a, b);"
    found = counted(body, threads=64, sm=800)
    assert found.event("mma.sync m16n8k16 bf16").count == 2
    assert found.event("mma.sync m16n8k8 tf32").count == 4


def test_cp_async_is_read_from_l2() -> None:
    body = "cp_async_16(m + 16 * t, p.x + 16 * t, 16); cp_async_commit(); cp_async_wait<0>();"
    found = counted(body, sm=800)
    assert found.access("cp_async").sectors == 16
    assert (found.counts.buffer("x").wanted, found.counts.buffer("x").l2_read) == (0, 512)


def test_counts_are_told_apart_by_stage_and_role() -> None:
    body = "section(7, t / 32); ld_global(reinterpret_cast<const u32*>(p.x) + t);"
    found = counted(body, threads=96).counts.accesses
    assert [(a.stage, a.role, a.requests) for a in found] == [(7, 0, 1), (7, 1, 1), (7, 2, 1)]


def test_nothing_is_counted_that_was_not_asked_for() -> None:
    runtime.use_emulator(compiler.emulator_library())
    shim = Shim(counters.emulator(), hostcc.compile(SOURCE.format(body="ld_global(p.x + t);", threads=32), 900))
    assert counters.emulator().cuFuncSetAttribute(shim.function, 8, 65536 + 1024) == 0
    counters.start()
    assert counters.stop() == []
    x = np.zeros(64, np.uint8)
    assert shim.launch(cast(np.ndarray, _Blocks(x, 1)), x.copy(), block=32, shared=65536 + 1024) == 0
    counters.start()
    assert counters.stop() == []


def test_lanes_that_skip_an_access_do_not_shift_those_of_another_buffer() -> None:
    body = "const u8* of[] = {p.x, p.y, p.x}; for (int i = 0; i < 3; ++i) if (i || t % 2) ld_global(of[i] + t);"
    found = counted(body).counts
    assert {(a.buffer, a.threads) for a in found.accesses} == {("x", 48), ("y", 32)}
    assert [b.memory_read for b in found.buffers] == [32, 32]
