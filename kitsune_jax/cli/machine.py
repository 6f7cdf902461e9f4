"""``python -m kitsune_jax machine``: measure this machine again, keep the profile, and print it.

Comes in: the command's options. Goes out: a profile as text or JSON, and an exit status: 0; 1 where no profile could be kept; 2 for
a name that no profile has.

python -m kitsune_jax machine                  # measures; every plan from now on is made with the new numbers
python -m kitsune_jax machine --kept           # prints what is kept, and measures only what it lacks
python -m kitsune_jax machine --shipped zen4-8 # prints a profile that comes with the package
python -m kitsune_jax machine --json           # as JSON, one number on a line
"""

from __future__ import annotations

import argparse
import sys

from kitsune_jax import config
from kitsune_jax.targets.cpu.profile import profile as shipped
from kitsune_jax.targets.cpu.profile import store
from kitsune_jax.targets.cpu.profile.profile import MachineProfile
from kitsune_jax.targets.cpu.profile.store import Disturbed

_NAMES = f"<family> or <family>-<cores>, family one of {', '.join(shipped.FAMILIES)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--kept", action="store_true", help="print the profile in use; measure only what it lacks")
    which.add_argument("--shipped", metavar="NAME", help=f"print one that comes with the package: {_NAMES}")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """The exit status: 1 where no profile could be kept, 2 for a name that no profile has."""
    try:
        profile = _profile(args)
    except Disturbed as why:
        used = f"the shipped profile {store.shipped_name(config.num_threads())}" if why.profile is None else "what was measured now"
        print(f"no profile was kept: {why}.\nWhile this is so, plans are made with {used}.", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(profile.to_json() if args.json else text(profile), end="")
    return 0


def _profile(args: argparse.Namespace) -> MachineProfile:
    if args.shipped:
        name = args.shipped
        return shipped.shipped(name if "-" in name else f"{name}-{config.num_threads()}")
    return store.stored(config.num_threads(), again=not args.kept)


def text(profile: MachineProfile) -> str:
    """The profile for a person to read: rates of matrix products, functions and memory, ours beside XLA's."""
    lines = [
        f"{profile.name}: {profile.cpu}",
        f"kernels for {profile.isa}, {profile.workers} workers; caches of a core "
        f"{profile.l1 >> 10} and {profile.l2 >> 10} KiB, shared {profile.l3 >> 10} KiB",
        *_agreement(profile),
        "",
        f"{'products, GF/s of all workers':36} {'ours':>14} {'XLA':>8}",
    ]
    for key, seconds in profile.numbers:
        kind, _, rest = key.partition("/")
        if kind == "gemm" and rest.endswith(("64x64", "512x512")):
            dtype, way, shape = rest.split("/")
            k, n = map(int, shape.split("x"))
            size = 64 if k == 64 else 1024
            xla = profile.get(f"xla/dot/{dtype}/1024x{size}x{size}")
            theirs = f"{2e-9 * 1024 * size**2 / xla:8.0f}" if xla else f"{'':8}"
            lines.append(f"  {dtype:9} {way:8} {shape:>15} {2e-9 * 96 * k * n * profile.workers / seconds:14.0f} {theirs}")
    lines += ["", f"{'functions, ps an element (all workers)':36} {'ours':>14} {'XLA':>8}"]
    for name in ("add", "div", "exp", "log", "tanh", "logistic", "erf", "sin"):
        xla = profile.get(f"xla/loop/{'move' if name == 'add' else name}/float32")
        ours = profile.seconds(f"vector/{name}") / profile.workers
        lines.append(f"  {name:34} {ours * 1e12:14.0f} {xla * 1e12 if xla else float('nan'):8.0f}")
    lines += ["", f"{'rows by indices, ns (all workers)':36} {'ours':>14} {'XLA':>8}"]
    each = 1e9 / profile.workers
    for what, widths in (("take/l2", (16, 256)), ("take/l3", (16, 256)), ("folded", (16, 256)), ("runs", (16, 256))):
        for width in widths:
            lines.append(f"  {f'{what}, {width} elements':34} {profile.seconds(f'{what}/{width}') * each:14.1f}")
    for what in ("gather", "scatter"):
        for width in (1, 64):
            seconds = profile.seconds(f"xla/{what}/{width}") * 1e9
            lines.append(f"  {f'{what}, {width} elements':34} {'':14} {seconds:8.1f}")
    lines += ["", "memory, GB/s of all workers, read and written"]
    for level in ("l1", "l2", "l3", "dram"):
        lines.append(f"  {level:34} {2e-9 * profile.workers / profile.seconds(f'copy/{level}'):14.0f}")
    lines.append(f"  {'fresh pages':34} {1e-9 * profile.workers / profile.seconds('touch'):14.1f}")
    alone, together = profile.seconds("call/short"), profile.seconds("call")
    lines += ["", f"a call: {together * 1e6:.1f} us with all workers, {alone * 1e6:.1f} us alone"]
    return "\n".join(lines) + "\n"


def _agreement(profile: MachineProfile) -> list[str]:
    if not profile.passes:
        return []
    doubtful = f"; another one in each of them: {', '.join(dict(profile.doubtful))}" if profile.doubtful else ", all numbers agree"
    return [f"measured in {profile.passes} passes{doubtful}"]
