"""Planning for GPUs: machine models, costs of a stage, arrangements, and the plans of a region, fastest first."""
