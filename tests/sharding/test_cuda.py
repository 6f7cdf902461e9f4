"""Sharded functions for GPUs, as far as they go without one: the call in the module, and the program of one shard."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.frontend import lowering
from kitsune_jax.sharding import calls
from kitsune_jax.targets.cuda import nvrtc
from tests.sharding.test_programs import mesh
from tests.support.sharded_programs import PROGRAMS

pytestmark = [
    pytest.mark.filterwarnings("error:kitsune_jax"),
    pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.why_not() or ""),
]


def _config(text: str) -> str:
    """The configuration of the only call in a module."""
    (line,) = (line for line in text.splitlines() if '@"kitsune_region (import kitsune_jax)"' in line)
    escaped = line.split('backend_config = "', 1)[1].split('", ', 1)[0].split('"}', 1)[0]
    return escaped.replace("\\22", '"').replace("\\5C", "\\").replace("\\0A", "\n")


@pytest.mark.parametrize("name", ["tensor parallel", "gradient of data parallel"])
def test_a_shard_becomes_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_CUDA_ARCH", "sm_90a")
    program = PROGRAMS[name]
    on = mesh()
    args = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(program.args, program.specs, strict=True)]
    traced = jax.jit(kj.pipeline(program.function, force=True)).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "sdy.sharding_rule" in text
    found: dict[str, Any] = json.loads(_config(text))
    assert (found["around"]["platform"], found["around"]["target"]) == ("cuda", "cuda")
    graph = calls.graph_from_json(found["graph"])
    operands = [NamedSharding(on, P()) for _ in graph.inputs]
    operands[0] = NamedSharding(on, P("data"))
    partitioner = calls._Partitioner(lowering.pipelined_shard)
    given = [s._to_xla_hlo_sharding(len(graph.values[v].shape)) for v, s in zip(graph.inputs, operands, strict=True)]
    mesh_axes, specs = _compat.common_mesh(given)
    shapes = [_compat.xla_client.Shape.array_shape(np.dtype(graph.values[v].dtype), graph.values[v].shape) for v in graph.inputs]
    result = _compat.xla_client.Shape.tuple_shape(
        [_compat.xla_client.Shape.array_shape(np.dtype(graph.values[v].dtype), graph.values[v].shape) for v in graph.outputs]
    )
    options = kj.config.Options(**found["options"])
    divided = specs, [], [None] * len(graph.outputs)
    module, _, _ = partitioner._module(graph, mesh_axes, divided, shapes, result, found, options)
    assert b"kitsune_cuda" in module
