"""The tile program (``ir``), its builder, its checker (``verify``), passes over it (``passes``), and its NumPy interpreter."""
