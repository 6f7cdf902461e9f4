"""Planning: stages, queues, workers and tile size for a region, by a cost model. ``planner.plan`` is the way in."""
