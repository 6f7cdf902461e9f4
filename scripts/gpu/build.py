"""Builds the extension in place, or says what is missing for that. Standard library only."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("nanobind", "setuptools", "jaxlib")


def main() -> int:
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        lacks = ", ".join(missing)
        print(f"{sys.executable} lacks {lacks}, which the extension is built with: pip install {' '.join(missing)}")
        return 2
    if subprocess.run([str(ROOT / "scripts" / "check_compiler.sh")], check=False).returncode:
        return 2
    return subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
