"""``python -m kitsune_jax``: the subcommands, their options and exit statuses.

Comes in: the command line. Goes out: text or JSON on stdout; messages on stderr. Exit statuses: 0; 1 where ``doctor`` finds
something broken or ``machine`` can keep no profile; 2 for wrong use, such as a file, function or argument that does not do; 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kitsune_jax as kj
from kitsune_jax import config, progress
from kitsune_jax.cli import bench, bugreport, doctor, folder, functions, machine, output
from kitsune_jax.cli.functions import UsageError
from kitsune_jax.errors import KitsuneWarning
from kitsune_jax.report.data import plural

_PROGRAM = "python -m kitsune_jax"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.run is not _doctor:  # which shows them among other problems
            _check_variables()
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"{_PROGRAM} {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.end_at_once()
        print(f"{_PROGRAM} {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # such as in "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Look at an installation of kitsune_jax, and at what functions become."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, what: str, epilog: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=what, description=what, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.set_defaults(run=run)
        return made

    def function_command(name: str, run: Any, what: str) -> argparse.ArgumentParser:
        made = command(name, run, what, functions.ARGUMENTS)
        made.add_argument("function", metavar="FILE:FUNCTION", help="such as model.py:step")
        made.add_argument("--args", metavar="EXPR", help="the arguments of the call, such as '(params, jnp.ones((4096, 64)))'")
        return made

    command("doctor", _doctor, "versions, targets, caches, machine profile and GPU, and what to do about problems").add_argument(
        "--json", action="store_true", help="print the facts as JSON"
    )
    explain = function_command("explain", _explain, "what is pipelined of a function, and why the rest is not; runs nothing")
    explain.add_argument("--platform", choices=("cpu", "cuda"), help="default: JAX's default backend")
    explain.add_argument("--device", help="plan for this machine, such as h200 or zen5-8")
    explain.add_argument("--verbose", action="store_true", help="every operator that is left to XLA")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")
    timed = function_command("bench", _bench, "a function with jax.jit beside the same with pipelines, calls in turn")
    timed.add_argument("--seconds", type=_seconds, default=3.0, help="how long calls are timed (default: %(default)g)")
    timed.add_argument("--json", action="store_true", help="print the times, in seconds, as JSON")
    cache = command("cache", _cache, "the folder on disk: its size by kind; clear removes its files")
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    cache.add_argument("--yes", action="store_true", help="clear without a question")
    cache.add_argument("--json", action="store_true", help="print the sizes, in bytes, as JSON")
    report = function_command("report", _report, "one file for a report of a bug, without numbers of arrays and without folders")
    report.add_argument("--output", metavar="FILE", required=True, help="where to write it; - for stdout")
    machine.add_arguments(command("machine", machine.run, "measure this machine for CPU plans, keep the profile and print it"))
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0 and 3600")
    return seconds


def _check_variables() -> None:
    """Raise ``UsageError`` for variables with values that mean nothing, and warn of unknown ones, as the import of the package."""
    wrong = config.wrong_values()
    if wrong:
        raise UsageError("; ".join(wrong.values()))
    with warnings.catch_warnings(record=True) as unknown:
        warnings.simplefilter("always")
        config.check_environment()
    for warning in unknown:
        print(f"{_PROGRAM}: {warning.message}", file=sys.stderr)
    config.apply_log_level()


def _doctor(args: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KitsuneWarning)  # each is among the problems
        found = doctor.facts()
    if args.json:
        output.show_json(found)
    else:
        output.show_tables(doctor.tables(found))
    return int(any(problem["broken"] for problem in found["problems"]))


def _explain(args: argparse.Namespace) -> int:
    example = functions.load(args.function, args.args)
    options = {"platform": args.platform, "device": args.device}
    with functions.users_errors(example.path, f"{example.name} cannot be explained"):
        report = kj.explain(example.function, **options)(*example.args)
    if args.json:
        output.show_json(report.to_dict())
    else:
        output.show_text(report.text(verbose=args.verbose))
    return 0


def _bench(args: argparse.Namespace) -> int:
    example = functions.load(args.function, args.args)
    result = bench.measure(example, args.seconds)
    if args.json:
        output.show_json({"function": example.name, **result.to_dict()})
    else:
        output.show_tables(result.tables(example.name))
    return 0


def _cache(args: argparse.Namespace) -> int:
    found = folder.sizes()
    if args.action == "clear":
        if not args.yes and not _agrees(f"remove the files of {found['folder']}?"):
            raise UsageError("nothing was removed: answer y, or give --yes")
        removed = folder.clear()
        found = {**folder.sizes(), "removed": removed}
    if args.json:
        output.show_json(found)
    else:
        output.show_tables(folder.tables(found))
        if "removed" in found:
            print(f"\nremoved: {plural(found['removed'], 'file')}")
    return 0


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _report(args: argparse.Namespace) -> int:
    written = bugreport.text(functions.load(args.function, args.args))
    if args.output == "-":
        print(written)
        return 0
    try:
        Path(args.output).write_text(written, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{args.output} cannot be written: {error.strerror}") from error
    print(f"{args.output} is written: read it, and attach it to your report")
    return 0
