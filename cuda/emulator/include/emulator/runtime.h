// What arch.h calls: the emulator's runtime, one plain function for each thing a CUDA thread can do that others may notice.
//
// Comes in: calls of fibers, with host pointers into the emulated shared memory or the registered global buffers. Goes out: the
// effect that the hardware would have, or an error that ends the launch. Invariant: no template and no state but `current`, so
// kernels compile fast and link against one shared library.
#pragma once

#include <stddef.h>

#include "kitsune/arch/types.h"

namespace kitsune::emulator {

using namespace arch;

// What a thread knows of itself: the head of the scheduler's record, so that asking costs one load.
struct Identity {
  u32 thread, lane, block, rank;
};
struct Dimensions {
  u32 grid, block, cluster;
};
extern Identity* current;
extern Dimensions dimensions;

// Where in the kernel's source an access stands. Counters tell accesses apart by it; a default argument names the caller.
struct Site {
  const char* file;
  u32 line;
};
inline constexpr Site site(const char* file = __builtin_FILE(), u32 line = __builtin_LINE()) { return {file, line}; }

u64 ticks();  // scheduling decisions so far: it grows as a clock does, and says nothing about time
// The simulated device's clock: a tick is a nanosecond, and it was the host's steady clock when the launch began, or the end of the
// launch before if that is later.
u64 nanoseconds();
void* shared_base(size_t bytes);
u32 shared_offset(const void* p);
void name_object(const void* p, const char* text);
void enter_section(u32 stage, u32 role);
void finish_section();

// --- memory. Checks and records the access; arch.h then moves the bytes.
void load_shared(const void* p, u32 bytes, const Site& at);
void store_shared(void* p, u32 bytes, const Site& at);
void* remote_load(const void* p, u32 rank, u32 bytes, const Site& at);
void* remote_store(void* p, u32 rank, u32 bytes, const Site& at);
void load_constant(const void* p, u32 bytes, const Site& at);
void load_ordinary(const void* p, u32 bytes, const Site& at);
void load_global(const void* p, u32 bytes, const Site& at);
void store_global(void* p, u32 bytes, const Site& at);
void add_global(void* p, u32 bytes, const Site& at);  // atomically: relaxed, at gpu scope
void store_async(void* p, u32 rank, const void* v, u32 bytes, Mbar& bar, const Site& at);

// --- synchronisation through global memory
void flag_add(u32* p, u32 v);
u32 flag_fetch_add(u32* p, u32 v);
u32 flag_load(const u32* p);
void flag_wait(const u32* p, u32 v);
void fence_wide(const char* name);  // fence.acq_rel at cluster or gpu scope

// --- mbarriers
void barrier_init(Mbar& bar, u32 arrivals);
void barrier_init_fence();
void barrier_arrive(Mbar& bar, u32 expect_bytes);
void fence_release_own_shared();
void barrier_arrive_remote(Mbar& bar, u32 rank);  // relaxed: publishes what the latest fence_release_own_shared held
void barrier_wait(Mbar& bar, u32 parity, bool cluster);

// --- asynchronous copies
void copy_load(void* dst, const void* src, u32 bytes, Mbar& bar, u32 mask);  // mask 0: own CTA
void copy_push(void* dst, u32 rank, const void* src, u32 bytes, Mbar& bar);
void copy_store(void* dst, const void* src, u32 bytes, bool add);
void copy_prefetch(const void* src, u32 bytes);
void tile_load(const TensorMap& map, Mbar& bar, void* dst, i32 x, i32 y, u32 mask);
void tile_store(const TensorMap& map, const void* src, i32 x, i32 y, bool add);
void bulk_group_commit();
void bulk_group_wait(u32 pending, bool read_only);
void proxy_fence(bool global);
void thread_copy(void* dst, const void* src, u32 bytes, const Site& at);
void thread_copy_commit();
void thread_copy_wait(u32 pending);
void thread_copy_arrive(Mbar& bar);

// --- matrices
enum class Operand : u32 { bf16, f16, tf32 };
struct WgmmaCall {
  u32 n;
  Operand type;
  bool trans_a, trans_b, accumulate;
  const u32* a;  // four registers, or null: desc_a
  u64 desc_a, desc_b;
};
void wgmma(float* d, const WgmmaCall& call);
void wgmma_register_fence();
void wgmma_group_commit();
void wgmma_group_wait(u32 pending);
void warp_mma(Operand type, float* c, const u32* a, const u32* b);
void matrix_load(u32* r, const void* row, bool transpose, const Site& at);
void matrix_store(void* row, const u32* r, const Site& at);

// --- warps and barriers
u32 shuffle(u32 value, u32 source_lane);
void warp_sync();
void named_barrier(u32 id, u32 threads, bool wait);
void block_barrier();
void cluster_barrier_arrive();
void cluster_barrier_wait();
void set_registers(u32 count, bool increase);

}  // namespace kitsune::emulator
