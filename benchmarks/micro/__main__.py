"""python -m benchmarks.micro [--backend cuda|emulator] [--output micro.json]"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.micro import suite
from benchmarks.micro.backends import Backend, Device, Emulator


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro", description="The queues' latency and bandwidth.")
    parser.add_argument("--backend", choices=("cuda", "emulator"), default="cuda", help="the emulator checks and times nothing")
    parser.add_argument("--output", type=Path, help="JSON, written after every record")
    args = parser.parse_args(argv)
    try:
        backend: Backend = Emulator() if args.backend == "emulator" else Device()
    except (OSError, RuntimeError) as error:
        print(f"there is no {args.backend} backend here: {error}")
        return 2
    records: list[suite.Record] = []
    for record in suite.run(backend, quick=backend.emulated):
        records.append(record)
        print(suite.markdown([record]).splitlines()[2], flush=True)
        if args.output:
            args.output.write_text(json.dumps({"backend": backend.describe(), "records": records}, indent=1) + "\n")
    return 1 if any("error" in record for record in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
