"""The CUDA extension without a device: launch words, a driver that pretends, and the custom call on platform "cpu".

The libraries of ``cuda/tests/driver`` take the place of libcuda.so.1 and of the emulator. A process has one of each, so every test
runs a small program in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
from typing import Any

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAKES = ROOT / "cuda" / "tests" / "driver"
_cuda = pytest.importorskip("kitsune_jax._cuda", reason="the extension is not built: pip install -e .")
CXX = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
needs_compiler = pytest.mark.skipif(CXX is None or sys.platform != "linux", reason="needs Linux and a C++ compiler")

UNITS = "aligned", "driver", "ffi", "launch", "launch_words", "library", "timeline"  # all but the Python module
FIELDS = (
    "version",
    "sm",
    "grid",
    "block",
    "cluster",
    "shared_bytes",
    "cooperative",
    "instance",
    "operands",
    "results",
    "workspace_zero_bytes",
)
GOOD = dict(zip(FIELDS, (6, 900, 132, 384, 2, 1024, 0, 0, 2, 3, 64), strict=True))


PACKS = [7, 1, 0, 0, 4096, 4, 16, 48]  # blocks and table of the packing kernel; two pointers
MAPS = [0, 64, 31, 1, 8, 3]  # pointer, columns and rows of two tensor maps
WITH_MAPS = [4096, 128, 64, 32, 64, *PACKS, *MAPS]


def words(**changes: int) -> np.ndarray:
    return np.array(list({**GOOD, **changes}.values()), np.int64)


def compile_library(output: pathlib.Path, source: str, *options: str) -> pathlib.Path:
    command = [str(CXX), "-std=c++17", "-O0", "-fPIC", "-shared", f"-I{ROOT / 'cuda' / 'src'}", *options]
    subprocess.run([*command, str(FAKES / source), "-o", str(output), "-ldl"], check=True)
    return output


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a libcuda.so.1."""
    return compile_library(tmp_path_factory.mktemp("driver") / "libcuda.so.1", "fake_driver.cc").parent


@pytest.fixture(scope="session")
def fake_emulator(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with an emulator and two images: one adds and subtracts, one fails."""
    folder = tmp_path_factory.mktemp("emulator")
    compile_library(folder / "libemulator.so", "fake_driver.cc", "-DFAKE_EMULATOR")
    compile_library(folder / "region.so", "fake_region.cc")
    compile_library(folder / "fails.so", "fake_region.cc", "-DFAILS")
    return folder


PRELUDE = f"""
import ctypes, importlib.util, json, os, sys
import numpy as np
spec = importlib.util.spec_from_file_location("_cuda", {str(_cuda.__file__)!r})  # without the package: no JAX, a tenth of a second
_cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_cuda)
GOOD = {GOOD!r}

def words(**changes):
    return np.array(list({{**GOOD, **changes}}.values()), np.int64)

def kernel(image=b"image", sizes=(), packer=b"", **changes):
    return _cuda.Kernel(image, np.append(words(**changes), np.array(sizes, np.int64)), "mlp (train.py:12)", packer=packer)

def buffers(n=5, size=4096):
    return [(0x10000 * (i + 1), size) for i in range(n)]

def fake():
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_journal.restype = ctypes.c_char_p
    return library

def journal():
    return fake().fake_journal().decode().splitlines()

def error(call):
    try:
        call()
    except Exception as e:
        return f"{{type(e).__name__}}: {{e}}"
    return "no error"
