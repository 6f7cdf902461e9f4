"""The microbenchmarks of the queues, each a case that may hang or fail alone: ``benchmarks.micro`` with a record.

Comes in: a device, or the emulator. Goes out: a finding per record of ``benchmarks.micro.suite``.
"""

from __future__ import annotations

import concurrent.futures

from benchmarks.micro import suite
from benchmarks.micro.backends import Backend, Device, Emulator
from scripts.gpu.correctness import context_is_lost
from scripts.gpu.record import Record, arguments
from scripts.gpu.results import LOST


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--case-seconds", type=float, default=15.0)
    args = parser.parse_args()
    record = Record("micro", args.output, jax_devices=False, patience=args.patience)
    with record.case("compiling", 120):
        backend: Backend = Emulator() if args.dry_run else Device()
        with concurrent.futures.ThreadPoolExecutor(2 if args.dry_run else 8) as pool:
            list(pool.map(backend.compile, suite.sources(backend, quick=args.dry_run)))
    cases = list(suite.cases(backend, quick=args.dry_run))
    record.content["expected"] = len(cases)
    for name, measure in cases:
        if record.wants(name):
            with record.case(name, args.case_seconds):
                found = measure()
            record.tell({"name": name, "ok": "error" not in found, **found})
            if context_is_lost(found):
                return LOST
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())
