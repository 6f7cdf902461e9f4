"""The parts of planning that all targets share: streams, costs of ops, stages and load balance, the Plan as data."""
