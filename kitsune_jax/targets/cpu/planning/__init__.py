"""Planning for CPUs: machine models made of profiles, the times of tiles and of XLA's kernels, and the plan of a region."""
