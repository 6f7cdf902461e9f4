// Grouping of accesses by warp, bank conflicts, and traffic (see counters.h).

#include "counters.h"

#include <algorithm>
#include <cstring>

#include "counts.h"
#include "state.h"

namespace kitsune::emulator::counters {

bool on = false;
std::unique_ptr<Counting> counting;

namespace {

constexpr u32 kBanks = 32, kWord = 4;
constexpr u32 kShared = ~0u;  // as a buffer
constexpr u64 kEnded = ~u64{0};

bool is_shared(Op op) { return op >= Op::ld_shared; }

u32 index_of(const Thread& t) { return static_cast<u32>(&t - machine->threads.data()); }
WarpState& warp_of(const Thread& t) { return counting->warps[index_of(t) / 32]; }
const Section& section_of(const Thread& t) { return counting->sections[index_of(t)]; }

u32 buffer_of(const void* p, u64& offset) {
  Region& region = global_region(p, 1, "counters");
  auto [it, is_new] = counting->buffers.try_emplace(region.begin, 0);
  if (is_new) it->second = counting->memory->add_buffer(region.name, region.bytes);
  offset = static_cast<u64>(static_cast<const char*>(p) - region.begin);
  return it->second;
}

// --- shared memory. 32 banks of 4 bytes; lanes that touch the same word share it (CUDA C++ Programming Guide, "Shared Memory"). A
// wavefront serves 128 bytes: an access of 8 bytes takes one for each half of the warp, one of 16 bytes, and ldmatrix, one for each
// quarter. The guide has this for early devices only; that it holds for later ones no device has measured here.

u32 wavefronts(const u64* addresses, u32 lanes, u32 width) {
  u64 words[kBanks][32];
  u32 used[kBanks] = {}, most = 0, of_access = width < kWord ? 1 : width / kWord;
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    for (u32 i = 0; i < of_access; ++i) {
      u64 word = addresses[lane] / kWord + i;
      u32 bank = static_cast<u32>(word % kBanks);
      u64* end = words[bank] + used[bank];
      if (std::find(words[bank], end, word) != end) continue;
      *end = word;
      most = std::max(most, ++used[bank]);
    }
  }
  return most;
}

void count_banks(Access& a, const Group& g) {
  u32 lanes_at_once = g.width <= kWord ? 32 : 128 / g.width;
  for (u32 first = 0; first < 32; first += lanes_at_once) {
    u32 lanes = g.lanes & (lanes_at_once == 32 ? ~0u : ((1u << lanes_at_once) - 1) << first);
    if (!lanes) continue;
    ++a.ideal;
    a.wavefronts += wavefronts(g.addresses, lanes, g.width);
  }
}

// --- global memory. An aligned access lies in one sector.

void count_sectors(Access& a, const Group& g) {
  u64 sectors[32];
  u32 n = 0;
  for (u32 lane = 0; lane < 32; ++lane)
    if (g.lanes >> lane & 1) sectors[n++] = g.addresses[lane] / kSector;
  std::sort(sectors, sectors + n);
  n = static_cast<u32>(std::unique(sectors, sectors + n) - sectors);
  a.sectors += n;
  for (u32 i = 0; i < n; ++i) {
    if (g.op == Op::st_global || g.op == Op::red_add)
      counting->memory->store(g.buffer, sectors[i] * kSector, kSector);
    else
      counting->memory->load(g.cta, g.buffer, sectors[i] * kSector, kSector, g.op == Op::ld_global);
  }
}

// --- groups

void close(const Group& g) {
  u64 threads = static_cast<u64>(__builtin_popcount(g.lanes));
  if (g.name) {
    Event& e = counting->events[{g.section, g.name}];
    ++e.count;
    e.threads += threads;
    e.amount += g.amount;
    return;
  }
  Access& a = counting->accesses[{g.section, g.op, g.width, g.buffer, g.site.file, g.site.line}];
  ++a.requests;
  a.threads += threads;
  a.bytes += threads * g.width;
  is_shared(g.op) ? count_banks(a, g) : count_sectors(a, g);
}

// Closes the groups that no lane can join any more, in the order in which they were opened.
void close_before(WarpState& w, u64 epoch) {
  std::vector<const GroupKey*> done;
  for (const auto& [key, group] : w.open)
    if (key.epoch < epoch) done.push_back(&key);
  std::sort(done.begin(), done.end(), [&](auto* x, auto* y) { return w.open[*x].order < w.open[*y].order; });
  for (const GroupKey* key : done) {
    close(w.open[*key]);
    w.open.erase(GroupKey(*key));
  }
}

void catch_up(WarpState& w) {
  u64 least = *std::min_element(w.epoch, w.epoch + 32);
  if (least == w.closed) return;
  w.closed = least;
  if (!w.open.empty()) close_before(w, least);
}

GroupKey next_key(const Thread& t, GroupKey like) {
  WarpState& w = warp_of(t);
  auto& seen = w.seen[t.lane];
  auto it = std::find_if(seen.begin(), seen.end(), [&](const GroupKey& k) { return k.like(like); });
  if (it == seen.end()) it = seen.insert(seen.end(), like);
  like.epoch = w.epoch[t.lane];
  like.occurrence = it->occurrence++;
  return like;
}

// What this lane does as part of its warp: `fill` completes the group.
template <class F>
void join(Op op, const char* name, u32 width, u32 buffer, const Site& site, F fill) {
  Thread& t = self();
  WarpState& w = warp_of(t);
  GroupKey key = next_key(t, {0, name ? name : site.file, name ? 0 : site.line << 8 | width, op, buffer, 0});
  auto [at, is_new] = w.open.try_emplace(key);
  Group& g = at->second;
  if (is_new) {
    g.op = op;
    g.name = name;
    g.width = width;
    g.buffer = buffer;
    g.cta = t.cta->id;
    g.site = site;
    g.section = section_of(t);
    g.order = counting->order++;
  }
  g.lanes |= 1u << t.lane;
  fill(t, g);
  if (g.lanes != ~0u) return;
  close(g);
  w.open.erase(key);
}

u32 l1_bytes(const Launch& launch, size_t both) {
  // What can be set aside for shared memory (CUDA C++ Programming Guide, "Shared Memory", compute capability 8.0 and 9.0).
  for (u32 kib : {0u, 8u, 16u, 32u, 64u, 100u, 132u, 164u, 196u, 228u})
    if (launch.shared_bytes + kReserved <= kib << 10) return both > kib << 10 ? static_cast<u32>(both - (kib << 10)) : 0;
  return 0;
}

}  // namespace