"""


def run(program: str, library_path: pathlib.Path | None = None, fake: str = "", prelude: str = PRELUDE, **env: str) -> Any:
    """What the program prints last, read as JSON."""
    variables = {**os.environ, "FAKE_CUDA": fake, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **env}
    if library_path is not None:
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(library_path), os.environ.get("LD_LIBRARY_PATH")]))
    code = prelude + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_launch_words_are_named() -> None:
    want = {name: value for name, value in GOOD.items() if name != "version"}
    want |= {"cooperative": False, "stamped": False, "bytes": [], "pack_blocks": 0, "table": 0, "pointers": 0, "maps": 0}
    assert _cuda.check_launch(words()) == ""
    assert _cuda.launch_info(words()) == want
    sizes = [4096, 128, 64, 32, 64]
    assert _cuda.launch_info(np.append(words(), sizes)) == want | {"bytes": sizes}
    packed = {"bytes": sizes, "pack_blocks": 7, "table": 1, "pointers": 2}
    assert _cuda.launch_info(np.append(words(), [*sizes, *PACKS])) == want | packed
    with_maps = np.append(words(cooperative=8), WITH_MAPS)
    assert _cuda.launch_info(with_maps) == want | packed | {"maps": 2}
    assert _cuda.launch_info(np.append(words(cooperative=4), [*sizes, 4, 8, 4])) == want | {"bytes": sizes, "maps": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"sm": 850}, "architecture"),
        ({"grid": 0}, "grid"),
        ({"grid": 2**31}, "grid"),
        ({"grid": 131}, "multiple of the cluster"),
        ({"block": 0}, "block"),
        ({"block": 100}, "multiple of a warp"),
        ({"block": 1056}, "block"),
        ({"cluster": 0}, "cluster"),
        ({"cluster": 17}, "cluster"),
        ({"sm": 800}, "clusters need"),
        ({"shared_bytes": -1}, "shared memory"),
        ({"shared_bytes": 232449}, "shared memory"),
        ({"cooperative": 68}, "the flags (1: cooperative, 2: stamped, 4 for each tensor map)"),
        ({"cooperative": 4}, "those of 1 tensor maps are missing"),
        ({"instance": -2}, "an instance"),
        ({"instance": 134}, "an instance"),
        ({"instance": 8}, "the grid is not a multiple of an instance"),
        ({"instance": 3}, "an instance is not a multiple of the cluster"),
        ({"operands": -1}, "operands"),
        ({"operands": 510}, "parameters"),
        ({"results": 0}, "results"),
        ({"workspace_zero_bytes": -4}, "workspace"),
    ],
)
def test_launch_words_out_of_range_are_refused(changes: dict[str, int], message: str) -> None:
    assert message in _cuda.check_launch(words(**changes))


@pytest.mark.parametrize("count", [0, 1, 10, 12, 15, 17])
def test_a_wrong_number_of_launch_words_is_refused(count: int) -> None:
    assert f"there are {count}, not 11" in _cuda.check_launch(np.resize(words(), count))


@pytest.mark.parametrize(
    ("size", "message"), [(-1, "size of a buffer"), (2**51, "size of a buffer"), (32, "larger than the workspace")]
)
def test_sizes_of_buffers_out_of_range_are_refused(size: int, message: str) -> None:
    assert message in _cuda.check_launch(np.append(words(), [4096, 128, 64, 32, size]))


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 0, "grid of the packing kernel"),
        (1, 2, "operand with the table"),
        (2, 5, "buffer of a pointer"),
        (4, 4097, "bytes of a pointer"),
        (6, 65, "first byte of a pointer"),
        (7, 49, "bytes of a pointer"),
    ],
)
def test_words_of_the_packing_kernel_out_of_range_are_refused(word: int, value: int, message: str) -> None:
    packs = [*PACKS[:word], value, *PACKS[word + 1 :]]
    assert message in _cuda.check_launch(np.append(words(), [4096, 128, 64, 32, 64, *packs]))


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 2, "the pointer of a tensor map"),
        (1, 0, "the columns of a tensor map"),
        (1, 68, "a multiple of 16 bytes"),
        (2, 33, "a tensor map is larger than its array"),
        (2, 2**31, "the rows of a tensor map"),
        (5, 4, "a tensor map is larger than its array"),  # pointer 1 has 48 bytes
    ],
)
def test_words_of_tensor_maps_out_of_range_are_refused(word: int, value: int, message: str) -> None:
    maps = [*MAPS[:word], value, *MAPS[word + 1 :]]
    assert message in _cuda.check_launch(np.append(words(cooperative=8), [*WITH_MAPS[: -len(MAPS)], *maps]))


def test_tensor_maps_need_the_sizes_of_buffers_and_sm_90() -> None:
    assert "without the bytes of the buffers" in _cuda.check_launch(np.append(words(cooperative=4), [0, 8, 1]))
    old = words(cooperative=8, sm=800, cluster=1, grid=132)
    assert "tensor maps need architecture 900" in _cuda.check_launch(np.append(old, WITH_MAPS))


def cuda_header() -> pathlib.Path | None:
    """A folder with cuda.h: the toolkit's, or the one in the triton wheel."""
    spec = importlib.util.find_spec("triton")
    wheel = (
        [pathlib.Path(folder) / "backends" / "nvidia" / "include" for folder in spec.submodule_search_locations or ()]
        if spec
        else []
    )
    return next((folder for folder in (*wheel, pathlib.Path("/usr/local/cuda/include")) if (folder / "cuda.h").exists()), None)


