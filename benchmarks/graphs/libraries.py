"""Graph networks of libraries, as their users write them and unchanged: jraph's models, and message passing in flax, equinox
and haiku.

Comes in: a number of edges. Goes out: as of every ``GraphApp``, a function, its parameters and its inputs. The inputs are a
batch of random graphs, as jraph makes one graph of several: their numbers of nodes and edges are an input, too. A library is
imported when one of its models is made; ``NEEDS`` says which."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.graphs.apps import GraphApp, Made, Rng, normal, random_key, squared_error

WIDTH, GRAPHS = 64, 3


def random_graphs(rows: int, rng: Rng) -> dict[str, Any]:
    """The fields of a ``jraph.GraphsTuple``: three graphs, a node for each four edges, features of 64."""
    n_edge = np.diff(np.sort(rng.integers(0, rows + 1, GRAPHS - 1)), prepend=0, append=rows)
    n_node = np.maximum(1, n_edge // 4)
    first = np.repeat(np.cumsum(n_node) - n_node, n_edge)
    senders, receivers = (first + rng.integers(0, np.repeat(n_node, n_edge)) for _ in range(2))
    features = {"nodes": normal(rng, n_node.sum(), WIDTH), "edges": normal(rng, rows, WIDTH), "globals": normal(rng, GRAPHS, WIDTH)}
    indices = {"senders": senders, "receivers": receivers, "n_node": n_node, "n_edge": n_edge}
    return features | {name: array.astype(np.int32) for name, array in indices.items()}


def _jraph_graph_network(rows: int, rng: Rng) -> Made:
    """Two full steps of ``jraph.GraphNetwork`` (Battaglia et al. 2018, arXiv:1806.01261) with haiku's perceptrons."""
    import haiku as hk
    import jraph

    @hk.without_apply_rng
    @hk.transform
    def network(graph: Any) -> Any:
        for _ in range(2):
            update = jraph.concatenated_args(lambda x: hk.nets.MLP([WIDTH, WIDTH])(x))
            graph = jraph.GraphNetwork(update, update, update)(graph)
        return graph.nodes

    return _of_tuple(jraph, network, rows, rng)


def _jraph_interaction_network(rows: int, rng: Rng) -> Made:
    """``jraph.InteractionNetwork`` (Battaglia et al. 2016, arXiv:1612.00222) in a module of flax.linen."""
    import flax.linen as nn
    import jraph

    class Perceptron(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.LayerNorm()(nn.Dense(WIDTH)(nn.relu(nn.Dense(WIDTH)(x))))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, graph: Any) -> Any:
            for _ in range(2):
                step = jraph.InteractionNetwork(
                    jraph.concatenated_args(Perceptron()),
                    jraph.concatenated_args(Perceptron()),
                    include_sent_messages_in_node_update=True,
                )
                graph = step(graph)
            return nn.Dense(1)(graph.nodes)

    return _of_tuple(jraph, Network(), rows, rng)


def _jraph_gat(rows: int, rng: Rng) -> Made:
    """Two layers of ``jraph.GAT`` with haiku's linear maps, as in jraph's own examples."""
    import haiku as hk
    import jraph

    def logits(query_sent: Any, query_received: Any, edges: Any) -> Any:
        del edges
        return jax.nn.leaky_relu(hk.Linear(1)(jnp.concatenate([query_sent, query_received], axis=-1)))

    @hk.without_apply_rng
    @hk.transform
    def network(graph: Any) -> Any:
        graph = jraph.GAT(lambda n: hk.Linear(WIDTH)(n), logits, lambda n: jax.nn.elu(n))(graph._replace(edges=None))
        return jraph.GAT(lambda n: hk.Linear(WIDTH)(n), logits, hk.Linear(8))(graph).nodes

    return _of_tuple(jraph, network, rows, rng)


def _jraph_graph_convolution(rows: int, rng: Rng) -> Made:
    """Two layers of ``jraph.GraphConvolution`` (Kipf and Welling 2016, arXiv:1609.02907) with self-edges and normalisation."""
    import haiku as hk
    import jraph

    @hk.without_apply_rng
    @hk.transform
    def network(graph: Any) -> Any:
        graph = jraph.GraphConvolution(lambda n: jax.nn.relu(hk.Linear(WIDTH)(n)), add_self_edges=True)(graph)
        return jraph.GraphConvolution(hk.Linear(8), add_self_edges=True)(graph).nodes

    return _of_tuple(jraph, network, rows, rng)


