// What counters.cc collects and counters_report.cc writes: the state of a launch that counts.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "caches.h"
#include "counters.h"

namespace kitsune::emulator::counters {

struct Section {
  u32 stage = ~0u, role = ~0u;  // ~0: the kernel has not said so yet
  bool finish = false;          // after the last tile
  bool operator<(const Section& o) const { return std::tie(stage, role, finish) < std::tie(o.stage, o.role, o.finish); }
};

struct AccessKey {
  Section section;
  Op op;
  u32 width, buffer;  // ~0: shared memory
  std::string file;   // by its name: every image has texts of its own
  u32 line;
  bool operator<(const AccessKey& o) const {
    return std::tie(section, op, width, buffer, file, line) < std::tie(o.section, o.op, o.width, o.buffer, o.file, o.line);
  }
};
// Global accesses have sectors, shared ones wavefronts; `ideal`: wavefronts without a bank conflict.
struct Access {
  u64 requests = 0, threads = 0, bytes = 0, sectors = 0, wavefronts = 0, ideal = 0;
};
struct Event {
  u64 count = 0, threads = 0, amount = 0;
};

// An access or event of one warp, of which some lanes have come.
struct Group {
  Op op;
  const char* name;  // of an event, or null
  u32 width, lanes = 0, buffer = ~0u, cta;
  Site site;
  Section section;
  u64 order, amount = 0;
  u64 addresses[32];  // offsets in the buffer, or in the CTA's shared memory
};
struct GroupKey {
  u64 epoch;
  const void* place;  // file, or name of an event
  u32 what;           // line and width
  Op op;
  u32 buffer, occurrence;
  bool like(const GroupKey& o) const { return place == o.place && what == o.what && op == o.op && buffer == o.buffer; }
  bool operator==(const GroupKey& o) const { return like(o) && epoch == o.epoch && occurrence == o.occurrence; }
};
struct GroupHash {
  size_t operator()(const GroupKey& k) const {
    u64 h = reinterpret_cast<u64>(k.place) * 0x9e3779b97f4a7c15 ^ k.epoch;
    h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9 ^ static_cast<u64>(k.occurrence) << 40 ^ static_cast<u64>(k.op) << 32 ^ k.what ^
        static_cast<u64>(k.buffer) << 24;
    return (h ^ h >> 31) * 0x94d049bb133111eb;
  }
};
struct WarpState {
  u64 epoch[32] = {};              // how many instructions of the whole warp a lane has come to; ~0: it has ended
  u64 closed = 0;                  // all lanes have
  std::vector<GroupKey> seen[32];  // since then, with the number of occurrences
  std::unordered_map<GroupKey, Group, GroupHash> open;
};

struct Counting {
  Launch launch;
  u64 seed = 0, order = 0;
  size_t l1 = 0, l2 = 0;
  std::unique_ptr<Memory> memory;
  std::unordered_map<const char*, u32> buffers;  // by begin
  std::vector<WarpState> warps;                  // by slot
  std::vector<Section> sections;                 // of each thread, by slot
  std::map<AccessKey, Access> accesses;
  std::map<std::pair<Section, std::string>, Event> events;
};
extern std::unique_ptr<Counting> counting;

void write_report(bool ok);  // counters_report.cc

}  // namespace kitsune::emulator::counters
