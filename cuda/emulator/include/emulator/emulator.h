// Launching emulated kernels from C++: what the driver shim and the emulator's own tests use.
//
// Comes in: a launch, the body that every thread runs, a seed. Goes out: a Result: what the hardware would have computed, or the
// first error as a sentence. Invariant: the same seed gives the same schedule; one launch at a time in a process.
#pragma once

#include <functional>
#include <string>

#include "kitsune/arch/types.h"

namespace kitsune::emulator {

using namespace arch;

struct Launch {
  u32 grid = 1, block = 128, cluster = 1, shared_bytes = 0;
  bool cooperative = false;  // all CTAs are resident together; otherwise the seed decides how many clusters run at a time
  u32 registers = 0;         // of a thread, as the kernel was compiled; 0: kLaunchRegisters of the block
};

struct Options {
  u64 seed = 1;
  u32 stack_bytes = 128 << 10;
  size_t clock_bytes = size_t{64} << 20;  // with more threads than this memory has vector clocks for, a warp's lanes share one
};

struct Result {
  bool ok = true;
  std::string message;
  u64 steps = 0;     // scheduling decisions
  u64 copies = 0;    // pieces of asynchronous copies
  double flops = 0;  // of matrix instructions
  double seconds = 0;
  u32 delay_mode = 0;       // which distribution of delays the seed chose
  bool lane_clocks = true;  // races between lanes of a warp were looked for
};

Result run(const Launch& launch, const std::function<void()>& body, const Options& options = {});

// Global memory that kernels may touch, until clear_globals. Names are for messages.
void register_global(const void* p, size_t bytes, const char* name);
void clear_globals();

// Counts of the next launches. `l1`: bytes that L1 and shared memory have together; what remains of them beside the CTA's shared
// memory, rounded up to what the hardware can set aside, is the L1.
struct CountOptions {
  size_t l1 = size_t{256} << 10, l2 = size_t{50} << 20;
};
void start_counting(const CountOptions& options = {});
std::string stop_counting();  // a JSON list of what each launch has done since, failed ones too

enum class TileType : u32 { b16, f32 };  // reductions need to know how to add: f32 only
// A 2-D tensor for tma_*: `width` elements of the inner dimension, `height` rows `pitch` bytes apart, boxes of box_width x
// box_height. swizzle128: the inner box is 128 bytes wide and lies in shared memory with the 128-byte swizzle.
TensorMap make_tensor_map(void* base, TileType type, u64 width, u64 height, u64 pitch, u32 box_width, u32 box_height,
                          bool swizzle128);

}  // namespace kitsune::emulator
