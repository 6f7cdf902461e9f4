"""Legal and profitable subgraphs, and the reasons for every "no"."""

from kitsune_jax.regions.calls import Chosen, Phase, joined
from kitsune_jax.regions.convex import anchored
from kitsune_jax.regions.order import quotient_order
from kitsune_jax.regions.select import Selection, select

__all__ = ["Chosen", "Phase", "Selection", "anchored", "joined", "quotient_order", "select"]
