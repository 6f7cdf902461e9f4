// Bulk copies between global memory and the shared memory of the cluster, and groups of copies.
//
// Comes in: copies issued by single threads. Goes out: bytes that arrive later, in pieces, in a random order; completion on an
// mbarrier or in the thread's groups. Invariant: source bytes are read when a piece lands, not when it is issued; a group's bytes
// stay marked in flight until somebody waits, however early they landed, so a missing wait is found with every seed.

#include "copies.h"

#include <cstring>

#include "counters.h"

namespace kitsune::emulator {

namespace {

void check_bulk(const void* a, const void* b, u32 bytes, const char* what) {
  if (reinterpret_cast<size_t>(a) % 16 || reinterpret_cast<size_t>(b) % 16 || bytes % 16 || !bytes)
    fail("%s: addresses and sizes are multiples of 16: %p, %p, %u bytes", what, a, b, bytes);
}

size_t offset_of(const Region& region, const void* p) { return static_cast<size_t>(static_cast<const char*>(p) - region.begin); }

}  // namespace

void destinations(std::vector<Destination>& to, const Mbar& bar, u32 mask, const char* what) {
  Cta& own = own_cta(&bar, sizeof bar, what);
  u32 offset = offset_in(own, &bar);
  if (mask == 0) mask = 1u << own.rank;
  if (mask >> own.cluster->ctas.size()) fail("%s: multicast mask 0x%x of a cluster of %zu", what, mask, own.cluster->ctas.size());
  for (u32 rank = 0; rank < own.cluster->ctas.size(); ++rank)
    if (mask >> rank & 1) {
      Cta& cta = remote_cta(rank, what);
      to.push_back({&cta, &barrier_at(cta, offset, true)});
    }
}

void begin_write(const Destination& to, size_t offset, size_t bytes, const Actor& actor) {
  check_write(to.cta->region, offset, bytes, actor);
  mark_writing(to.cta->region, offset, bytes, 1, false);
  touch_remote(*to.cta, actor.agent, actor.clock);
}

void end_write(const Destination& to, size_t offset, size_t bytes) {
  mark_writing(to.cta->region, offset, bytes, -1, false);
  mark_written(to.cta->region, offset, bytes);
}

u32 random_cut(u32 units) {
  u32 pieces = 1 + machine->random.below(3);
  return (units + pieces - 1) / pieces;
}

void copy_load(void* dst, const void* src, u32 bytes, Mbar& bar, u32 mask) {
  const char* what = mask ? "bulk_load_multicast" : "bulk_load";
  check_bulk(dst, src, bytes, what);
  Thread& t = self();
  preempt();
  u32 offset = offset_in(own_cta(dst, bytes, what), dst);
  Region& source = global_region(src, bytes, what);
  std::vector<Destination> all;
  destinations(all, bar, mask, what);
  if (counters::on) counters::copy_in(what, src, bytes, static_cast<u32>(all.size()));
  for (const Destination& to : all) {
    Actor a = copy_actor(t, *to.barrier, what);
    check_read(source, offset_of(source, src), bytes, a);
    begin_write(to, offset, bytes, a);
    u32 size = random_cut(bytes / 16) * 16;
    for (u32 at = 0; at < bytes; at += size) {
      u32 n = at + size < bytes ? size : bytes - at;
      char* into = to.cta->memory + offset + at;
      const char* from = static_cast<const char*>(src) + at;
      ++to.cta->in_flight;
      post(machine->step + random_delay(), [=] {
        memcpy(into, from, n);
        end_write(to, offset + at, n);
        --to.cta->in_flight;
        barrier_complete(*to.barrier, n);
      });
    }
  }
}

// One event for each piece of a copy within the cluster.
void copy_push(void* dst, u32 rank, const void* src, u32 bytes, Mbar& bar) {
  check_bulk(dst, src, bytes, "bulk_push");
  Thread& t = self();
  Cta* own = t.cta;
  preempt();
  u32 offset = offset_in(own_cta(dst, bytes, "bulk_push"), dst), from = offset_in(own_cta(src, bytes, "bulk_push"), src);
  std::vector<Destination> all;
  remote_cta(rank, "bulk_push");
  destinations(all, bar, 1u << rank, "bulk_push");
  if (counters::on) counters::event("bulk_push", bytes);
  Destination to = all[0];
  Actor a = copy_actor(t, *to.barrier, "bulk_push");
  check_read(own->region, from, bytes, a);
  mark_reading(own->region, from, bytes, 1);
  touch_remote(*own, a.agent, a.clock);
  begin_write(to, offset, bytes, a);
  u32 size = random_cut(bytes / 16) * 16;
  for (u32 at = 0; at < bytes; at += size) {
    u32 n = at + size < bytes ? size : bytes - at;
    ++to.cta->in_flight;
    ++own->in_flight;
    post(machine->step + random_delay(), [=] {
      memcpy(to.cta->memory + offset + at, own->memory + from + at, n);
      mark_reading(own->region, from + at, n, -1);
      end_write(to, offset + at, n);
      --own->in_flight;
      --to.cta->in_flight;
      barrier_complete(*to.barrier, n);
    });
  }
}

// An ordinary store that completes on a barrier. Whether the async proxy sees it without a fence the PTX manual does not say, so a
// bulk copy or wgmma of its bytes needs fence_proxy_async after the wait.
void store_async(void* p, u32 rank, const void* v, u32 bytes, Mbar& bar, const Site& at) {
  if (reinterpret_cast<u64>(p) % bytes) fail("st_async: the address %p is no multiple of %u", p, bytes);
  Thread& t = self();
  if (counters::on) counters::access(counters::Op::st_async, p, bytes, at);
  preempt();
  u32 offset = offset_in(own_cta(p, bytes, "st_async"), p);
  std::vector<Destination> all;
  remote_cta(rank, "st_async");
  destinations(all, bar, 1u << rank, "st_async");
  Destination to = all[0];
  Actor a = copy_actor(t, *to.barrier, "st_async");
  a.flags = kGeneric;
  begin_write(to, offset, bytes, a);
  ++to.cta->in_flight;
  U4 held = {};
  memcpy(&held, v, bytes);
  post(machine->step + random_delay(), [=] {
    memcpy(to.cta->memory + offset, &held, bytes);
    end_write(to, offset, bytes);
    --to.cta->in_flight;
    barrier_complete(*to.barrier, bytes);
  });
}

void copy_prefetch(const void* src, u32 bytes) {
  check_bulk(src, src, bytes, "bulk_prefetch_l2");
  global_region(src, bytes, "bulk_prefetch_l2");
  if (counters::on) counters::prefetch("bulk_prefetch_l2", src, bytes);
}

// --- groups

CopyGroup& open_group(std::shared_ptr<CopyGroup>& open) {
  if (!open) open = std::make_shared<CopyGroup>();
  return *open;
}

void begin_source(CopyGroup& group, Region& region, size_t offset, size_t bytes, const Actor& actor) {
  check_read(region, offset, bytes, actor);
  mark_reading(region, offset, bytes, 1);
  group.sources.push_back({&region, offset, bytes, false});
}

void begin_target(CopyGroup& group, Region& region, size_t offset, size_t bytes, const Actor& actor, bool add) {
  check_write(region, offset, bytes, actor);
  mark_writing(region, offset, bytes, 1, add);
  group.targets.push_back({&region, offset, bytes, add});
}

// Whoever waits has read and written at that moment, as far as others are concerned.
void end_sources(CopyGroup& group, Thread& thread) {
  for (const Piece& p : group.sources) {
    mark_reading(*p.region, p.offset, p.bytes, -1);
    Actor a = actor(thread, "an asynchronous copy");
    check_read(*p.region, p.offset, p.bytes, a);
  }
  group.sources.clear();
}

void end_targets(CopyGroup& group, Thread& thread) {
  for (const Piece& p : group.targets) {
    mark_writing(*p.region, p.offset, p.bytes, -1, p.add);
    Actor a = actor(thread, "an asynchronous copy");
    if (p.add) a.flags |= kReduce;
    check_write(*p.region, p.offset, p.bytes, a);
  }
  group.targets.clear();
}

void group_progress(CopyGroup& group) {
  if (!group.waiter) return;
  make_ready(group.waiter);
  group.waiter = nullptr;
}

// Shared memory is read first, global memory is written later: that is why there are two waits.
void copy_store(void* dst, const void* src, u32 bytes, bool add) {
  const char* what = add ? "bulk_reduce_add_f32" : "bulk_store";
  check_bulk(dst, src, bytes, what);
  Thread& t = self();
  preempt();
  Cta& cta = own_cta(src, bytes, what);
  u32 offset = offset_in(cta, src);
  Region& region = global_region(dst, bytes, what);
  if (counters::on) counters::copy_out(what, dst, bytes);
  open_group(t.bulk_open);
  auto group = t.bulk_open;
  Actor a = async_actor(t, t.agent, t.clock[t.agent], what);
  begin_source(*group, cta.region, offset, bytes, a);
  if (add) a.flags |= kReduce;
  begin_target(*group, region, offset_of(region, dst), bytes, a, add);
  ++group->reading;
  ++group->writing;
  Cta* own = &cta;
  ++own->in_flight;
  post(machine->step + random_delay(), [=] {
    std::vector<char> data(own->memory + offset, own->memory + offset + bytes);
    --own->in_flight;
    --group->reading;
    group_progress(*group);
    post(machine->step + random_delay(), [=] {
      if (add) {
        for (u32 i = 0; i < bytes; i += 4) {
          float sum, v;
          memcpy(&sum, static_cast<char*>(dst) + i, 4);
          memcpy(&v, data.data() + i, 4);
          sum += v;
          memcpy(static_cast<char*>(dst) + i, &sum, 4);
        }
      } else {
        memcpy(dst, data.data(), bytes);
      }
      --group->writing;
      group_progress(*group);
    });
  });
}

void bulk_group_commit() {
  Thread& t = self();
  open_group(t.bulk_open);
  t.bulk_groups.push_back(std::move(t.bulk_open));
  t.bulk_open.reset();
}

void bulk_group_wait(u32 pending, bool read_only) {
  Thread& t = self();
  preempt();
  size_t count = t.bulk_groups.size() > pending ? t.bulk_groups.size() - pending : 0;
  for (size_t i = 0; i < count; ++i) {
    CopyGroup& g = *t.bulk_groups[i];
    while (g.reading || (!read_only && g.writing)) {
      g.waiter = &t;
      block([](const Thread&) { return std::string("its bulk copies"); }, &g, 0);
    }
    end_sources(g, t);
    if (!read_only) end_targets(g, t);
  }
  if (!read_only) t.bulk_groups.erase(t.bulk_groups.begin(), t.bulk_groups.begin() + static_cast<std::ptrdiff_t>(count));
}

// --- cp.async

void thread_copy(void* dst, const void* src, u32 src_bytes, const Site& at) {
  check_bulk(dst, src, 16, "cp_async_16");
  if (src_bytes > 16) fail("cp_async_16: %u source bytes", src_bytes);
  Thread& t = self();
  Cta& cta = own_cta(dst, 16, "cp_async_16");
  u32 offset = offset_in(cta, dst);
  open_group(t.copy_open);
  auto group = t.copy_open;
  Actor a = actor(t, "cp_async_16");
  if (src_bytes) {
    Region& region = global_region(src, src_bytes, "cp_async_16");
    begin_source(*group, region, offset_of(region, src), src_bytes, a);
    if (counters::on) counters::access(counters::Op::cp_async, src, src_bytes, at);
  }
  begin_target(*group, cta.region, offset, 16, a, false);
  ++group->writing;
  Cta* own = &cta;
  ++own->in_flight;
  post(machine->step + random_delay(), [=] {
    memset(own->memory + offset, 0, 16);
    memcpy(own->memory + offset, src, src_bytes);
    --own->in_flight;
    --group->writing;
    if (group->arrive && !group->writing) {
      for (const Piece& p : group->targets) mark_writing(*p.region, p.offset, p.bytes, -1, false);
      barrier_arrived(*group->arrive);
    }
    group_progress(*group);
  });
}

void thread_copy_commit() {
  Thread& t = self();
  open_group(t.copy_open);
  t.copy_groups.push_back(std::move(t.copy_open));
  t.copy_open.reset();
}

void thread_copy_wait(u32 pending) {
  Thread& t = self();
  preempt();
  while (t.copy_groups.size() > pending) {
    CopyGroup& g = *t.copy_groups.front();
    while (g.writing) {
      g.waiter = &t;
      block([](const Thread&) { return std::string("its cp.async copies"); }, &g, 0);
    }
    end_sources(g, t);
    end_targets(g, t);
    t.copy_groups.pop_front();
  }
}

// All copies that the thread has issued and not waited for become one group, which arrives when the last of them has landed. Their
// bytes belong to the barrier's phase from now on: a later cp_async_wait does not cover them.
void thread_copy_arrive(Mbar& bar) {
  Thread& t = self();
  preempt();
  Cta& cta = own_cta(&bar, sizeof bar, "cp_async_arrive");
  Barrier& b = barrier_at(cta, offset_in(cta, &bar), false);
  release(b.arriving, t, Reach::cta);
  t.copy_groups.push_back(t.copy_open ? std::move(t.copy_open) : std::make_shared<CopyGroup>());
  t.copy_open.reset();
  std::vector<std::shared_ptr<CopyGroup>> flying;
  Actor a = copy_actor(t, b, "cp_async_16");
  a.flags = kGeneric;
  for (auto& g : t.copy_groups) {
    end_sources(*g, t);
    for (const Piece& p : g->targets) {
      mark_writing(*p.region, p.offset, p.bytes, -1, false);
      check_write(*p.region, p.offset, p.bytes, a);
      if (g->writing) mark_writing(*p.region, p.offset, p.bytes, 1, false);
    }
    if (g->writing) flying.push_back(g);
  }
  t.copy_groups.clear();
  if (flying.empty()) return barrier_arrived(b);
  // Each group that is still in flight arrives once; one arrival is due, so the others are added.
  b.pending += static_cast<u32>(flying.size()) - 1;
  for (auto& g : flying) g->arrive = &b;
}

void thread_exit_copies(Thread& thread) {
  if (thread.bulk_open) fail("the thread exits with bulk copies that it has not committed");
  for (auto& g : thread.bulk_groups)
    if (!g->sources.empty()) fail("the thread exits before bulk_wait_read: its bulk copies may still read shared memory");
  if (thread.copy_open && !thread.copy_open->targets.empty()) fail("the thread exits with cp.async copies that nothing waits for");
  for (auto& g : thread.copy_groups)
    if (!g->targets.empty()) fail("the thread exits with cp.async copies that nothing waits for");
}

}  // namespace kitsune::emulator
