// Vector clocks: what a release publishes, what an acquire learns (see state.h for the model).

#include <algorithm>
#include <cstring>

#include "counters.h"
#include "state.h"

namespace kitsune::emulator {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// SSE2 has no maximum of unsigned integers; the loader picks the clone of this machine.
#define KITSUNE_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KITSUNE_VECTOR_CLONES
#endif

KITSUNE_VECTOR_CLONES static void maximum(u32* __restrict into, const u32* __restrict from, u32 n) {
  for (u32 i = 0; i < n; ++i) into[i] = into[i] > from[i] ? into[i] : from[i];
}

void join(u32* into, const u32* from) { maximum(into, from, machine->agents); }

void tick(Thread& thread) { ++thread.clock[thread.agent]; }

void release(Clock& clock, Thread& thread, Reach reach) {
  if (!clock.at) clock.at = static_cast<u32*>(arena_allocate(machine->agents * sizeof(u32)));
  join(clock.at, thread.clock);
  u64 now = ++machine->time;
  clock.scope.raise(thread.scope);
  if (reach == Reach::wide) clock.released.raise({now, now});
  if (reach == Reach::remote) clock.released.raise({now, thread.fenced_all});
  clock.version = now;
  tick(thread);
}

void publish(Clock& to, const Clock& fenced) {
  if (!to.at) to.at = static_cast<u32*>(arena_allocate(machine->agents * sizeof(u32)));
  join(to.at, fenced.at);
  to.scope.raise(fenced.scope);
  to.released.raise(fenced.released);
  to.version = ++machine->time;
}

void acquire(Thread& thread, const Clock& clock, bool wide) {
  if (!clock.at) return;
  u64& latest = machine->acquired[thread.agent];
  if (latest != clock.version) {  // the lanes of a warp may share a clock
    latest = clock.version;
    join(thread.clock, clock.at);
  }
  thread.scope.raise(clock.scope);
  if (wide) thread.scope.raise(clock.released);
  thread.learned = true;
}

void acquire_after_release(Thread& thread, const Clock& clock, bool wide) {
  if (machine->lane_clocks) {
    u32 own = thread.clock[thread.agent];
    memcpy(thread.clock, clock.at, machine->agents * sizeof(u32));
    thread.clock[thread.agent] = own;
    machine->acquired[thread.agent] = clock.version;
  }
  acquire(thread, clock, wide);
}

Actor actor(Thread& thread, const char* what) {
  return {thread.clock, thread.agent, thread.clock[thread.agent], kGeneric, &thread, what};
}

Actor async_actor(Thread& thread, u32 agent, u32 clock, const char* what) {
  return {thread.clock, agent, clock, kAsync, &thread, what};
}

// The fence stands on the way from the write to the asynchronous access: with the writer, before its release (its clock at the
// fence is then known to the issuer), or with the issuer, after its acquire.
// Within a CTA a fence of either thread stands between. Between CTAs both have one: the writer's, because a fence of another CTA is
// not promised to reach what this one has written, and the reader's, because its copies are no part of the writer's CTA.
bool proxy_fenced(const Access& write, const Actor& actor, bool global) {
  const u32* mine = actor.thread->proxy_clock[global];
  const bool by_reader = mine && mine[write.agent] >= write.clock;
  const bool other = write.agent < machine->first_warpgroup && agent_cta(write.agent) != actor.thread->cta;
  if (by_reader && !(global && other)) return true;
  if (write.agent >= machine->first_warpgroup) return false;
  const auto& fences = machine->fences[global][write.agent];
  auto fence = std::lower_bound(fences.begin(), fences.end(), write.clock);
  const bool by_writer = fence != fences.end() && actor.known[write.agent] > *fence;
  return by_writer && (by_reader || !(global && other));
}

void proxy_fence(bool global) {
  if (counters::on) counters::warp_event(global ? "fence.proxy.async.global" : "fence.proxy.async.shared::cta");
  Thread& t = self();
  machine->fences[global][t.agent].push_back(t.clock[t.agent]);
  u32*& mine = t.proxy_clock[global];
  if (!mine) mine = static_cast<u32*>(arena_allocate(machine->agents * sizeof(u32)));
  memcpy(mine, t.clock, machine->agents * sizeof(u32));
  tick(t);
  preempt();
}

void fence_wide(const char* name) {
  if (counters::on) {
    counters::warp_event(name);
    counters::acquire();
  }
  self().fenced_all = ++machine->time;
  preempt();
}

// The fence replaces what an earlier one held: a thread knows ever more.
void fence_release_own_shared() {
  if (counters::on) counters::warp_event("fence.release.sync_restrict");
  Thread& t = self();
  if (!t.remote_fence) t.remote_fence = new (arena_allocate(sizeof(Clock))) Clock();
  release(*t.remote_fence, t, Reach::remote);
  preempt();
}

Cta* agent_cta(u32 agent) {
  const Machine& m = *machine;
  u32 slot;
  if (agent == unclocked_agent()) return nullptr;
  if (agent < m.first_warpgroup) {
    u32 per_cta = m.first_warpgroup / static_cast<u32>(m.ctas.size());
    slot = agent / per_cta;
  } else if (agent < m.first_barrier) {
    slot = (agent - m.first_warpgroup) / ((m.threads_per_cta + 127) / 128);
  } else {
    slot = (agent - m.first_barrier) / m.barriers_per_cta;
  }
  return m.ctas[slot].get();
}

std::string agent_name(u32 agent) {
  const Machine& m = *machine;
  Cta* cta = agent_cta(agent);
  u32 id = cta ? cta->id : ~0u;
  if (agent < m.first_warpgroup) {
    u32 i = agent % (m.first_warpgroup / static_cast<u32>(m.ctas.size()));
    return m.lane_clocks ? format("cta %u thread %u", id, i) : format("cta %u warp %u", id, i);
  }
  if (agent < m.first_barrier)
    return format("wgmma of cta %u warpgroup %u", id, (agent - m.first_warpgroup) % ((m.threads_per_cta + 127) / 128));
  u32 i = (agent - m.first_barrier) % m.barriers_per_cta;
  if (!cta || i >= cta->copy_barriers.size()) return "an asynchronous copy";
  return "the copy that completes on " + describe(cta->region, cta->copy_barriers[i]->offset);
}

}  // namespace kitsune::emulator
