// Global memory: the registered buffers, loads and stores, counters that CTAs signal with.
//
// Comes in: addresses inside registered buffers; any other is an error that names the nearest one. Goes out: checks in the buffers'
// shadow; order through counters (release and acquire at gpu scope). Invariant: a counter's order is kept by address, for the
// launch.

#include <algorithm>
#include <map>

#include "counters.h"
#include "state.h"

namespace kitsune::emulator {

namespace {

struct Buffer {
  char* begin;
  size_t bytes;
  std::string name;
};
std::vector<Buffer>& buffers() {
  static std::vector<Buffer> all;
  return all;
}
std::vector<Region> regions;  // of the buffers, by address, for one launch
Region* latest = nullptr;

}  // namespace

void register_global(const void* p, size_t bytes, const char* name) {
  buffers().push_back({static_cast<char*>(const_cast<void*>(p)), bytes, name});
}
void clear_globals() { buffers().clear(); }

// Overlapping buffers (an operand whose memory a result reuses) become one region.
void register_pages() {
  auto sorted = buffers();
  std::sort(sorted.begin(), sorted.end(), [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; });
  regions.clear();
  latest = nullptr;
  for (const Buffer& b : sorted) {
    if (!b.bytes) continue;
    if (!regions.empty() && b.begin < regions.back().begin + regions.back().bytes) {
      Region& last = regions.back();
      last.bytes = std::max(last.bytes, static_cast<size_t>(b.begin - last.begin) + b.bytes);
      if (last.name != b.name) last.name += "/" + b.name;
      continue;
    }
    regions.emplace_back();
    regions.back().begin = b.begin;
    regions.back().bytes = b.bytes;
    regions.back().name = b.name;
  }
  // Granules start at multiples of 16 of the address, so that aligned accesses touch as few as possible.
  for (Region& r : regions) region_init(r, r.begin, r.bytes);
}

Region& global_region(const void* p, size_t bytes, const char* what) {
  auto* at = static_cast<const char*>(p);
  if (latest && static_cast<size_t>(at - latest->begin) < latest->bytes &&
      static_cast<size_t>(at - latest->begin) + bytes <= latest->bytes)
    return *latest;
  Region* nearest = nullptr;
  size_t distance = ~size_t{0};
  for (Region& r : regions) {
    if (at >= r.begin && at + bytes <= r.begin + r.bytes) return *(latest = &r);
    size_t d = at < r.begin ? static_cast<size_t>(r.begin - at)
                            : static_cast<size_t>(at - r.begin) - std::min(static_cast<size_t>(at - r.begin), r.bytes);
    if (d < distance) {
      distance = d;
      nearest = &r;
    }
  }
  if (!nearest) fail("%s: %p is not in global memory: no buffer is registered", what, p);
  fail("%s: %zu bytes at %p are outside global memory; the nearest buffer is %s, offset %zd of its %zu bytes", what, bytes, p,
       nearest->name.c_str(), static_cast<ssize_t>(at - nearest->begin), nearest->bytes);
}

static Region& aligned_region(const void* p, u32 bytes, const char* what) {
  if (reinterpret_cast<size_t>(p) % bytes) fail("%s of %u bytes at %p is not aligned", what, bytes, p);
  return global_region(p, bytes, what);
}

void load_constant(const void* p, u32 bytes, const Site& at) {
  Region& r = aligned_region(p, bytes, "ld_global");
  check_constant_read(r, static_cast<size_t>(static_cast<const char*>(p) - r.begin), bytes);
  if (counters::on) counters::access(counters::Op::ld_global, p, bytes, at);
}

// Through the L1, which an acquire at gpu scope empties.
void load_ordinary(const void* p, u32 bytes, const Site& at) {
  Region& r = aligned_region(p, bytes, "ld_global");
  check_read(r, static_cast<size_t>(static_cast<const char*>(p) - r.begin), bytes, actor(self(), "ld_global"));
  if (counters::on) counters::access(counters::Op::ld_global, p, bytes, at);
}

void load_global(const void* p, u32 bytes, const Site& at) {
  Region& r = aligned_region(p, bytes, "ld_l2");
  check_read(r, static_cast<size_t>(static_cast<const char*>(p) - r.begin), bytes, actor(self(), "ld_l2"));
  if (counters::on) counters::access(counters::Op::ld_l2, p, bytes, at);
}

void store_global(void* p, u32 bytes, const Site& at) {
  Region& r = aligned_region(p, bytes, "st_global");
  check_write(r, static_cast<size_t>(static_cast<char*>(p) - r.begin), bytes, actor(self(), "st_global"));
  if (counters::on) counters::access(counters::Op::st_global, p, bytes, at);
}

// Additions do not race with each other and order nothing; with every other access they do, like stores.
void add_global(void* p, u32 bytes, const Site& at) {
  preempt();  // another thread's addition may come first
  Region& r = aligned_region(p, bytes, "red_add");
  Actor adds = actor(self(), "red_add");
  adds.flags |= kReduce;
  check_write(r, static_cast<size_t>(static_cast<char*>(p) - r.begin), bytes, adds);
  if (counters::on) counters::access(counters::Op::red_add, p, bytes, at);
}

// --- counters. Atomic accesses do not race with each other, so the shadow does not hold them.

static Flag& flag_at(const void* p, const char* what) {
  aligned_region(p, sizeof(u32), what);
  return machine->flags[p];
}

static void wake_waiters(u32* p, Flag& flag) {
  auto waiting = std::move(flag.waiting);
  flag.waiting.clear();
  for (Thread* t : waiting) {
    if (static_cast<i32>(*p - static_cast<u32>(t->argument)) >= 0) {
      make_ready(t);
      --machine->polling;
    } else {
      flag.waiting.push_back(t);
    }
  }
}

void flag_add(u32* p, u32 v) {
  preempt();
  Flag& flag = flag_at(p, "red_add_release");
  if (counters::on) counters::flag("red.release.gpu", p, true, false);
  release(flag.clock, self(), Reach::wide);
  *p += v;
  wake_waiters(p, flag);
}

u32 flag_fetch_add(u32* p, u32 v) {
  preempt();
  Flag& flag = flag_at(p, "atomic_add_acq_rel");
  if (counters::on) counters::flag("atom.acq_rel.gpu", p, true, true);
  Thread& t = self();
  acquire(t, flag.clock, true);
  release(flag.clock, t, Reach::wide);
  u32 old = *p;
  *p += v;
  wake_waiters(p, flag);
  return old;
}

u32 flag_load(const u32* p) {
  preempt();
  acquire(self(), flag_at(p, "ld_acquire").clock, true);
  if (counters::on) counters::flag("ld.acquire.gpu", p, false, true);
  return *p;
}

void flag_wait(const u32* p, u32 v) {
  preempt();
  Flag& flag = flag_at(p, "wait_ge");
  bool there = static_cast<i32>(*p - v) >= 0;
  while (static_cast<i32>(*p - v) < 0) {
    ++machine->polling;
    flag.waiting.push_back(&self());
    block(
        [](const Thread& t) {
          const u32* p = static_cast<const u32*>(t.object);
          Region& r = global_region(p, 4, "wait_ge");
          return format("wait_ge(%s, %u), which holds %u",
                        describe(r, static_cast<size_t>(reinterpret_cast<const char*>(p) - r.begin)).c_str(),
                        static_cast<u32>(t.argument), *p);
        },
        p, v);
  }
  acquire(self(), flag.clock, true);
  if (counters::on) {
    counters::flag("fence.acquire.gpu", p, false, true);
    counters::warp_event("wait_ge", !there);
  }
}

}  // namespace kitsune::emulator