void begin(const Launch& launch, u64 seed, const CountOptions& options) {
  counting = std::make_unique<Counting>();
  counting->launch = launch;
  counting->seed = seed;
  counting->l1 = l1_bytes(launch, options.l1);
  counting->l2 = options.l2;
  counting->memory = std::make_unique<Memory>(counting->l1, counting->l2, launch.grid);
  counting->warps.resize(machine->threads.size() / 32);
  counting->sections.resize(machine->threads.size());
}

void access(Op op, const void* p, u32 bytes, const Site& site) {
  u64 at = is_shared(op) ? offset_in(*self().cta, p) : 0;
  u32 buffer = is_shared(op) ? kShared : buffer_of(p, at);
  join(op, nullptr, bytes, buffer, site, [&](Thread& t, Group& g) { g.addresses[t.lane] = at; });
}

void rows(Op op, const char* const* rows, const Site& site) {
  Thread& t = self();
  Group g{};
  g.op = op;
  g.width = 16;
  g.buffer = kShared;
  g.lanes = ~0u;
  g.site = site;
  g.section = section_of(t);
  for (u32 i = 0; i < 32; ++i) g.addresses[i] = offset_in(*t.cta, rows[i]);
  close(g);
}

void together() {
  Thread& t = self();
  WarpState& w = warp_of(t);
  ++w.epoch[t.lane];
  w.seen[t.lane].clear();
  catch_up(w);
}

void exits(Thread& t) {
  WarpState& w = warp_of(t);
  w.epoch[t.lane] = kEnded;
  catch_up(w);
  counting->sections[index_of(t)] = {};
  if (w.closed == kEnded) w = WarpState();  // for the next CTA that takes the slot
}

void section(u32 stage, u32 role) { counting->sections[index_of(self())] = {stage, role, false}; }
void finishing() { counting->sections[index_of(self())].finish = true; }

void warp_event(const char* name, u64 amount) {
  join(Op::ld_global, name, 0, kShared, {name, 0}, [&](Thread&, Group& g) { g.amount = std::max(g.amount, amount); });
}

void event(const std::string& name, u64 amount) {
  Event& e = counting->events[{section_of(self()), name}];
  ++e.count;
  ++e.threads;
  e.amount += amount;
}

void copy_in(const char* name, const void* from, u32 bytes, u32 destinations) {
  u64 offset;
  u32 buffer = buffer_of(from, offset);
  counting->memory->load(self().cta->id, buffer, offset, bytes, false);
  event(name, bytes);
  if (destinations > 1) event(std::string(name) + ", delivered", static_cast<u64>(bytes) * destinations);
}

void prefetch(const char* name, const void* from, u32 bytes) {
  u64 offset;
  u32 buffer = buffer_of(from, offset);
  counting->memory->prefetch(buffer, offset, bytes);
  event(name, bytes);
}

void copy_out(const char* name, const void* to, u32 bytes) {
  u64 offset;
  u32 buffer = buffer_of(to, offset);
  counting->memory->store(buffer, offset, bytes);
  event(name, bytes);
}

void flag(const char* name, const void* p, bool writes, bool acquires) {
  u64 offset;
  u32 buffer = buffer_of(p, offset), cta = self().cta->id;
  counting->memory->load(cta, buffer, offset, 4, false);
  if (writes) counting->memory->store(buffer, offset, 4);
  if (acquires) counting->memory->acquire(cta);
  warp_event(name);
}

void acquire() { counting->memory->acquire(self().cta->id); }

}  // namespace kitsune::emulator::counters
