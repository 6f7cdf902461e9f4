// Functions of one 16-bit number as tables: whatever a Vector program makes of such a number, there are 65 536 results of it.
#pragma once

#include "strip_nodes.h"

namespace kitsune::cpu {

// Puts tables in the place of operations that take longer: all that lies between a node whose numbers have 16 bits and a node that
// is computed of it and constants alone. A table holds the bits that the operations give where denormals are flushed, as in XLA's
// threads. `elements`: of the Vector in a call. Leaves `reached` and the counts of uses as they were.
void use_tables(StripNodes& nodes, const Vector& x, const Compile& c, int64_t elements);

}  // namespace kitsune::cpu
