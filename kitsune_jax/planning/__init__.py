"""Planning, as far as targets share it: what ops cost, stages, load balance, the Plan as data. Each target has its own planner."""