@needs_compiler
@pytest.mark.skipif(cuda_header() is None, reason="needs cuda.h, which the triton wheel has")
def test_declared_types_have_the_layout_of_cuda_h() -> None:
    command = [str(CXX), "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'cuda' / 'src'}", f"-isystem{cuda_header()}"]
    done = subprocess.run([*command, str(FAKES / "layout.cc")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_without_a_driver_the_extension_says_what_to_do() -> None:
    if "there is no CUDA driver" not in (info := run("print(json.dumps(_cuda.driver_info()))")):
        pytest.skip(f"this machine has a CUDA driver: {info}")
    failed = run("print(json.dumps(error(lambda: kernel().load())))")
    assert failed.startswith("RuntimeError: there is no CUDA driver (libcuda.so.1)") and "install the NVIDIA driver" in failed


@needs_compiler
@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ("version=11080", "supports CUDA 11.8, but kitsune_jax needs 12.0 or later: update the NVIDIA driver"),
        ("init=100", "finds no device"),
        ("init=999", "does not start (cuInit): CUDA error 999"),
    ],
)
def test_a_driver_that_cannot_be_used_says_why(fake_driver: pathlib.Path, fake: str, message: str) -> None:
    assert message in run("print(json.dumps(_cuda.driver_info()))", fake_driver, fake)


@needs_compiler
def test_a_driver_that_lacks_a_function_is_named(tmp_path: pathlib.Path) -> None:
    compile_library(tmp_path / "libcuda.so.1", "fake_driver.cc", "-DcuLibraryLoadData=renamed")
    assert "has no function cuLibraryLoadData: update" in run("print(json.dumps(_cuda.driver_info()))", tmp_path)


@needs_compiler
def test_a_driver_without_versioned_lookup_is_read_by_exported_names(tmp_path: pathlib.Path) -> None:
    compile_library(tmp_path / "libcuda.so.1", "fake_driver.cc", "-DcuGetProcAddress_v2=renamed")
    assert run("k = kernel(); k.load(200); k.launch(buffers(), 200); print(json.dumps(journal()[-1]))", tmp_path).startswith(
        "launch"
    )


@needs_compiler
def test_driver_info_lists_the_devices(fake_driver: pathlib.Path) -> None:
    device = {
        "compute_capability": 80,
        "multiprocessors": 108,
        "shared_bytes": 166912,
        "name": "NVIDIA A100-SXM4-40GB",
        "clock": 1.41e9,
        "memory_bandwidth": 1.5552e12,
        "l2_bytes": 41943040,
    }
    fake = (
        "version=12080,devices=2,capability=80,multiprocessors=108,shared=166912,name=NVIDIA A100-SXM4-40GB,clock=1410000,"
        "memory_clock=1215000,bus=5120,l2=41943040"
    )
    assert run("print(json.dumps(_cuda.driver_info()))", fake_driver, fake) == {"version": 12080, "devices": [device, device]}
    silent = run("print(json.dumps(_cuda.driver_info()))", fake_driver)["devices"][0]
    assert [silent[key] for key in ("name", "clock", "memory_bandwidth", "l2_bytes")] == ["", 0, 0, 0]


@needs_compiler
def test_making_a_kernel_calls_no_driver(fake_driver: pathlib.Path) -> None:
    assert run("k = kernel(); print(json.dumps(journal()))", fake_driver) == []


@needs_compiler
def test_a_launch_zeroes_the_workspace_first_and_has_the_geometry_of_the_words(fake_driver: pathlib.Path) -> None:
    lines = run("k = kernel(cooperative=1); k.load(100); k.launch(buffers(), 100); print(json.dumps(journal()))", fake_driver)
    shape = "grid=132 block=384 shared=1024 cluster=2 cooperative=1"
    assert lines[-2:] == [f"memset {0x50000} 64 stream=100", f"launch {shape} stream=100 context=0 first={0x10000}"]


@needs_compiler
def test_a_timeline_reads_what_stamped_kernels_wrote_on_devices_in_use(fake_driver: pathlib.Path) -> None:
    """Of two devices one is in use. Its buffer is made when the timeline starts, and read when all work is done."""
    program = """
    k, other = kernel(cooperative=2), kernel()
    for one in (k, other):
        one.load(100)
    k.launch(buffers(), 100)
    n = len(journal())
    _cuda.start_timeline(5, True)
    k.launch(buffers(), 100)
    os.environ["FAKE_CUDA"] = os.environ["FAKE_CUDA"].replace("records=5", "records=0")
    other.launch(buffers(), 100)
    ((device, head, chunks, ns),), names, unstamped = _cuda.stop_timeline()
    head = np.frombuffer(head, np.uint32)
    seen = [device, head[:4].tolist(), len(chunks), chunks[0], [name.decode() for name in names], unstamped]
    print(json.dumps([journal()[:n], journal()[n:], seen, list(_cuda.stop_timeline()), 0 < ns <= _cuda.clock_ns()]))
    """
    before, lines, seen, again, later = run(program, fake_driver, "devices=2,active1=0,records=5")
    assert not any(line.startswith(("allocate", "copy")) for line in before)  # nothing is recorded, and no memory taken for it
    work = [line for line in lines if not line.startswith(("memset", "launch"))]
    quiet = "synchronize context=0"
    start = [quiet, "allocate 67112960 context=0", "copy 4096 bytes in, context=0", quiet]
    stop = [quiet, *(f"copy {size} bytes out, context=0" for size in (4096, 512)), "copy 4096 bytes in, context=0", quiet]
    assert work == [*start, "records of kernel 0", *stop]
    assert seen == [0, [1, 5, 1, 7], 512, 4, ["mlp (train.py:12)"], 1]
    assert again == [[], [], 0] and later


