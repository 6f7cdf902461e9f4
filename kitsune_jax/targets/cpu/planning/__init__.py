"""Planning for CPUs: machine models made of profiles, the time of a tile and of XLA's kernels, and the plan of a region."""
