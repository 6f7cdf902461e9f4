"""From a jaxpr to a Graph.

Comes in: a closed jaxpr. Goes out: ``graph.Graph``, whose ops are the kinds of one table (``ops.table.OPS``) or ``"opaque"``, and
beside it what JAX needs to evaluate them as they stood (``captured``). Invariant: nothing downstream of this folder knows JAX's
equations.

``jaxpr`` walks and inlines; ``translate`` says one ``equation`` in the table's terms, by the rules of ``primitives`` (``dots``,
``indexing``); ``builder`` collects the ops; ``rewrites`` of the whole follow; ``reference`` evaluates a Graph with NumPy.
"""
