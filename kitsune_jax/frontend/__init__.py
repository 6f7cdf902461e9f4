"""The public API, tracing, lowering, and the report of ``kj.explain``."""
