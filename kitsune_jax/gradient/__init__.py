"""Rewrites of the linear jaxprs of a gradient: which values the forward pass stores, and sums that it has made already."""
