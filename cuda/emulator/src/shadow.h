// Shadow memory: for each 16 bytes who wrote and who read since, what is initialised, what is in flight.
//
// Comes in: accesses with the clock of their agent. Goes out: an error for a pair that nothing orders, for reads of what was never
// written, for accesses to what an asynchronous operation still uses. Invariant: pages appear when first touched and live in the
// launch's arena; a byte's last write and all reads since are known exactly.
#pragma once

#include <cstddef>
#include <string>

#include "kitsune/arch/types.h"

namespace kitsune::emulator {

using namespace arch;
struct Thread;

enum AccessFlags : u16 { kGeneric = 1, kAsync = 2, kReduce = 4, kOwnShared = 8 };

struct Access {
  u32 agent, clock;
  u16 mask, flags;  // bytes of the granule
  u32 time;
};

// A short list with four entries in place; more go to the arena.
struct AccessList {
  Access few[4];
  Access* many = nullptr;
  u32 count = 0, capacity = 4;
  Access* begin() { return many ? many : few; }
  Access* end() { return begin() + count; }
  void add(const Access& access);
  void remove_bytes(u16 mask);
};

struct Granule {
  AccessList writes, reads;
  u16 initialised, written, constant;  // written during the launch; read by ld_global
  u16 writing[2], adding[2], reading;  // asynchronous operations in flight; writes by halves, the size of the smallest st.async
};

struct Region {
  char* begin = nullptr;
  size_t bytes = 0;
  Granule** pages = nullptr;
  size_t page_count = 0;
  void* cta = nullptr;  // shared memory of this CTA, or null
  std::string name;     // of a buffer
  Granule& granule(size_t offset) {
    Granule* page = pages[offset >> 12];
    return (page ? page : new_page(offset >> 12))[offset >> 4 & 255];
  }
  Granule* new_page(size_t index);
};

// Who accesses: `known` is the clock that must cover earlier accesses, (agent, clock) is what later ones must know.
struct Actor {
  const u32* known;
  u32 agent, clock;
  u16 flags;
  Thread* thread;  // whose knowledge of scopes and proxy fences counts
  const char* what;
};

void region_init(Region& region, char* begin, size_t bytes);
void check_read(Region& region, size_t offset, size_t bytes, const Actor& actor);
void check_write(Region& region, size_t offset, size_t bytes, const Actor& actor);
// In-flight marks: what an asynchronous operation uses until it is waited for.
void mark_writing(Region& region, size_t offset, size_t bytes, int by, bool add);
void mark_reading(Region& region, size_t offset, size_t bytes, int by);
void mark_written(Region& region, size_t offset, size_t bytes);
void check_constant_read(Region& region, size_t offset, size_t bytes);
std::string describe(const Region& region, size_t offset);

// Memory of one launch.
void* arena_allocate(size_t bytes);  // zeroed
void arena_reset();

}  // namespace kitsune::emulator
