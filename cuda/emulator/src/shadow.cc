// The rules of shadow memory (see shadow.h).

#include "shadow.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "state.h"

namespace kitsune::emulator {

// --- arena

namespace {
constexpr size_t kChunk = 4 << 20;
struct Chunk {
  char* memory;
  size_t bytes;
};
std::vector<Chunk> chunks;
size_t chunk_index = 0, chunk_used = 0;
}  // namespace

void* arena_allocate(size_t bytes) {
  bytes = (bytes + 63) & ~size_t{63};
  while (chunk_index < chunks.size() && chunk_used + bytes > chunks[chunk_index].bytes) {
    ++chunk_index;
    chunk_used = 0;
  }
  if (chunk_index == chunks.size()) {
    size_t size = bytes > kChunk ? bytes : kChunk;
    auto* memory = static_cast<char*>(aligned_alloc(64, size));
    if (!memory) throw std::bad_alloc();
    chunks.push_back({memory, size});
    chunk_used = 0;
  }
  char* p = chunks[chunk_index].memory + chunk_used;
  chunk_used += bytes;
  return memset(p, 0, bytes);
}

void arena_reset() { chunk_index = chunk_used = 0; }

// --- lists

void AccessList::add(const Access& access) {
  if (count == capacity) {
    auto* more = static_cast<Access*>(arena_allocate(2 * capacity * sizeof(Access)));
    memcpy(more, begin(), count * sizeof(Access));
    many = more;
    capacity *= 2;
  }
  begin()[count++] = access;
}

void AccessList::remove_bytes(u16 mask) {
  Access* to = begin();
  for (Access *from = begin(), *last = end(); from != last; ++from) {
    from->mask &= static_cast<u16>(~mask);
    if (from->mask) *to++ = *from;
  }
  count = static_cast<u32>(to - begin());
}

// --- regions

void region_init(Region& region, char* begin, size_t bytes) {
  region.begin = begin;
  region.bytes = bytes;
  region.page_count = (bytes + 4095) >> 12;
  region.pages = static_cast<Granule**>(arena_allocate(region.page_count * sizeof(Granule*) + 1));
}

Granule* Region::new_page(size_t index) {
  auto* page = static_cast<Granule*>(arena_allocate(256 * sizeof(Granule)));
  for (int i = 0; i < 256; ++i) page[i].writes.capacity = page[i].reads.capacity = 4;
  return pages[index] = page;
}

std::string describe(const Region& region, size_t offset) {
  auto* cta = static_cast<Cta*>(region.cta);
  if (!cta) return format("%s + %zu", region.name.c_str(), offset);
  const std::pair<u32, std::string>* best = nullptr;
  for (const auto& entry : cta->names)
    if (entry.first <= offset && (!best || entry.first >= best->first)) best = &entry;
  if (best) return format("%s + %zu of cta %u", best->second.c_str(), offset - best->first, cta->id);
  return format("shared memory + %zu of cta %u", offset - kReserved, cta->id);
}

namespace {

// Calls visit(granule, mask of its bytes, offset) for every granule of a range.
template <class F>
inline void each_granule(Region& region, size_t offset, size_t bytes, F visit) {
  for (size_t at = offset & ~size_t{15}, end = offset + bytes; at < end; at += 16) {
    u32 low = at < offset ? static_cast<u32>(offset - at) : 0, high = end - at < 16 ? static_cast<u32>(end - at) : 16;
    visit(region.granule(at), static_cast<u16>((1u << high) - (1u << low)), at);
  }
}

// Is an asynchronous write to bytes of the mask in flight, other than additions beside an addition?
inline bool being_written(const Granule& g, u16 mask, bool add) {
  for (int half = 0; half < 2; ++half)
    if (mask >> 8 * half & 0xff && g.writing[half] && !(add && g.adding[half] == g.writing[half])) return true;
  return false;
}

[[noreturn]] void race(const Region& region, size_t at, const Actor& actor, const char* how, const Access& other, const char* did) {
  fail("race: %s %s %s, which nothing orders after the %s by %s", actor.what, how, describe(region, at).c_str(), did,
       agent_name(other.agent).c_str());
}

// The earlier write must be ordered before, visible in the scope, and (for the async proxy) fenced.
inline void check_after_write(Region& region, size_t at, const Access& write, const Actor& actor, const char* how) {
  if (actor.known[write.agent] < write.clock) race(region, at, actor, how, write, "write");
  if (!(write.flags & kGeneric)) return;
  if (write.agent != actor.agent && write.agent != unclocked_agent() && agent_cta(write.agent) != actor.thread->cta) {
    const Scope& scope = actor.thread->scope;
    if ((write.flags & kOwnShared ? scope.own : scope.all) <= write.time)
      fail("%s %s %s, written by %s: ordered, but not released and acquired at cluster or gpu scope", actor.what, how,
           describe(region, at).c_str(), agent_name(write.agent).c_str());
  }
  if (actor.flags & kAsync && !proxy_fenced(write, actor, !region.cta))
    fail("%s %s %s, written by an ordinary store of %s, without fence_proxy_async%s between", actor.what, how,
         describe(region, at).c_str(), agent_name(write.agent).c_str(), region.cta ? "" : "_global");
}

}  // namespace

void check_read(Region& region, size_t offset, size_t bytes, const Actor& actor) {
  each_granule(region, offset, bytes, [&](Granule& g, u16 mask, size_t at) {
    if (being_written(g, mask, false))
      fail("%s reads %s while an asynchronous write to it is in flight", actor.what, describe(region, at).c_str());
    if (region.cta && (g.initialised & mask) != mask)
      fail("%s reads %s, which nothing has written (or whose write has not been waited for)", actor.what,
           describe(region, at).c_str());
    for (Access& w : g.writes)
      if (w.mask & mask) check_after_write(region, at, w, actor, "reads");
    // A read that this one is ordered after, of bytes that it covers, need not be remembered: who is after this one is after both.
    Access mine{actor.agent, actor.clock, mask, actor.flags, static_cast<u32>(machine->time)};
    u32 kept = 0;
    Access* reads = g.reads.begin();
    for (u32 i = 0; i < g.reads.count; ++i) {
      Access& r = reads[i];
      bool covered = !(r.mask & ~mask) && (r.agent == actor.agent || actor.known[r.agent] >= r.clock);
      if (!covered) reads[kept++] = r;
    }
    g.reads.count = kept;
    g.reads.add(mine);
  });
}

void check_write(Region& region, size_t offset, size_t bytes, const Actor& actor) {
  bool add = actor.flags & kReduce;
  each_granule(region, offset, bytes, [&](Granule& g, u16 mask, size_t at) {
    if (being_written(g, mask, add))
      fail("%s writes %s while an asynchronous write to it is in flight", actor.what, describe(region, at).c_str());
    if (g.reading) fail("%s writes %s while an asynchronous operation still reads it", actor.what, describe(region, at).c_str());
    if (g.constant & mask)
      fail("%s writes %s, which ld_global has read: it may be cached", actor.what, describe(region, at).c_str());
    for (Access& w : g.writes)
      if (w.mask & mask && !(add && w.flags & kReduce)) check_after_write(region, at, w, actor, "writes");
    for (Access& r : g.reads)
      if (r.mask & mask && actor.known[r.agent] < r.clock) race(region, at, actor, "writes", r, "read");
    if (add && actor.flags & kGeneric)  // of a thread's additions the last is after all others
      for (Access& w : g.writes)
        if (w.agent == actor.agent && w.flags == actor.flags) w.mask &= static_cast<u16>(~mask);
    g.writes.remove_bytes(add ? 0 : mask);
    g.reads.remove_bytes(mask);
    g.writes.add({actor.agent, actor.clock, mask, actor.flags, static_cast<u32>(machine->time)});
    g.written |= mask;
    if (actor.flags & kGeneric) g.initialised |= mask;
  });
}

void mark_writing(Region& region, size_t offset, size_t bytes, int by, bool add) {
  each_granule(region, offset, bytes, [&](Granule& g, u16 mask, size_t) {
    for (int half = 0; half < 2; ++half) {
      if (!(mask >> 8 * half & 0xff)) continue;
      g.writing[half] = static_cast<u16>(g.writing[half] + by);
      if (add) g.adding[half] = static_cast<u16>(g.adding[half] + by);
    }
  });
}

void mark_reading(Region& region, size_t offset, size_t bytes, int by) {
  each_granule(region, offset, bytes, [&](Granule& g, u16, size_t) { g.reading = static_cast<u16>(g.reading + by); });
}

void mark_written(Region& region, size_t offset, size_t bytes) {
  each_granule(region, offset, bytes, [&](Granule& g, u16 mask, size_t) { g.initialised |= mask; });
}

void check_constant_read(Region& region, size_t offset, size_t bytes) {
  each_granule(region, offset, bytes, [&](Granule& g, u16 mask, size_t at) {
    if (g.written & mask || being_written(g, mask, false))
      fail("ld_global reads %s, which this launch writes: use ld_l2, ld_global may be served by a cache that is not coherent",
           describe(region, at).c_str());
    g.constant |= mask;
  });
}

}  // namespace kitsune::emulator
