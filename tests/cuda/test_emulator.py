"""The emulator of a GPU: correct kernels are right with every seed, planted bugs are found, launches obey the driver API.

The kernels stand in ``cuda/tests/emulator``. Each program there knows its cases by name and runs one of them under many seeds.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitsune_jax.targets.cuda import compile as compiler
from kitsune_jax.targets.cuda import hostcc, sources

pytestmark = pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or "")

FOLDER = Path(__file__).parents[2] / "cuda" / "tests" / "emulator"
SEEDS = 20

CORRECT = {
    "pipeline": ["depth 1", "depth 2", "depth 3", "clocks of warps"],
    "copies": ["multicast", "st_async", "st_cluster", "bulk store and reduction", "tma tiles"],
    "matrices": [
        "rs bf16",
        "rs f16",
        "rs tf32",
        "ss bf16",
        "ss tf32",
        "ss bf16, B MN-major",
        "ss f16, A MN-major",
        "ss f16, both MN-major",
        "stmatrix and ldmatrix",
        "two groups in flight",
    ],
    "signals": [
        "ring, loads",
        "ring, bulk copies",
        "skip connection",
        "last block",
        "additions",
        "shuffles",
        "registers, 24 and twice 240",
        "registers, 40 and twice 232",
    ],
    "portable": ["mma bf16", "mma f16, copies arrive", "mma tf32", "zero fill"],
}

# What the first message must say: the cause, not just that something is wrong.
BUGS = {
    "pipeline": {
        "no wait on full": "ring",
        "wrong parity": "ring",
        "ring depth off by one": "race: bulk_push writes ring",
        "no proxy fence": "without fence_proxy_async",
        "no wait for staging": "writes staging",
        "no wait for staging, clocks of warps": "writes staging",
        "missing remote arrive": "deadlock: .*\n(.*\n)*.*mbarrier next_empty",
        "no barrier before push": "bulk_push reads staging",
        "weights not awaited": "wgmma reads weights",
        "exit without cluster_sync": "has exited|cluster_sync is missing",
        "accumulators touched before wait": "was written before wgmma_wait",
        "no wgmma commit": "wgmma",
        "no wgmma fence": "no wgmma_fence",
        "expect_tx too large": "64 bytes outstanding",
        "expect_tx too small": "-64 bytes outstanding|in flight",
        "no fence_mbar_init": "without fence_mbar_init",
        "too many arrivals": "deadlock|more than its 1 arrivals|race",
    },
    "copies": {
        "multicast slot released without syncwarp": "race: (bulk_load_multicast writes|ld_shared reads)",
        "multicast slot released without its fence": "race: bulk_load_multicast writes",
        "multicast mask beyond the cluster": "multicast mask 0x7",
        "st_cluster without fence_cluster": "not released and acquired",
        "st_cluster and a wait of cta scope": "not released and acquired",
        "bulk store without proxy fence": "without fence_proxy_async",
        "bulk store source reused unread": "still reads it",
        "bulk store without commit": "still reads it|not committed",
        "bulk store out of bounds": "the nearest buffer is y",
    },
    "signals": {
        "slot released before it is read": "st_global writes ring|ld_l2 reads ring",
        "slot released before the copy has landed": "st_global writes ring",
        "no release on the flag": "race: ld_l2 reads ring",
        "no barrier before the flag": "race: ld_l2 reads ring",
        "no global proxy fence": "without fence_proxy_async_global",
        "constant load of written data": "use ld_l2",
        "store outside of a buffer": "outside global memory",
        "skip queue too shallow": "deadlock",
        "a load and a store beside additions": "race: (st_global writes|ld_l2 reads|red_add writes) sums",
        "sums read before all have added": "race: (ld_l2 reads|red_add writes) sums",
        "waiting for blocks that are not resident": "the launch is not cooperative",
        "no syncwarp": "ld_shared reads",
        "registers of the SM that the launch does not have": r"deadlock: .*\n(.*\n)*.*setmaxnreg.inc from 168 to 240: \d+ "
        "registers of the CTA's 64512 are free",
        "setmaxnreg by half a warpgroup": "without the setmaxnreg to 40 of other warps",
        "two setmaxnreg in one warpgroup": "all set the same",
    },
    "portable": {
        "cp.async not waited for": "ld_shared reads",
        "cp.async without block_sync": "ld_shared reads",
        "cp.async barrier not waited for": "ld_shared reads",
    },
}


@pytest.fixture(scope="session")
def library() -> Path:
    return compiler.emulator_library()


@pytest.fixture(scope="session")
def programs(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("emulator")

    def build(name: str) -> Path:
        include = [f"-I{path}" for path in sources.include_dirs("emulator")]
        sm = 800 if name == "portable" else 900
        options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-DKITSUNE_EMULATE", f"-DKITSUNE_SM={sm}", *include]
        command = [hostcc.find().path, *options, str(FOLDER / f"{name}.cc"), str(library), "-o", str(folder / name)]
        subprocess.run(command, check=True)
        return folder / name

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CORRECT, pool.map(build, CORRECT), strict=True))


def outcome(program: Path, case: str) -> tuple[int, int, int, str]:
    """How many seeds gave a right result, a reported error, a wrong result; and the first message."""
    text = subprocess.run([program, case, str(SEEDS)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"right (\d+) reported (\d+) wrong (\d+)  \S+ ms a launch  ((?:.|\n)*)", text)
    assert found, text
    return int(found[1]), int(found[2]), int(found[3]), found[4]


@pytest.mark.parametrize(("program", "case"), [(p, c) for p, cases in CORRECT.items() for c in cases])
def test_a_correct_kernel_is_right_with_every_seed(programs: dict[str, Path], program: str, case: str) -> None:
    right, _, _, message = outcome(programs[program], f"correct {case}" if program != "pipeline" else f"correct, {case}")
    assert right == SEEDS, message


@pytest.mark.parametrize(("program", "case"), [(p, c) for p, cases in BUGS.items() for c in cases])
def test_a_planted_bug_is_found(programs: dict[str, Path], program: str, case: str) -> None:
    right, reported, wrong, message = outcome(programs[program], case)
    assert reported + wrong >= SEEDS - 2, f"{right} seeds saw nothing"
    assert re.search(BUGS[program][case], message), message


def test_every_case_of_the_programs_is_listed_here(programs: dict[str, Path]) -> None:
    for name, program in programs.items():
        cases = subprocess.run([program, "list"], capture_output=True, text=True, check=True).stdout.splitlines()
        correct = [f"correct{',' if name == 'pipeline' else ''} {case}" for case in CORRECT[name]]
        assert sorted(cases) == sorted([*correct, *BUGS.get(name, {})])


# --- the driver shim


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Shim:
    """A loaded image, and the calls that a launch makes."""

    def __init__(self, driver: ctypes.CDLL, image: bytes) -> None:
        self.driver = driver
        self.library, self.kernel, self.function = (ctypes.c_void_p() for _ in range(3))
        assert driver.cuLibraryLoadData(ctypes.byref(self.library), image, None, None, 0, None, None, 0) == 0, self.error()
        assert driver.cuLibraryGetKernel(ctypes.byref(self.kernel), self.library, b"kitsune_region") == 0
        assert driver.cuKernelGetFunction(ctypes.byref(self.function), self.kernel) == 0

    def launch(
        self, x: np.ndarray, y: np.ndarray, *, cluster: int = 1, block: int = 64, shared: int = 64, cooperative: bool = False
    ) -> int:
        addresses = (ctypes.c_void_p * 2)(x.ctypes.data, y.ctypes.data)
        sizes = (ctypes.c_size_t * 2)(x.nbytes, y.nbytes)
        self.driver.kitsune_emulator_set_buffers(ctypes.c_int64(2), addresses, sizes, (ctypes.c_char_p * 2)(b"x", b"y"))
        attributes = (Attribute * 2)()
        attributes[0].id, attributes[0].value[0:3] = 4, [cluster, 1, 1]
        attributes[1].id, attributes[1].value[0:1] = 2, [int(cooperative)]
        config = Config(len(x), 1, 1, block, 1, 1, shared, None, attributes, 2)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(addresses))
        return self.driver.cuLaunchKernelEx(ctypes.byref(config), self.function, parameters, None)

    def error(self) -> str:
        self.driver.kitsune_emulator_last_error.restype = ctypes.c_char_p
        return self.driver.kitsune_emulator_last_error().decode()


@pytest.fixture(scope="session")
def driver(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="session")
def shim(driver: ctypes.CDLL) -> Callable[..., Shim]:
    source = (FOLDER / "image.cc").read_text()

    def load(prefix: str = "") -> Shim:
        return Shim(driver, hostcc.compile(prefix + source, 900))

    return load


def test_a_launch_through_the_driver_runs_the_kernel(shim: Callable[..., Shim]) -> None:
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    assert shim().launch(x, y, cluster=4) == 0
    assert y.tolist() == [6.0] * 4 + [22.0] * 4


def test_a_kernel_that_fails_is_a_launch_failure_with_a_message(shim: Callable[..., Shim]) -> None:
    loaded = shim("#define EXIT_EARLY\n")
    assert loaded.launch(np.ones(8, np.float32), np.zeros(8, np.float32), cluster=4) == 719
    assert re.search("cluster_sync is missing|has exited", loaded.error())
    assert "emulator seed" in loaded.error()


def test_memory_that_the_launch_did_not_name_is_out_of_bounds(shim: Callable[..., Shim]) -> None:
    loaded = shim()
    assert loaded.launch(np.ones(8, np.float32), np.zeros(7, np.float32)) == 719
    assert "the nearest buffer is y, offset 28 of its 28 bytes" in loaded.error()


@pytest.mark.parametrize(
    ("options", "blocks", "status"),
    [
        ({"cooperative": True}, 133, 720),
        ({"cooperative": True, "cluster": 8}, 17 * 8, 720),
        ({"cluster": 16}, 16, 1),  # not allowed before the attribute is set
        ({"block": 96}, 8, 1),  # the kernel was declared for 64 threads
        ({"shared": 65536}, 8, 1),  # more than 48 KB without asking
        ({"cluster": 3}, 8, 1),
    ],
)
def test_a_launch_that_a_device_would_refuse_is_refused(
    shim: Callable[..., Shim], options: dict[str, Any], blocks: int, status: int
) -> None:
    assert shim().launch(np.ones(blocks, np.float32), np.zeros(blocks, np.float32), **options) == status


def test_attributes_lift_the_limits_of_shared_memory_and_clusters(shim: Callable[..., Shim]) -> None:
    loaded, x, y = shim(), np.ones(16, np.float32), np.zeros(16, np.float32)
    assert loaded.driver.cuFuncSetAttribute(loaded.function, 8, 65536) == 0
    assert loaded.driver.cuFuncSetAttribute(loaded.function, 14, 1) == 0
    assert loaded.launch(x, y, cluster=16, shared=65536) == 0
    assert y.tolist() == [16.0] * 16


def test_images_that_are_no_shared_library_are_refused(driver: ctypes.CDLL) -> None:
    assert driver.cuLibraryLoadData(ctypes.byref(ctypes.c_void_p()), b"\x00" * 256, None, None, 0, None, None, 0) == 200


def test_two_images_with_the_same_kernel_name_stay_apart(shim: Callable[..., Shim]) -> None:
    good, bad = shim(), shim("#define EXIT_EARLY\n")
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    assert [good.launch(x, y, cluster=4), bad.launch(x, y, cluster=4), good.launch(x, y, cluster=4)] == [0, 719, 0]


def test_launches_of_several_threads_take_turns(shim: Callable[..., Shim]) -> None:
    loaded = shim()
    results = [np.zeros(8, np.float32) for _ in range(4)]
    statuses: list[int] = []

    def work(i: int) -> None:
        statuses.extend(loaded.launch(np.full(8, i, np.float32), results[i], cluster=2) for _ in range(3))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 12
    assert [y.tolist() for y in results] == [[2.0 * i] * 8 for i in range(4)]


def test_the_same_seed_gives_the_same_schedule(shim: Callable[..., Shim]) -> None:
    loaded, x, y = shim(), np.ones(8, np.float32), np.zeros(8, np.float32)

    def steps(seed: int) -> float:
        before, after = (ctypes.c_double * 5)(), (ctypes.c_double * 5)()
        loaded.driver.kitsune_emulator_set_seed(ctypes.c_uint64(seed))
        loaded.driver.kitsune_emulator_stats(before)
        assert loaded.launch(x, y, cluster=4) == 0
        loaded.driver.kitsune_emulator_stats(after)
        return after[1] - before[1]

    assert steps(3) == steps(3)
    assert len({steps(seed) for seed in range(10)}) > 1
    loaded.driver.kitsune_emulator_set_seed(ctypes.c_uint64(1))


def test_names_resolve_to_the_shims_own_functions(driver: ctypes.CDLL) -> None:
    found, status = ctypes.c_void_p(), ctypes.c_int()
    assert (
        driver.cuGetProcAddress_v2(b"cuCtxPushCurrent", ctypes.byref(found), 12000, ctypes.c_uint64(0), ctypes.byref(status)) == 0
    )
    assert found.value == ctypes.cast(driver.cuCtxPushCurrent_v2, ctypes.c_void_p).value
    assert driver.cuGetProcAddress_v2(b"cuNothing", ctypes.byref(found), 12000, ctypes.c_uint64(0), None) == 500