def _haiku_message_passing(rows: int, rng: Rng) -> Made:
    """Three steps of residual message passing with haiku's perceptrons and layer normalisation, in the way of DeepMind's
    GraphCast."""
    import haiku as hk

    def update(*parts: Any) -> Any:
        x = hk.nets.MLP([WIDTH, WIDTH], activation=jax.nn.swish)(jnp.concatenate(parts, axis=-1))
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def network(nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
        for _ in range(3):
            messages = update(edges, nodes[senders], nodes[receivers])
            received = jax.ops.segment_sum(messages, receivers, num_segments=nodes.shape[0])
            nodes, edges = nodes + update(nodes, received), edges + messages
        return nodes

    inputs = _plain_inputs(rows, rng)
    transformed: Any = hk.without_apply_rng(hk.transform(network))
    return transformed.apply, transformed.init(random_key(rng), *inputs), inputs


def _nnx_message_passing(rows: int, rng: Rng) -> Made:
    """Two steps of message passing with a mean over the neighbours, modules of flax.nnx."""
    from flax import nnx

    class Step(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.message = nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)
            self.update = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

        def __call__(self, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
            messages = nnx.gelu(self.message(jnp.concatenate([nodes[senders], nodes[receivers], edges], axis=-1)))
            total = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
            count = jax.ops.segment_sum(jnp.ones_like(receivers, messages.dtype), receivers, nodes.shape[0])
            mean = total / jnp.maximum(count, 1)[:, None]
            return self.norm(nodes + self.update(jnp.concatenate([nodes, mean], axis=-1)))

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.second = Step(rngs), Step(rngs)

        def __call__(self, nodes: Any, *edges: Any) -> Any:
            return self.second(self.first(nodes, *edges), *edges)

    definition, state = nnx.split(Network(nnx.Rngs(0)))

    def network(state: Any, *inputs: Any) -> Any:
        return nnx.merge(definition, state)(*inputs)

    return network, state, _plain_inputs(rows, rng)


def _equinox_message_passing(rows: int, rng: Rng) -> Made:
    """Two steps of message passing with a maximum over the neighbours; modules of equinox for one edge or node, under
    ``jax.vmap``."""
    import equinox as eqx

    class Step(eqx.Module):
        message: Any
        update: Any

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.message = eqx.nn.MLP(3 * WIDTH, WIDTH, WIDTH, 1, key=first)
            self.update = eqx.nn.MLP(2 * WIDTH, WIDTH, WIDTH, 1, key=second)

        def __call__(self, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
            def message(sender: Any, receiver: Any, edge: Any) -> Any:
                return self.message(jnp.concatenate([nodes[sender], nodes[receiver], edge]))

            messages = jax.vmap(message)(senders, receivers, edges)
            largest = jax.ops.segment_max(messages, receivers, len(nodes))
            largest = jnp.where(jnp.isfinite(largest), largest, 0)
            return nodes + jax.vmap(lambda node, m: self.update(jnp.concatenate([node, m])))(nodes, largest)

    steps = [Step(key) for key in jax.random.split(random_key(rng), 2)]
    params, static = eqx.partition(steps, eqx.is_inexact_array)

    def network(params: Any, nodes: Any, *edges: Any) -> Any:
        for step in eqx.combine(params, static):
            nodes = step(nodes, *edges)
        return nodes

    return network, params, _plain_inputs(rows, rng)


def _plain_inputs(rows: int, rng: Rng) -> tuple[Any, ...]:
    graphs = random_graphs(rows, rng)
    return tuple(graphs[name] for name in ("nodes", "edges", "senders", "receivers"))


def _of_tuple(jraph: Any, network: Any, rows: int, rng: Rng) -> Made:
    """Of something with ``init`` and ``apply`` of a GraphsTuple."""
    graphs = random_graphs(rows, rng)
    params = network.init(random_key(rng), jraph.GraphsTuple(**graphs))
    return lambda params, fields: network.apply(params, jraph.GraphsTuple(**fields)), params, (graphs,)


_MODELS = {
    "jraph_graph_network": ("jraph.GraphNetwork of haiku", _jraph_graph_network, ("jraph", "haiku")),
    "jraph_interaction_network": ("jraph.InteractionNetwork of flax.linen", _jraph_interaction_network, ("jraph", "flax")),
    "jraph_gat": ("jraph.GAT", _jraph_gat, ("jraph", "haiku")),
    "jraph_graph_convolution": ("jraph.GraphConvolution", _jraph_graph_convolution, ("jraph", "haiku")),
    "haiku_message_passing": ("message passing in haiku", _haiku_message_passing, ("haiku",)),
    "nnx_message_passing": ("message passing in flax.nnx", _nnx_message_passing, ("flax",)),
    "equinox_message_passing": ("message passing in equinox", _equinox_message_passing, ("equinox",)),
}
NEEDS = {name: needs for name, (_, _, needs) in _MODELS.items()}
LIBRARY_APPS = {
    name: GraphApp(name, title, "edges", make, squared_error, (100_000,), (100_000,)) for name, (title, make, _) in _MODELS.items()
}