@needs_compiler
def test_a_timeline_that_cannot_start_says_why(fake_driver: pathlib.Path) -> None:
    text = run("print(json.dumps(error(lambda: _cuda.start_timeline(5, True))))", fake_driver, "synchronize=719")
    assert text.startswith("RuntimeError: cuCtxSynchronize failed: CUDA_ERROR_LAUNCH_FAILED")
    assert run("_cuda.start_timeline(5, False); print(json.dumps(_cuda.stop_timeline()))") == [[], [], 0]  # without a driver


@needs_compiler
def test_a_plain_launch_has_neither_memset_nor_attributes(fake_driver: pathlib.Path) -> None:
    program = "k = kernel(cluster=1, workspace_zero_bytes=0); k.load(100); n = len(journal()); k.launch(buffers(), 100)"
    lines = run(program + "; print(json.dumps(journal()[n:]))", fake_driver)
    assert lines == [f"launch grid=132 block=384 shared=1024 stream=100 context=0 first={0x10000}"]


@needs_compiler
def test_what_is_packed_is_packed_on_the_same_stream_in_front_of_the_kernel(fake_driver: pathlib.Path) -> None:
    """The stream is all that orders the two launches; the kernel's second pointer is byte 16 of the workspace."""
    program = f"""
    k = kernel(sizes=[4096] * 5 + {PACKS}, packer=b"pack", cluster=1)
    k.load(100)
    k.load(100)
    k.launch(buffers(), 100)
    print(json.dumps(journal()))
    """
    lines = run(program, fake_driver)
    assert lines.count("load") == lines.count("function loaded") == 2, "each is loaded once, and not by the launch"
    assert lines[-3:] == [
        f"memset {0x50000} 64 stream=100",
        f"launch grid=7 block=256 shared=0 stream=100 context=0 first={0x20000}",  # the table
        f"launch grid=132 block=384 shared=1024 stream=100 context=0 first={0x10000}",
    ]


@needs_compiler
def test_tensor_maps_are_encoded_at_the_first_launch_on_an_address(fake_driver: pathlib.Path) -> None:
    """The kernel's parameter is its maps, then its pointers; an address that returns needs no new map."""
    sizes = [4096] * 5 + PACKS + MAPS
    program = f"""
    k = kernel(sizes={sizes}, packer=b"pack", cluster=1, cooperative=8)
    k.load(100)
    n = len(journal())
    k.launch(buffers(), 100)
    k.launch([(0x90000, 4096), *buffers()[1:]], 100)
    k.launch(buffers(), 100)
    print(json.dumps([line for line in journal()[n:] if line.startswith(("encode", "launch"))]))
    """
    lines = run(program, fake_driver)
    box = "box=64x64 swizzle=3"

    def encoded(shape: str, pitch: int, at: int) -> str:
        return f"encode type=1 rank=2 {shape} pitch={pitch} {box} at={at}"

    def launches(address: int) -> list[str]:
        geometry = "grid=7 block=256 shared=0", "grid=132 block=384 shared=1024"
        return [f"launch {g} stream=100 context=0 first={at}" for g, at in zip(geometry, (0x20000, address), strict=True)]

    first, second, third = launches(0x10000), launches(0x90000), launches(0x10000)
    maps = [encoded("31x64", 128, 0x10000), encoded("3x8", 16, 0x50000 + 16)]  # of pointers 0 and 1
    assert lines == [
        *[first[0], *maps, first[1]],
        *[second[0], encoded("31x64", 128, 0x90000), second[1]],
        *third,
    ]
    text = run(
        f"k = kernel(sizes={sizes}, packer=b'pack', cluster=1, cooperative=8); k.load(100); "
        "print(json.dumps(error(lambda: k.launch(buffers(), 100))))",
        fake_driver,
        "encode=1",
    )
    assert "cuTensorMapEncodeTiled failed" in text and "mlp (train.py:12)" in text


@needs_compiler
def test_a_packing_kernel_that_is_missing_is_refused(fake_driver: pathlib.Path) -> None:
    text = run(f"print(json.dumps(error(lambda: kernel(sizes=[4096] * 5 + {PACKS}))))", fake_driver)
    assert "the packing kernel: the image is empty" in text


