"""From a jaxpr to a Graph (``jaxpr``), and the rewrites of a Graph (``rewrites``).

Invariant: nothing outside of this folder and ``gradient`` knows the equations of JAX.
"""
