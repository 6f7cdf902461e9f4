"""The report of ``kj.explain``: what was decided about a function, for people to read.

Comes in: a Graph, the planned regions and the rejected ops (``build_report``). Goes out: a ``Report``, frozen data that prints as
text, as HTML in a notebook and as a dictionary. Nothing here decides anything.
"""