@needs_compiler
def test_loading_sets_the_attributes_and_happens_once_per_context(fake_driver: pathlib.Path) -> None:
    program = (
        "k = kernel(cluster=12); [k.load(s) for s in (100, 100, 200, 150, 200)]; k.load_current(); print(json.dumps(journal()))"
    )
    each = ["set 8=1024", "set 14=1", "function loaded"]
    assert run(program, fake_driver) == ["init", "load", "function in context 0", *each, "function in context 1", *each]


@needs_compiler
def test_a_portable_cluster_size_sets_no_attribute(fake_driver: pathlib.Path) -> None:
    assert "set 14=1" not in run("k = kernel(cluster=4); k.load(100); print(json.dumps(journal()))", fake_driver)


@needs_compiler
def test_a_driver_before_12_4_loads_without_cu_func_load(tmp_path: pathlib.Path) -> None:
    compile_library(tmp_path / "libcuda.so.1", "fake_driver.cc", "-DcuFuncLoad=renamed")
    lines = run("k = kernel(); k.load(100); print(json.dumps(journal()))", tmp_path, "version=12020")
    assert "load" in lines and "function loaded" not in lines


@needs_compiler
def test_equal_kernels_share_one_library_which_the_last_unloads(fake_driver: pathlib.Path) -> None:
    program = """
    layers = [kernel() for _ in range(3)] + [kernel(b"other image"), kernel(shared_bytes=2048)]
    for k in layers:
        k.load(100)
    counts = [fake().fake_loaded()]
    del k
    while layers:
        layers.pop(0)
        counts.append(fake().fake_loaded())
    print(json.dumps(counts))
    """
    assert run(program, fake_driver) == [3, 3, 3, 2, 1, 0]


@needs_compiler
def test_threads_that_load_at_once_load_once(fake_driver: pathlib.Path) -> None:
    program = """
    import threading
    k = kernel()
    def work():
        k.load(100)
        k.launch(buffers(), 100)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    lines = journal()
    print(json.dumps([lines.count("load"), sum(line.startswith("launch") for line in lines)]))
    """
    assert run(program, fake_driver) == [1, 8]


@needs_compiler
def test_loading_into_the_current_context_is_left_out_where_there_is_none(fake_driver: pathlib.Path) -> None:
    program = "k = kernel(); print(json.dumps([k.load_current(), journal().count('load')]))"
    assert run(program, fake_driver) == [True, 1]
    assert run(program, fake_driver, "current=0") == [False, 0]


@needs_compiler
def test_a_launch_in_a_context_without_the_kernel_is_an_error(fake_driver: pathlib.Path) -> None:
    text = run("k = kernel(); k.load(100); print(json.dumps(error(lambda: k.launch(buffers(), 200))))", fake_driver)
    assert "kitsune_cuda: mlp (train.py:12): the kernel was not loaded into this context before the launch" in text


