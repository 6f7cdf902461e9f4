// mbarriers: arrivals, transaction counts, phases.
//
// Comes in: objects in shared memory whose 8 bytes hold a magic number and an index, so that an uninitialised or overwritten one is
// noticed. Goes out: order, from arrivals and completed copies to waits. Invariant: a phase completes when no arrival is pending
// and the transaction count is zero; the count may be negative before expect_tx, as on the device.

#include <cstring>

#include "counters.h"
#include "state.h"

namespace kitsune::emulator {

namespace {
constexpr u32 kMagic = 0xe3a1ba55;
constexpr i64 kMaxTransactions = (1 << 20) - 1;  // PTX ISA, "Contents of the mbarrier object"
constexpr u32 kMaxArrivals = kMaxTransactions;

std::string waits_for(const Thread& t) {
  auto& b = *static_cast<const Barrier*>(t.object);
  return format("mbarrier %s, parity %u: it is in phase %u (parity %u), %u of %u arrivals pending, %lld bytes outstanding",
                describe(b.cta->region, b.offset).c_str(), static_cast<u32>(t.argument), b.phase, b.phase & 1, b.pending,
                b.expected, b.transactions);
}

void complete_phase(Barrier& b) {
  if (b.pending || b.transactions) return;
  ++b.phase;
  b.pending = b.expected;
  if (!b.arriving.at) b.arriving.at = static_cast<u32*>(arena_allocate(machine->agents * sizeof(u32)));
  if (b.agent < unclocked_agent()) {
    b.arriving.at[b.agent] = b.base + b.phase;
    machine->barrier_base[b.agent - machine->first_barrier] = b.base + b.phase;
  }
  if (!b.completed.at) b.completed.at = static_cast<u32*>(arena_allocate(machine->agents * sizeof(u32)));
  memcpy(b.completed.at, b.arriving.at, machine->agents * sizeof(u32));
  b.completed.version = ++machine->time;
  b.completed.scope = b.arriving.scope;
  b.completed.released = b.arriving.released;
  wake_all(b.waiting);
}
}  // namespace

void barrier_init(Mbar& bar, u32 arrivals) {
  Machine& m = *machine;
  Thread& t = self();
  if (arrivals == 0 || arrivals > kMaxArrivals) fail("mbar_init: %u arrivals, at least 1 and at most %u", arrivals, kMaxArrivals);
  check_store(&bar, sizeof bar);
  Cta& cta = *t.cta;
  m.barriers.push_back(std::make_unique<Barrier>());
  Barrier& b = *m.barriers.back();
  b.cta = &cta;
  b.offset = offset_in(cta, &bar);
  b.expected = b.pending = arrivals;
  b.initialiser = t.agent;
  b.initialised = t.clock[t.agent];
  b.by = &t;
  cta.mbarriers.push_back(&b);
  bar.bits = static_cast<u64>(kMagic) << 32 | (m.barriers.size() - 1);
}

void barrier_init_fence() {
  Thread& t = self();
  for (Barrier* b : t.cta->mbarriers)
    if (b->by == &t) b->fenced = true;
  tick(t);
  preempt();
}

// The first copy gives the barrier an agent. When a CTA has used up its share, copies go without one: accesses that nothing orders
// after them are then found only while they are in flight.
Actor copy_actor(Thread& thread, Barrier& b, const char* what) {
  Machine& m = *machine;
  if (b.agent == ~0u) {
    Cta& cta = *b.cta;
    u32 index = cta.slot * m.barriers_per_cta + static_cast<u32>(cta.copy_barriers.size());
    if (cta.copy_barriers.size() < m.barriers_per_cta) {
      cta.copy_barriers.push_back(&b);
      b.agent = m.first_barrier + index;
      b.base = m.barrier_base[index] - b.phase;
    } else {
      b.agent = unclocked_agent();
    }
  }
  return async_actor(thread, b.agent, b.agent == unclocked_agent() ? 0 : b.base + b.phase + 1, what);
}

Barrier& barrier_at(Cta& cta, u32 offset, bool beyond_generic) {
  Machine& m = *machine;
  u64 bits;
  memcpy(&bits, cta.memory + offset, sizeof bits);
  u32 index = static_cast<u32>(bits);
  if (bits >> 32 != kMagic || index >= m.barriers.size() || m.barriers[index]->cta != &cta || m.barriers[index]->offset != offset)
    fail("there is no initialised mbarrier at %s", describe(cta.region, offset).c_str());
  Barrier& b = *m.barriers[index];
  if (current && self().clock[b.initialiser] < b.initialised)
    fail("race: mbarrier %s is used, and nothing orders that after its mbar_init", describe(cta.region, offset).c_str());
  if (beyond_generic && !b.fenced)
    fail("mbarrier %s is used by another cta or a copy, without fence_mbar_init after its mbar_init",
         describe(cta.region, offset).c_str());
  return b;
}

static Barrier& own_barrier(const Mbar& bar, const char* what) {
  Cta& cta = own_cta(&bar, sizeof bar, what);
  return barrier_at(cta, offset_in(cta, &bar), false);
}

void barrier_arrived(Barrier& b) {
  if (!b.pending)
    fail("mbarrier %s: more than its %u arrivals in phase %u", describe(b.cta->region, b.offset).c_str(), b.expected, b.phase);
  --b.pending;
  complete_phase(b);
}

void barrier_complete(Barrier& b, u32 bytes) {
  b.transactions -= bytes;
  if (b.transactions < -kMaxTransactions)
    fail("mbarrier %s: transaction count underflow", describe(b.cta->region, b.offset).c_str());
  complete_phase(b);
}

void barrier_arrive(Mbar& bar, u32 expect_bytes) {
  preempt();
  Barrier& b = own_barrier(bar, "mbar_arrive");
  release(b.arriving, self(), Reach::cta);
  b.transactions += expect_bytes;
  if (b.transactions > kMaxTransactions)
    fail("mbarrier %s: %lld bytes expected, at most %lld", describe(b.cta->region, b.offset).c_str(), b.transactions,
         kMaxTransactions);
  barrier_arrived(b);
}

void barrier_arrive_remote(Mbar& bar, u32 rank) {
  Thread& t = self();
  u32 offset = offset_in(own_cta(&bar, sizeof bar, "mbar_arrive_remote"), &bar);
  preempt();
  Cta& cta = remote_cta(rank, "mbar_arrive_remote");
  Barrier& b = barrier_at(cta, offset, &cta != t.cta);
  if (&cta != t.cta) touch_remote(cta, t.agent, t.clock[t.agent]);
  if (t.remote_fence) publish(b.arriving, *t.remote_fence);
  barrier_arrived(b);
}

// The thread tests again when it runs: if the barrier has moved on by two phases meanwhile, it misses its phase, as on the device.
void barrier_wait(Mbar& bar, u32 parity, bool cluster) {
  if (parity > 1) fail("mbar_wait: parity %u", parity);
  preempt();
  Barrier& b = own_barrier(bar, "mbar_wait");
  if (counters::on) {
    counters::warp_event("mbar_wait", (b.phase & 1) == parity);
    if (cluster) counters::warp_event("fence.acquire.sync_restrict");
  }
  while ((b.phase & 1) == parity) {
    b.waiting.push_back(&self());
    block(waits_for, &b, parity);
  }
  acquire(self(), b.completed, cluster);
}

}  // namespace kitsune::emulator
