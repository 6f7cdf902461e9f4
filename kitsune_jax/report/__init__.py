"""The report of ``kj.explain``: what was decided about a function, for people to read.

In: a Graph, the planned regions and the rejected ops (``build_report``). Out: a ``Report``, frozen data that prints as text, as
HTML in a notebook and as a dictionary. Nothing here decides anything.
"""