@needs_compiler
@pytest.mark.parametrize(
    ("fake", "changes", "message"),
    [
        ("capability=80", {}, "generated for sm_90a, the device is sm_80: set KITSUNE_CUDA_ARCH=sm_80"),
        ("capability=100", {}, "generated for sm_90a, the device is sm_100: set KITSUNE_CUDA_ARCH=sm_100"),
        ("capability=75", {"sm": 800, "cluster": 1}, "needs sm_80 or later, the device is sm_75"),
        ("shared=512", {}, "more shared memory than a block of this sm_90 may have (512 bytes)"),
        ("cooperative=0", {"cooperative": 1}, "no cooperative launch"),
        ("clusters=0", {}, "no cluster of this kernel fits"),
        ("clusters=65", {"cooperative": 1}, "must all be resident, but only 130 fit"),
        ("clusters=5", {"cooperative": 1, "instance": 12}, "the 12 blocks of a pipeline must all be resident, but only 10 fit"),
        ("multiprocessors=131", {"cluster": 1, "cooperative": 1, "instance": 132}, "compile the function on this machine"),
        ("blocks=0", {"cluster": 1}, "no block of this kernel fits"),
        ("multiprocessors=131", {"cluster": 1, "cooperative": 1}, "must all be resident, but only 131 fit"),
        ("load=209", {}, "CUDA_ERROR_NO_BINARY_FOR_GPU (what went wrong); the kernel was compiled for another device"),
        ("load=222", {}, "; NVRTC is newer than the driver: update the driver, or set KITSUNE_CUDA_ARCH"),
        ("load=218", {}, "CUDA_ERROR_INVALID_PTX (what went wrong)\nptxas fatal: unexpected token"),
        ("kernel=500", {}, "cuLibraryGetKernel(kitsune_region) failed: CUDA_ERROR_NOT_FOUND"),
        ("set=1", {}, "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES) failed: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_a_kernel_that_cannot_run_here_is_refused_when_loaded(
    fake_driver: pathlib.Path, fake: str, changes: dict[str, int], message: str
) -> None:
    text = run(f"print(json.dumps(error(lambda: kernel(**{changes!r}).load(100))))", fake_driver, fake)
    assert text.startswith("RuntimeError: kitsune_cuda: mlp (train.py:12): ") and message in text
    assert "[grid 132, block 384" in text


# What the driver says of the device, changes to the launch words, the grid that is launched.
GRIDS = [
    ("multiprocessors=132", {"cluster": 1, "instance": 1}, 132),
    ("multiprocessors=114", {"cluster": 1, "instance": 1}, 114),
    ("multiprocessors=16", {"cluster": 1, "instance": 1}, 16),
    ("multiprocessors=114,blocks=2", {"cluster": 1, "instance": 1}, 114),  # and no multiprocessor with two blocks
    ("multiprocessors=200", {"cluster": 1, "instance": 1}, 132),
    ("multiprocessors=114", {"cluster": 1, "instance": 12, "cooperative": 1}, 108),
    ("multiprocessors=114", {"cluster": 1, "instance": 132}, 132),  # no block waits for another: it takes turns
    ("multiprocessors=114", {"cluster": 1, "instance": 0}, 132),
    ("clusters=66", {"instance": 2}, 132),
    ("clusters=57", {"instance": 2}, 114),
    ("clusters=15", {"cluster": 4, "instance": 12, "cooperative": 1}, 60),
    ("clusters=7", {"cluster": 4, "instance": 12, "cooperative": 1}, 24),
    ("clusters=16", {"grid": 160, "cluster": 8, "instance": 8}, 128),
]


@needs_compiler
@pytest.mark.parametrize(("fake", "changes", "grid"), GRIDS)
def test_a_grid_for_a_larger_device_shrinks_to_the_one_at_hand(
    fake_driver: pathlib.Path, fake: str, changes: dict[str, int], grid: int
) -> None:
    program = f"k = kernel(**{changes!r}); k.load(100); k.launch(buffers(), 100); print(json.dumps(journal()[-1]))"
    assert run(program, fake_driver, fake).startswith(f"launch grid={grid} ")


@needs_compiler
def test_each_device_of_a_process_has_its_own_grid(fake_driver: pathlib.Path) -> None:
    program = """
    k = kernel(cluster=1, instance=2, cooperative=1)
    for stream in (100, 200, 300, 200):
        k.load(stream)
        k.launch(buffers(), stream)
    print(json.dumps([line.split()[1] for line in journal() if line.startswith("launch")]))
    """
    fake = "devices=3,multiprocessors1=114,multiprocessors2=17"
    assert run(program, fake_driver, fake) == ["grid=132", "grid=114", "grid=16", "grid=114"]


@needs_compiler
def test_a_portable_kernel_is_accepted_from_sm_80_on(fake_driver: pathlib.Path) -> None:
    program = """
    found = {}
    for capability in (80, 86, 89, 90, 100, 120):
        os.environ["FAKE_CUDA"] = f"capability={capability}"
        found[capability] = error(lambda: kernel(sm=800, cluster=1).load(100))
    print(json.dumps(found))
    """
    assert set(run(program, fake_driver).values()) == {"no error"}


@needs_compiler
def test_a_library_that_failed_to_load_is_tried_again(fake_driver: pathlib.Path) -> None:
    program = """
    k = kernel()
    os.environ["FAKE_CUDA"] = "load=218"
    first = error(lambda: k.load(100))
    os.environ["FAKE_CUDA"] = ""
    print(json.dumps([first != "no error", error(lambda: k.load(100))]))
    """
    assert run(program, fake_driver) == [True, "no error"]


@needs_compiler
@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ("launch=720", "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE (too many blocks in cooperative launch)"),
        ("launch=719", "CUDA_ERROR_LAUNCH_FAILED (what went wrong)"),
    ],
)
def test_a_failed_launch_names_the_region_the_error_and_the_geometry(fake_driver: pathlib.Path, fake: str, message: str) -> None:
    text = run("k = kernel(); k.load(100); print(json.dumps(error(lambda: k.launch(buffers(), 100))))", fake_driver, fake)
    want = f"kitsune_cuda: mlp (train.py:12): cuLaunchKernelEx failed: {message}"
    assert text == f"RuntimeError: {want} [grid 132, block 384, clusters of 2, 1024 bytes of shared memory]"


