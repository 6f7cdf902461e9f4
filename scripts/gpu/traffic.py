"""Bytes that one call of a benchmark moves to and from device memory, as the hardware counts them.

Run without ``--profiled`` it starts itself under ``ncu``, once for each column of each application, and reads its table: the
counters of all kernels between two marks. A counter needs no second replay of a kernel, and caches are left as they are. Where
counters may not be read the finding says so, and is no failure.
"""

from __future__ import annotations

import csv
import ctypes
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.gpu import supervise
from scripts.gpu.record import Record, arguments

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
CASES = (("nerf", "bf16", 262_144), ("mgn", "bf16", 200_000), ("swiglu", "bf16", 65_536))
_NOT_PERMITTED = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded", "Failed to initialize the profiler")


def measured(app: str, dtype: str, rows: int, column: str) -> int:
    """The process under ``ncu``: warm, then one call between the marks."""
    from benchmarks.apps import make_case
    from benchmarks.columns import COLUMNS

    case = make_case(app, dtype, rows)
    function = COLUMNS[column](case.app.function)
    function(case.params, case.x).block_until_ready()
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuProfilerStart()
    function(case.params, case.x).block_until_ready()
    driver.cuProfilerStop()
    return 0


def read_table(text: str) -> dict[str, Any]:
    """Kernels and their bytes, from ``ncu --csv --print-units base``. Raises ``ValueError`` where there is no table."""
    start = text.find('"ID"')
    if start < 0:
        raise ValueError(text.strip()[-500:] or "ncu wrote nothing")
    totals = dict.fromkeys(METRICS, 0.0)
    kernels = set()
    for row in csv.DictReader(io.StringIO(text[start:])):
        if row["Metric Name"] in totals:
            if row["Metric Unit"] != "byte":
                raise ValueError(f"{row['Metric Name']} is in {row['Metric Unit']!r}, not in bytes")
            totals[row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
            kernels.add(row["ID"])
    return {"kernels": len(kernels), "read": totals[METRICS[0]], "written": totals[METRICS[1]]}


def profile(app: str, dtype: str, rows: int, column: str, seconds: float) -> dict[str, Any]:
    command = ["ncu", "--csv", "--print-units", "base", "--metrics", ",".join(METRICS), "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--cache-control", "none", sys.executable, "-m", "scripts.gpu.traffic"]
    command += ["--profiled", app, dtype, str(rows), column, "--output", os.devnull]
    # Kernels of a graph are profiled one by one only outside of it.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
    environment = {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as scratch:
        done = supervise.run(command, Path(scratch) / "log", seconds, environment)
        text = (Path(scratch) / "log").read_text(errors="replace")
    if done.status == supervise.TIMED_OUT:
        return {"ok": False, "error": f"ncu took longer than {seconds:.0f} s"}
    if any(words in text for words in _NOT_PERMITTED):
        return {"ok": True, "skipped": "the hardware's counters cannot be read here"}
    try:
        return {"ok": True, **read_table(text)}
    except ValueError as error:
        return {"ok": False, "error": str(error)}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--profiled", nargs=4, metavar=("APP", "DTYPE", "ROWS", "COLUMN"), help="what ncu starts")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each run of ncu")
    args = parser.parse_args()
    if args.profiled:
        app, dtype, rows, column = args.profiled
        return measured(app, dtype, int(rows), column)
    record = Record("traffic", args.output, jax_devices=False, patience=args.patience)
    if args.dry_run or shutil.which("ncu") is None:
        record.add({"name": "ncu", "ok": True, "skipped": "no device" if args.dry_run else "there is no ncu on PATH"})
        return record.finish()
    for app, dtype, rows in CASES:
        for column in ("jit", "pipeline"):
            name = f"{app} {dtype} {rows} {column}"
            if record.wants(name):
                with record.case(name, args.seconds + 30):
                    found = profile(app, dtype, rows, column, args.seconds)
                record.tell({"name": name, **found})
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())
