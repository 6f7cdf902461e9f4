"""NumPy references for tests: interpreters of Graphs and of tile programs, and the checker of tile programs."""