@needs_compiler
@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ("buffers(4)", "the call has 4 buffers, but the kernel has 2 operands and 3 results"),
        ("buffers()[:3] + buffers(size=96)[3:]", "buffer 3 has 96 bytes, but the kernel was made for 4096"),
        ("buffers(size=63)", "the workspace has 63 bytes, fewer than the 64 to be zeroed"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(fake_driver: pathlib.Path, buffers: str, message: str) -> None:
    sized = ", sizes=(4096,) * 5" if "made for" in message else ""
    text = run(f"k = kernel(b'image'{sized}); k.load(100); print(json.dumps(error(lambda: k.launch({buffers}, 100))))", fake_driver)
    assert text == f"ValueError: kitsune_cuda: mlp (train.py:12): {message}"


CALLS = """
import json, os, sys
import jax, jax.numpy as jnp, numpy as np
from kitsune_jax import _cuda
from kitsune_jax.targets.cuda import runtime

FOLDER = os.environ["FOLDER"]
N = 1000

def error(call):
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"

def read(name):
    return np.frombuffer(open(os.path.join(FOLDER, name), "rb").read(), np.uint8)

def words(operands=2, results=3, workspace=16, sizes=True, **changes):
    launch = dict(version=6, sm=900, grid=4, block=128, cluster=2, shared_bytes=1024, cooperative=0, instance=0)
    buffers = ([4 * N] * (operands + 2) + [4 * workspace])[: operands + results] if sizes else []
    return np.array(list({**launch, **changes}.values()) + [operands, results, 64] + buffers, np.int64)

def region(*operands, image=None, launch=None, workspace=16):
    shape = jax.ShapeDtypeStruct((N,), jnp.float32)
    results = (shape, shape, jax.ShapeDtypeStruct((workspace,), jnp.int32))
    call = jax.ffi.ffi_call("kitsune_cuda", results)
    image = read("region.so") if image is None else image
    return call(*operands, image=image, packer=np.zeros(0, np.uint8), launch=words() if launch is None else launch,
                name="mlp (train.py:12)")

a = jnp.arange(N, dtype=jnp.float32)
b = jnp.full(N, 2.0, jnp.float32)
"""

SCENARIOS = """
import concurrent.futures
from jax import export

out = {}
assert runtime.register("cpu") and runtime.register("CUDA")
out["no emulator"] = error(lambda: jax.block_until_ready(jax.jit(region)(a, b)))
out["missing emulator"] = error(lambda: runtime.use_emulator("/nowhere/libemulator.so"))
runtime.use_emulator(os.path.join(FOLDER, "libemulator.so"))
out["second emulator"] = error(lambda: runtime.use_emulator("/elsewhere.so"))

def both(a, b):
    total, difference, workspace = region(a, b)
    product, _, again = region(total, difference)
    return total, difference, product, workspace[0], again[0]

def right(results, a=a, b=b):
    total, difference, product, first, second = map(np.asarray, results)
    return bool((total == a + b).all() and (difference == a - b).all() and (product == 2 * a).all() and first == second == 1)

before = runtime.calls()
out["jit"] = right(jax.jit(both)(a, b))
out["calls"] = runtime.calls() - before
out["eager"] = right(both(a, b))
f = jax.jit(both)
out["again"] = all(right(f(a + i, b), a + i) for i in range(20))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    out["threads"] = all(pool.map(lambda i: right(f(a + i, b), a + i), range(40)))
run = lambda *args, **options: error(lambda: jax.block_until_ready(jax.jit(lambda *x: region(*x, **options))(*args)))
out["fails"] = run(a, b, image=read("fails.so"))
out["after a failure"] = right(f(a, b))
out["operands"] = run(a, b, b)
out["results"] = run(a, b, launch=words(results=2))
out["workspace"] = run(a, b, workspace=8, launch=words(workspace=8))
out["sizes"] = run(a[:-1], b)
out["no sizes"] = run(a, b, launch=words(sizes=False))
out["words"] = run(a, b, launch=words(version=7))
out["no image"] = run(a, b, image=np.zeros(0, np.uint8))
out["bad image"] = run(a, b, image=np.zeros(100, np.uint8))
out["too large"] = run(a, b, launch=words(cooperative=1, grid=134))
allowed = [export.DisabledSafetyCheck.custom_call("kitsune_cuda")]
sent = export.export(jax.jit(both), disabled_checks=allowed)(a, b).serialize()
out["export"] = right(export.deserialize(sent).call(a, b))
text = jax.jit(region).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
out["lowered for cuda"] = 'custom_call @kitsune_cuda' in text and 'name = "mlp (train.py:12)"' in text
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_journal.restype = ctypes.c_char_p
out["driver"] = driver.fake_journal().decode()
emulator = ctypes.CDLL(os.path.join(FOLDER, "libemulator.so"))
loaded = emulator.fake_loaded()
del f
jax.clear_caches()
out["unloaded"] = [loaded, emulator.fake_loaded()]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def outcome(fake_driver: pathlib.Path, fake_emulator: pathlib.Path) -> dict[str, Any]:
    """What calls through XLA did, by scenario: one process for all, because importing JAX takes longer than running them."""
    result: dict[str, Any] = run(SCENARIOS, fake_driver, prelude=CALLS, FOLDER=str(fake_emulator))
    return result


@needs_compiler
@pytest.mark.parametrize("scenario", ["jit", "eager", "again", "threads", "after a failure", "export", "lowered for cuda"])
def test_calls_through_xla_run_in_the_emulator(outcome: dict[str, Any], scenario: str) -> None:
    assert outcome[scenario] is True


@needs_compiler
def test_executed_calls_are_counted(outcome: dict[str, Any]) -> None:
    assert outcome["calls"] == 2


@needs_compiler
def test_registering_and_lowering_for_cuda_open_no_driver(outcome: dict[str, Any]) -> None:
    assert outcome["driver"] == ""


@needs_compiler
def test_the_image_is_unloaded_with_its_executables(outcome: dict[str, Any]) -> None:
    before, after = outcome["unloaded"]
    assert before > 0 and after == 0


@needs_compiler
@pytest.mark.parametrize(
    ("scenario", "messages"),
    [
        ("no emulator", ("no emulator is open", "use_emulator")),
        ("missing emulator", ("the emulator cannot be opened", "/nowhere/libemulator.so")),
        ("second emulator", ("is open already",)),
        (
            "fails",
            ("mlp (train.py:12)", "CUDA_ERROR_LAUNCH_FAILED", "deadlock: warp 3 waits for barrier 'full'", "grid 4, block 128"),
        ),
        ("operands", ("3 operands and 3 results, but its kernel wants 2 and 3",)),
        ("sizes", ("buffer 0 has 3996 bytes, but the kernel was made for 4000",)),
        ("no sizes", ("the bytes of the buffers are missing",)),
        ("results", ("2 operands and 3 results, but its kernel wants 2 and 2",)),
        ("workspace", ("the zeroed part of the workspace is larger than the workspace",)),
        ("words", ("launch words: version 7",)),
        ("no image", ("the image is empty",)),
        ("bad image", ("the image is not a shared library",)),
        ("too large", ("must all be resident, but only 132 fit",)),
    ],
)
def test_what_goes_wrong_becomes_an_error_of_jax(outcome: dict[str, Any], scenario: str, messages: tuple[str, ...]) -> None:
    for message in messages:
        assert message in outcome[scenario]


CACHED = """
import logging
runtime.use_emulator(os.path.join(FOLDER, "libemulator.so"))
runtime.register("cpu")
hits = []

class Hits(logging.Handler):
    def emit(self, record):
        if "cache hit for 'jit_region" in record.getMessage():
            hits.append(record)

log = logging.getLogger("jax._src.compiler")
log.addHandler(Hits())
log.setLevel(logging.DEBUG)
jax.config.update("jax_compilation_cache_dir", os.environ["CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
print(json.dumps([len(hits), float(jax.jit(region)(a, b)[0].sum()), len(hits)]))
"""


@needs_compiler
def test_a_second_process_runs_the_kernel_from_the_persistent_cache(fake_emulator: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first, second = (run(CACHED, prelude=CALLS, FOLDER=str(fake_emulator), CACHE=str(tmp_path)) for _ in range(2))
    total = 999 * 1000 / 2 + 2 * 1000
    assert first == [0, total, 0] and second == [0, total, 1]


@needs_compiler
def test_the_stages_for_devices_behave_as_xla_calls_them(fake_driver: pathlib.Path, tmp_path: pathlib.Path) -> None:
    sources = [ROOT / "cuda" / "src" / f"{name}.cc" for name in UNITS]
    flags = ["-std=c++17", "-O0", "-w", f"-I{ROOT / 'cuda' / 'src'}", f"-isystem{jax.ffi.include_dir()}"]
    unit, program = tmp_path / "unit.cc", tmp_path / "stages"
    unit.write_text("".join(f'#include "{file}"\n' for file in (*sources, FAKES / "test_stages.cc")))  # XLA's headers are read once
    subprocess.run([str(CXX), *flags, str(unit), "-o", str(program), "-ldl", "-pthread"], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver), "FAKE_CUDA": ""}
    done = subprocess.run([str(program)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheels_carry_what_kernels_are_compiled_from(tmp_path: pathlib.Path) -> None:
    for module in ("setuptools", "nanobind"):
        pytest.importorskip(module, reason="setup.py needs what pip installs for a build")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    copied = tmp_path / "kitsune_jax" / "cuda_sources"
    for room in ("include", "emulator"):
        source = ROOT / "cuda" / room
        want = {path.relative_to(source) for path in source.rglob("*") if path.suffix in (".h", ".cc")}
        assert {path.relative_to(copied / room) for path in (copied / room).rglob("*") if path.is_file()} == want
