"""The applications in PyTorch, as another library runs them on the same CPU.

``networks`` has them, ``worker`` is the process that runs them, eager and compiled, and ``client`` starts it and makes columns of
it. PyTorch runs in a process of its own: its threads and JAX's would disturb each other in one, and the interpreter that has
PyTorch need not be the one that has JAX.
"""
