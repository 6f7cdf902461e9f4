// nanobind itself: its sources in one, compiled into the extension. Not named .cc: the C++ tests have no Python.
#include "nb_combined.cpp"
