"""The applications over graphs and tables: whose inputs are several arrays, indices among them.

``apps.py``: the networks of ``examples/`` and their inputs, at the sizes of the papers. ``libraries.py``: graph networks of
libraries. ``measure.py``: one case, measured."""
