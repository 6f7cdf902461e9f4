// Barriers over warps of a CTA, over a CTA, over a cluster; the register budget of setmaxnreg.
//
// Comes in: threads, one by one. Goes out: all of them together, knowing what each knew. Invariant: barriers count threads, and
// whole warps take part.

#include "counters.h"
#include "state.h"

namespace kitsune::emulator {

namespace {

std::string waits_for_named(const Thread& t) {
  auto& b = *static_cast<const NamedBarrier*>(t.object);
  return format("barrier %u: %u of %u threads have arrived", static_cast<u32>(t.argument), b.arrived, b.threads);
}

void complete(Cta& cta, NamedBarrier& b, u32 id) {
  for (u32 w = 0; w < cta.warps.size(); ++w) {
    if (b.of_warp[w] % 32) fail("barrier %u: only %u lanes of warp %u take part", id, b.of_warp[w] % 32, w);
    b.of_warp[w] = 0;
  }
  b.arrived = 0;
  for (Thread* t : b.waiting) acquire_after_release(*t, b.clock, false);
  wake_all(b.waiting);
}

std::string waits_for_cluster(const Thread& t) {
  auto& c = *static_cast<const Cluster*>(t.object);
  return format("cluster barrier: %u of %u threads have arrived", c.arrived, c.live);
}

void complete(Cluster& c) {
  c.arrived = 0;
  for (Cta* cta : c.ctas)
    for (u32 i = 0; i < machine->launch.block; ++i)
      machine->threads[cta->slot * machine->launch.block + i].at_cluster_barrier = false;
  for (Thread* t : c.waiting) acquire_after_release(*t, c.clock, true);
  wake_all(c.waiting);
}

void arrive(NamedBarrier& b, u32 id, u32 threads, bool wait) {
  Thread& t = self();
  if (counters::on) {
    counters::warp_event(wait ? "bar.sync" : "bar.arrive");
    counters::together();
  }
  if (b.arrived && b.threads != threads) fail("barrier %u: used with %u and with %u threads", id, b.threads, threads);
  b.threads = threads;
  release(b.clock, t, Reach::cta);
  ++b.of_warp[t.thread / 32];
  if (++b.arrived == threads) {
    complete(*t.cta, b, id);
    if (wait) acquire(t, b.clock, false);
  } else if (wait) {
    b.waiting.push_back(&t);
    block(waits_for_named, &b, id);
    return;
  }
  preempt();
}

}  // namespace

void named_barrier(u32 id, u32 threads, bool wait) {
  if (id < 1 || id > 15) fail("named barriers are 1 to 15: %u", id);
  if (threads == 0 || threads % 32 || threads > machine->launch.block)
    fail("barrier %u: %u threads, a multiple of 32 and at most the cta's %u", id, threads, machine->launch.block);
  arrive(self().cta->barriers[id], id, threads, wait);
}

void block_barrier() { arrive(self().cta->barriers[0], 0, self().cta->live, true); }

void barriers_after_exit(Cta& cta) {
  NamedBarrier& b = cta.barriers[0];
  if (b.arrived && b.arrived == cta.live) complete(cta, b, 0);
  if (b.arrived) b.threads = cta.live;
  Cluster& c = *cta.cluster;
  if (c.arrived && c.arrived == c.live) complete(c);
}

void cluster_barrier_arrive() {
  Thread& t = self();
  Cluster& c = *t.cta->cluster;
  if (counters::on) counters::together();
  if (t.at_cluster_barrier) fail("cluster_arrive twice without cluster_wait");
  t.at_cluster_barrier = true;
  release(c.clock, t, Reach::wide);
  if (++c.arrived == c.live) complete(c);
  preempt();
}

void cluster_barrier_wait() {
  Thread& t = self();
  Cluster& c = *t.cta->cluster;
  if (t.at_cluster_barrier) {
    c.waiting.push_back(&t);
    block(waits_for_cluster, &c, 0);
    return;
  }
  acquire(t, c.clock, true);
}

// setmaxnreg moves registers within what the launch gave the CTA, registers of a thread times threads (PTX ISA, setmaxnreg: the
// "per-CTA-register-pool"): what the SM has beyond that stays unused, and the pool starts empty. A warp that gives registers back
// never waits; one that asks waits until others have given enough for all its lanes.
void set_registers(u32 count, bool increase) {
  if (!warp_meet(increase ? "setmaxnreg.inc" : "setmaxnreg.dec", &count)) return;
  Thread& t = self();
  Cta& cta = *t.cta;
  for (void* lane : t.warp->slots)
    if (*static_cast<u32*>(lane) != count) fail("setmaxnreg: the lanes of a warp name different counts");
  std::vector<u32>& counts = t.warpgroup->register_counts;
  if (t.register_changes == counts.size()) counts.push_back(count);
  if (const u32 other = counts[t.register_changes]; other != count)
    fail("setmaxnreg to %u: another warp of the warpgroup sets %u; all set the same", count, other);
  if (increase ? count < t.registers : count > t.registers)
    fail("setmaxnreg.%s to %u: the thread has %u registers", increase ? "inc" : "dec", count, t.registers);
  const i64 more = 32 * (static_cast<i64>(count) - t.registers);
  while (more > 0 && cta.free_registers < more) {
    cta.waiting_registers.push_back(&t);
    block(
        [](const Thread& w) {
          return format("setmaxnreg.inc from %u to %u: %lld registers of the CTA's %u are free", w.registers,
                        static_cast<u32>(w.argument), w.cta->free_registers, machine->launch.block * machine->launch.registers);
        },
        &cta, count);
  }
  cta.free_registers -= more;
  if (more < 0) wake_all(cta.waiting_registers);
  for (Thread* lane : t.warp->lanes) {
    lane->registers = count;
    ++lane->register_changes;
  }
  warp_release();
  preempt();
}

void thread_exit_registers(Thread& t) {
  const std::vector<u32>& counts = t.warpgroup->register_counts;
  if (t.register_changes != counts.size())
    fail("the thread exits without the setmaxnreg to %u of other warps of its warpgroup", counts[t.register_changes]);
}

}  // namespace kitsune::emulator
