"""Legal and profitable subgraphs, and the reasons for every "no"."""

from kitsune_jax.regions.form import anchored, quotient_order
from kitsune_jax.regions.select import Chosen, Selection, select

__all__ = ["Chosen", "Selection", "anchored", "quotient_order", "select"]
