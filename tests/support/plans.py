"""Plans and costs on any machine, of the target whose machine it is."""

from __future__ import annotations

from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.cost import RegionCost
from kitsune_jax.planning.plan import Machine, Plan
from kitsune_jax.planning.streams import Region
from kitsune_jax.targets.cpu.planning import planner as cpu
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import CpuMachine
from kitsune_jax.targets.cuda.planning import planner as cuda
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.machines import GpuMachine


def plan(graph: Graph, region: Region, machine: Machine) -> Plan:
    if isinstance(machine, CpuMachine):
        return cpu.plan(graph, region, machine)
    assert isinstance(machine, GpuMachine)
    return cuda.plan(graph, region, machine)


def cost_of(graph: Graph, region: Region, machine: Machine) -> RegionCost:
    if isinstance(machine, CpuMachine):
        return CpuCost(graph, region, machine)
    assert isinstance(machine, GpuMachine)
    return GpuCost(graph, region, machine)
