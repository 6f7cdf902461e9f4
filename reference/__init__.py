"""References for tests: interpreters of Graphs and of tile programs, the checker of tile programs, and Graphs as text."""
