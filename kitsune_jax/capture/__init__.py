"""From a jaxpr to a Graph.

Comes in: a closed jaxpr. Goes out: ``graph.Graph``, whose ops are the kinds of one table (``ops.OPS``) or ``"opaque"``, and for
every op a step that evaluates it with JAX as it stood. Invariant: nothing downstream of this folder knows JAX's equations.

``jaxpr`` walks and inlines; ``canonical`` names one equation in the table's terms by ``rules``; ``ops`` is the table, ``ops_*`` its
entries; ``relations`` says how dimensions travel through an op; ``reference`` evaluates a Graph with NumPy.
"""
