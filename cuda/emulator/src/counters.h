// What a profiler would count: accesses by warp, bank conflicts, bytes by level, copies, fences, waits, matrix instructions.
//
// Comes in: hooks in the runtime's functions, each behind `counters::on`, which is false unless somebody asked for counts of the
// next launch. Goes out: a JSON text for each launch (counters_report.cc). Invariant: counting changes nothing that a kernel or
// the schedule can see.
//
// A device executes an access for a warp at a time, the emulator for a thread. So accesses are grouped: the k-th access of a lane
// at a place of the source (file, line, width) to a buffer belongs with the k-th of the other lanes there. k counts from the latest
// instruction that all lanes of a warp execute together: shuffles, syncwarp, mma, ldmatrix, wgmma's fence, commit and wait, and
// barriers over warps. Where lanes skip an access that others make, they are one ahead until the next such instruction: bytes of
// buffers are exact, and requests may be cut differently from the device's.
#pragma once

#include <string>

#include "caches.h"
#include "emulator/emulator.h"
#include "emulator/runtime.h"

namespace kitsune::emulator {

struct Thread;

namespace counters {

enum class Op : u8 {
  ld_global,
  ld_l2,
  st_global,
  red_add,
  cp_async,
  ld_shared,
  st_shared,
  ld_cluster,
  st_cluster,
  st_async,
  ldmatrix,
  stmatrix
};

extern bool on;

void begin(const Launch& launch, u64 seed, const CountOptions& options);
void end(bool ok);  // writes the report

void access(Op op, const void* p, u32 bytes, const Site& site);
void rows(Op op, const char* const* rows, const Site& site);  // of ldmatrix and stmatrix: 32 rows of 16 bytes
void together();                                              // the warp executes an instruction as one
void exits(Thread& thread);
void section(u32 stage, u32 role);
void finishing();

// Something that the lanes of a warp do, each on its own: it counts once. `amount`: of a warp it is the largest of any lane.
void warp_event(const char* name, u64 amount = 0);
// Something that a thread does, perhaps for many.
void event(const std::string& name, u64 amount = 0);
// Bulk copies of a thread. A multicast is read from L2 once.
void copy_in(const char* name, const void* from, u32 bytes, u32 destinations);
void prefetch(const char* name, const void* from, u32 bytes);
void copy_out(const char* name, const void* to, u32 bytes);
// Atomic accesses to a counter.
void flag(const char* name, const void* p, bool writes, bool acquires);
void acquire();  // at gpu scope: empties the SM's L1

}  // namespace counters

const CountOptions& counting_options();

}  // namespace kitsune::emulator
