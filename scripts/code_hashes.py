"""Hashes of all generated code: a change that should not change any shows here whether it did.

    python -m scripts.code_hashes write before.json      # at the commit to compare with; a quarter of an hour
    python -m scripts.code_hashes compare before.json    # exit status 1, and the names, where a hash is another one
    python -m scripts.code_hashes compare before.json --match 'cuda/nerf|cpu/amx-2'
    python -m scripts.code_hashes write machine.json --sass --match 'cuda/(mlp|loss)/bfloat16'    # seconds a kernel
    python -m scripts.code_hashes write sources.json --headers    # two minutes: CUDA sources with all that they include

Comes in: every kernel family of the tests under every arrangement of the CUDA target, the calls of several phases and the
applications of the device check as planned for an H200, and every function of the grid of benchmarks planned for every family of
CPUs. Goes out: the SHA-256 of each CUDA source and of each CPU program, by name, as JSON. Nothing is
compiled and nothing runs, so neither a GPU nor the instruction sets are needed. Rows are cut to a few thousand: their number
changes how tiles are shared out, not the code of one. With ``--sass`` NVRTC compiles the CUDA sources, and the hashes are those of
the machine code and its constants: a text that reads better should leave them as they are. With ``--headers`` they are those of
the CUDA sources and of the headers in ``cuda/include`` that each includes, so an equal hash is an equal kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROWS, _FAMILY_ROWS = 2003, 257
_TITLE = "region"  # of all programs: the usual one names a line of the user's source
CPUS = tuple(f"{name}-2" for name in ("generic", "avx2", "avx512", "avx512bf16", "amx", "neon", "neonbf16"))

Code = tuple[str, Callable[[], dict[str, bytes]]]  # a name, and what makes the code whose names begin with it


def everything() -> Iterator[Code]:
    yield from _cuda_families()
    yield from _cuda_calls()
    yield from _cuda_applications()
    yield from _cpu_programs()


def _cuda_families() -> Iterator[Code]:
    from tests.support.cuda_attention_cases import ATTENTION, ATTENTION_GRADIENTS
    from tests.support.cuda_cases import FAMILIES
    from tests.support.cuda_recurrent_cases import RECURRENT
    from tests.support.cuda_training_cases import TRAINING

    batched = {**ATTENTION, **ATTENTION_GRADIENTS}
    for name, family in {**batched, **FAMILIES, **TRAINING, **RECURRENT}.items():
        for dtype in family.dtypes:
            yield f"cuda/{name}/{dtype}", functools.partial(_sources, family, dtype, name in batched)


def _sources(family: Any, dtype: str, batches: bool) -> dict[str, bytes]:
    """The sources of a family, by its arrangements."""
    from kitsune_jax.targets.cuda import lower
    from kitsune_jax.targets.cuda.arrangement import arrangement_of
    from tests.support.cuda_run import arrangements, subject

    of = subject(family.function, *family.arguments(_FAMILY_ROWS, dtype), batches=batches)
    found = {}
    for name, plan in arrangements(of).items():
        program = of.program(plan)
        found[name] = lower.generate_kernel(program, arrangement_of(plan, program), _TITLE).source.encode()
    return found


def _cuda_calls() -> Iterator[Code]:
    from tests.support.cuda_call_cases import CALLS

    for name, family in CALLS.items():
        for dtype in family.dtypes:
            yield f"cuda/{name}/{dtype}", functools.partial(_family_calls, family, dtype)


def _family_calls(family: Any, dtype: str) -> dict[str, bytes]:
    rows = family.rows[0] if family.rows else _FAMILY_ROWS
    return _planned_sources(family.function, family.shapes(rows, dtype), family.deterministic)


def _cuda_applications() -> Iterator[Code]:
    from scripts.gpu.cases import CASES

    applications = (name for name in CASES if not name.startswith(("plans", "attention", "token")))
    for name in dict.fromkeys(re.sub(r" \d+$", f" {_ROWS}", name) for name in applications):
        yield f"cuda/{name.replace(' ', '-')}", functools.partial(_application, name)


def _application(name: str) -> dict[str, bytes]:
    from scripts.gpu.cases import build

    case = build(name)
    return _planned_sources(case.columns["jit"], case.arguments[0])


def _planned_sources(function: Callable[..., Any], arguments: Sequence[Any], deterministic: bool = True) -> dict[str, bytes]:
    """The sources of a function's calls as planned for an H200, by number."""
    import jax

    from kitsune_jax import _compat
    from kitsune_jax.frontend import lowering
    from kitsune_jax.frontend.route import RouteOptions
    from kitsune_jax.planning.plan import GpuPlan
    from kitsune_jax.targets.cuda import lower
    from kitsune_jax.targets.cuda.arrangement import arrangement_of

    options, found = RouteOptions(force=True, device="h200", code=False, deterministic=deterministic), {}
    jaxpr, _ = _compat.hoist_consts(jax.make_jaxpr(function)(*arguments))
    _, routed, _ = lowering.capture_until_stable(jaxpr, lambda body, _: body, "cuda", options)
    for k, region in enumerate(routed.regions):
        plans = [phase.plan for phase in region.phases if isinstance(phase.plan, GpuPlan)]
        asked = tuple(arrangement_of(plan, part.program) for plan, part in zip(plans, region.program.parts, strict=True))
        if (only := region.program.only) is not None:
            made = lower.generate_kernel(only, asked[0], _TITLE)
        else:
            made = lower.generate_call_kernel(region.program, asked, _TITLE)
        found[str(k)] = made.source.encode()
    return found


