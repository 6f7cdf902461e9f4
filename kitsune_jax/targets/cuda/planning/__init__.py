"""Planning for GPUs: machine models, what a CTA keeps where, how long a tile takes, and the plans of a region, fastest first."""
