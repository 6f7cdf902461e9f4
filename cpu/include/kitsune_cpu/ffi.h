// The XLA custom call `kitsune_cpu`: handlers for the instantiate and execute stages, and a count of executed calls.
#pragma once

#include <cstdint>

namespace kitsune::cpu {

// XLA_FFI_Handler* of each stage, as opaque pointers so that only ffi.cc sees XLA's headers.
void* instantiate_handler();
void* execute_handler();
int64_t executed_calls();

}  // namespace kitsune::cpu