def _cpu_programs() -> Iterator[Code]:
    from benchmarks.grid_cases import draw

    for case in draw(132, 0).cases:
        cut = dataclasses.replace(case, rows=min(case.rows, _ROWS))
        yield f"cpu/{cut.label}", functools.partial(_words, cut)


def _words(case: Any) -> dict[str, bytes]:
    """The CPU programs of a function of the grid, by the CPU that they are planned for and their number."""
    import jax

    from benchmarks.grid_functions import make_problem
    from kitsune_jax.frontend import lowering
    from kitsune_jax.frontend.route import RouteOptions
    from kitsune_jax.planning.plan import CpuPlan
    from kitsune_jax.targets.cpu.bytecode import Products
    from kitsune_jax.targets.cpu.lower import generate

    problem, found = make_problem(case), {}
    jaxpr = jax.make_jaxpr(problem.function)(*problem.args)
    for device in CPUS:
        options = RouteOptions(force=True, device=device, code=False)
        _, routed, _ = lowering.capture_until_stable(jaxpr, lambda body, _: body, "cpu", options)
        for k, region in enumerate(routed.regions):
            products = [Products(*phase.plan.products) for phase in region.phases if isinstance(phase.plan, CpuPlan)]
            found[f"{device}/{k}"] = generate(region.program, _TITLE, products).tobytes()
    return found


def with_headers(source: bytes) -> bytes:
    """``source``, and behind it each header of ``cuda/include`` that it includes, in alphabetical order; without comments, which
    change no kernel, and with a space for all that is one."""
    folder, found, work = Path(__file__).parents[1] / "cuda" / "include", dict[str, bytes](), [source]
    while work:
        for name in re.findall(rb'#include\s*["<](kitsune/[^">]+)[">]', work.pop()):
            if (header := name.decode()) not in found:
                found[header] = (folder / header).read_bytes()
                work.append(found[header])
    text = b"\n".join([source, *(found[header] for header in sorted(found))])
    return b" ".join(re.sub(rb"//.*", b"", text).split())


def machine_code(name: str, source: bytes) -> bytes:
    """The instructions and constants that NVRTC makes of the CUDA source of kernel ``name``."""
    from kitsune_jax.targets.cuda import compile

    elf = compile.cubin(source.decode(), "sm_80" if "/sm80" in name else "sm_90a").cubin
    (headers,), (size, count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<3H", elf, 0x3A)
    sections = [struct.unpack_from("<2I4Q", elf, headers + k * size) for k in range(count)]
    found = b""
    for label, _, _, _, offset, length in sections:
        start = sections[names][4] + label
        if elf[start : elf.index(b"\0", start)].startswith((b".text.", b".nv.constant")):
            found += elf[offset : offset + length]
    return found


def hashes(wanted: Sequence[Code], of: Callable[[str, bytes], bytes] = lambda _, text: text) -> dict[str, str]:
    """name -> SHA-256 of all code that ``wanted`` makes, or of that ``of`` a name and its code; or why there is none."""
    found: dict[str, str] = {}
    for k, (name, make) in enumerate(wanted, 1):
        print(f"{k} of {len(wanted)}: {name}", file=sys.stderr, flush=True)
        try:
            code = make()
        except Exception as error:  # that there is no code is a result to be compared, too
            found[name] = f"{type(error).__name__}: {error}"
            continue
        code = {f"{name}/{part}": text for part, text in code.items()}
        found |= {part: hashlib.sha256(of(part, text)).hexdigest() for part, text in code.items()}
    return found


def cuda_hashes(wanted: Sequence[Code] | None = None) -> dict[str, str]:
    """The hashes of CUDA sources with their headers, by default of all kernel families."""
    return hashes(list(_cuda_families()) if wanted is None else wanted, lambda _, text: with_headers(text))


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each name that is gone, new, or has another hash.

    >>> differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"})
    ['gone: a', 'changed: b', 'new: c']
    """
    words = {name: "gone" for name in before.keys() - after.keys()} | {name: "new" for name in after.keys() - before.keys()}
    words |= {name: "changed" for name in before.keys() & after.keys() if before[name] != after[name]}
    return [f"{words[name]}: {name}" for name in sorted(words)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.code_hashes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--match", default="", help="a regular expression: only families and functions whose name it finds")
    parser.add_argument("--sass", action="store_true", help="of CUDA kernels, the hashes of their machine code")
    parser.add_argument("--headers", action="store_true", help="of CUDA kernels, the hashes of their sources with all headers")
    args = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    before: dict[str, str] = json.loads(args.file.read_text()) if args.what == "compare" else {}
    codes = _cuda_families() if args.sass or args.headers else everything()
    wanted = [(name, make) for name, make in codes if re.search(args.match, name)]
    found = hashes(wanted, machine_code) if args.sass else cuda_hashes(wanted) if args.headers else hashes(wanted)
    if args.what == "write":
        args.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{len(found)} hashes in {args.file}")
        return 0
    names = tuple(f"{name}/" for name, _ in wanted)
    before = {name: h for name, h in before.items() if f"{name}/".startswith(names)}
    lines = differences(before, found)
    print("\n".join([*lines, f"{len(lines)} of {len(before.keys() | found.keys())} differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
