// The XLA custom calls: `kitsune_cpu`, with handlers for the instantiate and execute stages and a count of executed calls, and
// `kitsune_cpu_order`, which gives the order of a stream (order.h).
#pragma once

#include <cstdint>

namespace kitsune::cpu {

// XLA_FFI_Handler* of each stage, as opaque pointers so that only ffi.cc sees XLA's headers.
void* instantiate_handler();
void* execute_handler();
void* order_handler();  // of the execute stage of kitsune_cpu_order
int64_t executed_calls();

}  // namespace kitsune::cpu
