"""Settings of every test: the CPU backend with 8 forced devices, no switch inherited from the shell, each warning told again."""

from __future__ import annotations

import os

# Before JAX is imported. Programs on one device are unaffected; the tests of shard_map need several.
os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# Plans are the same on every machine that runs the tests.
os.environ["KITSUNE_PROFILE"] = "zen5-2"
os.environ["KITSUNE_TUNE"] = "off"

import collections
import gc
from collections.abc import Iterator

import jax
import pytest

from kitsune_jax.errors import fallbacks, forget
from kitsune_jax.frontend import api, lowering
from kitsune_jax.frontend import route as route_module
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import Plan
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import target as cuda_target
from reference.check import verify
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]  # a fixture

# A process of tests holds millions of objects of traces and programs, and looking through them took 6 % of its time.
gc.freeze()
gc.set_threshold(20_000, 20, 20)


# No test of this process keeps executables on disk, and their keys took 1.4 % of its time; processes of tests have JAX's default.
jax.config.update("jax_enable_compilation_cache", False)


# They take longest, and many of them have few tests: the last file to begin keeps one process busy while the others wait.
HEAVY = (
    "device/test_gpu_check", "lowering/test_lowering_cost", "cuda/test_sass", "cuda/test_training",
    "integration/test_graph_libraries", "user/test_sequence_examples", "user/test_benchmarks_graphs", "cuda/test_devices",
    "capture/test_standalone", "transforms/test_jax_support", "cuda/test_attention_gradients", "cuda/test_cluster_gradients",
    "user/test_training_examples", "user/test_benchmarks_training", "user/test_application_examples", "cuda/test_descriptors",
    "user/test_device_examples", "user/test_types", "user/test_site", "user/test_notebooks",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places: Places = collections.defaultdict(dict)
    for item in items:
        if (mark := item.get_closest_marker("sampled")) and not _in_sample(item, places, *mark.args, **mark.kwargs):
            item.add_marker(pytest.mark.slow)
    turn = {name: place for place, name in enumerate(HEAVY if hasattr(config, "workerinput") else ())}
    items.sort(key=lambda item: turn.get(item.nodeid.removeprefix("tests/").partition(".py")[0], len(turn)))


Places = dict[tuple[str, tuple[str, ...]], dict[tuple[int, ...], int]]  # test, names of an axis -> its values, by identity -> place


def _in_sample(item: pytest.Item, places: Places, share: int, **also: object) -> bool:
    """``share``, ``also``: as pyproject.toml tells of the mark. The places of a case's values on their axes add up to a multiple of
    ``share``: so every value meets some of each other axis, and all where a third axis has at least ``share``."""
    params = item.callspec.params  # type: ignore[attr-defined]
    axes = [m.args[0] for m in item.iter_markers("parametrize")]
    names = [tuple(a.replace(",", " ").split()) if isinstance(a, str) else tuple(a) for a in axes]
    names += [(name,) for name in params if not any(name in axis for axis in names)]  # of fixtures
    sum_of_places = 0
    for axis in names:
        known = places[item.nodeid.partition("[")[0], axis]
        sum_of_places += known.setdefault(tuple(id(params[name]) for name in axis), len(known))
    return sum_of_places % share == 0 or any(params[name] == value for name, value in also.items())


@pytest.fixture(autouse=True)
def _no_inherited_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KITSUNE_DISABLE", "KITSUNE_FORCE", "KITSUNE_STRICT", "KITSUNE_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _warnings_are_told_again() -> None:
    lowering.warn_sharded.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_falls_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """A part that lowers as plain HLO because of a bug of ours still gives the right numbers: only this fails such a test."""
    forget()
    yield
    told = fallbacks()
    forget()
    if told and request.node.get_closest_marker("expects_fallbacks") is None:
        pytest.fail("\n".join(f"{f.part} of {f.function} fell back to plain HLO:\n{f.traceback or f.reason}" for f in told))


@pytest.fixture(autouse=True)
def _explained_is_what_was_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """``kj.explain`` of a function plans its gradient too, under every policy of residuals, and that takes longer than the rest,
    a sixth of the time of the room ``lowering``. Only tests of reports and policies read what it finds."""
    if request.path.parent.name != "user" and request.path.stem not in ("test_residuals", "test_preview"):
        monkeypatch.setattr(api, "compare_gradients", lambda *args: None)


@pytest.fixture(params=[True, False], ids=["forced", "modelled"])
def force(request: pytest.FixtureRequest) -> bool:
    """Both ways: every legal region is pipelined, or only those that the cost model expects to gain."""
    return bool(request.param)


@pytest.fixture(autouse=True, scope="session")
def every_program_is_verified() -> Iterator[None]:
    """Whatever test makes a plan on the way: its tile program must be well-formed, and let every tile through its queues."""
    made = route_module.build

    def checked(graph: Graph, region: Region, plan: Plan) -> TileProgram:
        program = made(graph, region, plan)
        try:
            verify(program)
        except ValueError as wrong:
            pytest.fail(f"{wrong}\n{program}")  # no Exception: the lowering would fall back to plain HLO
        return program

    with pytest.MonkeyPatch.context() as patch:
        for module in (route_module, cuda_target):
            patch.setattr(module, "build", checked)
        yield
