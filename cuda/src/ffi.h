// The XLA custom call `kitsune_cuda`: handlers by stage for platform "CUDA" and, through the emulator, for platform "cpu".
#pragma once

#include <cstdint>

namespace kitsune::cuda {

// XLA_FFI_Handler* of each stage, as opaque pointers so that only ffi.cc sees XLA's headers; null for a stage that is not handled.
struct Handlers {
  void* instantiate;
  void* prepare;
  void* initialize;
  void* execute;
};

Handlers device_handlers();
Handlers emulator_handlers();
int64_t executed_calls();

}  // namespace kitsune::cuda
