// The caches of the device, simulated: which bytes come from L1, from L2 and from memory.
//
// Comes in: sectors of 32 bytes that a warp, a copy or a counter touches, in the order in which the emulator runs them. Goes out:
// bytes by level and buffer. Model: an L1 for each CTA (a CTA has its SM to itself) and one L2, both fully associative with strict
// LRU replacement over lines of 128 bytes with four sectors; a miss brings in one sector. L1 is written through and a store does
// not allocate there; an acquire at gpu scope empties it (CCTL.IVALL). L2 is written back: a sector goes to memory when its line is
// evicted, or at the end of the launch. Both are empty when the launch starts. Invariant: a buffer begins at a line, as a device's
// allocator would place it, wherever the host put it.
#pragma once

#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "kitsune/arch/types.h"

namespace kitsune::emulator {

using namespace arch;

constexpr u32 kSector = 32, kLine = 128;

// Bytes of one buffer by level, in whole sectors. `wanted`: asked of L1 by loads that may be served there.
struct Traffic {
  std::string name;
  size_t bytes = 0;
  u64 wanted = 0, l2_read = 0, l2_written = 0, memory_read = 0, memory_written = 0;
};

// Keys of sectors are (buffer << 40 | offset) / kSector.
class Cache {
 public:
  explicit Cache(size_t bytes) : lines_(bytes / kLine) {}
  bool read(u64 sector);  // whether the sector was there; it is from now on, unless there is no line at all
  // Marks the sector as present and to be written back.
  void write(u64 sector);
  void clear();
  // Sectors that were written back since the last call, by key.
  std::vector<u64> written_back() { return std::move(written_back_); }

 private:
  struct Line {
    u64 key;
    u8 present = 0, dirty = 0;
  };
  Line* find(u64 line);
  void evict(const Line& line);
  size_t lines_;
  std::list<Line> order_;  // the latest first
  std::unordered_map<u64, std::list<Line>::iterator> at_;
  std::vector<u64> written_back_;
};

class Memory {
 public:
  Memory(size_t l1_bytes, size_t l2_bytes, u32 ctas);
  u32 add_buffer(const std::string& name, size_t bytes);
  // Sectors that hold `bytes` from `offset` of a buffer on.
  void load(u32 cta, u32 buffer, u64 offset, u64 bytes, bool through_l1);
  void prefetch(u32 buffer, u64 offset, u64 bytes);  // from memory to L2, no further
  void store(u32 buffer, u64 offset, u64 bytes);
  void acquire(u32 cta) { l1_[cta].clear(); }
  const std::vector<Traffic>& finish();  // writes back what is left

 private:
  void write_back();
  size_t l1_bytes_;
  std::vector<Cache> l1_;
  Cache l2_;
  std::vector<Traffic> traffic_;
};

}  // namespace kitsune::emulator
