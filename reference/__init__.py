"""NumPy references for tests and ``trust``: interpreters of Graphs and tile programs, and the checker of tile programs."""
