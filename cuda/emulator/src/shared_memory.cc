// Ordinary loads and stores in shared memory, own and remote, and the end of threads and CTAs.
//
// Comes in: host pointers into the window of a CTA. Goes out: checks in the CTA's shadow. Invariant: only remote functions reach
// beyond the own CTA, and every such access is remembered until the CTA's exit has been ordered after it.

#include "counters.h"
#include "state.h"

namespace kitsune::emulator {

void* shared_base(size_t bytes) {
  if (bytes > machine->launch.shared_bytes)
    fail("the kernel's shared memory has %zu bytes, it was launched with %u", bytes, machine->launch.shared_bytes);
  return self().cta->memory + kReserved;
}

Cta& own_cta(const void* p, u32 bytes, const char* what) {
  Cta& cta = *self().cta;
  size_t offset = static_cast<size_t>(static_cast<const char*>(p) - cta.memory);
  if (offset >= kReserved && offset + bytes <= cta.region.bytes) return cta;
  size_t window = static_cast<size_t>(static_cast<const char*>(p) - machine->shared) / kWindow;
  if (window < machine->ctas.size())
    fail("%s: %p (+%u) is outside this cta's %u bytes of shared memory, in the window of slot %zu at offset %zd", what, p, bytes,
         machine->launch.shared_bytes, window, static_cast<ssize_t>(offset) - static_cast<ssize_t>(kReserved));
  fail("%s: %p is not in shared memory", what, p);
}

Cta& remote_cta(u32 rank, const char* what) {
  Cluster& cluster = *self().cta->cluster;
  if (rank >= cluster.ctas.size()) fail("%s: rank %u of a cluster of %zu", what, rank, cluster.ctas.size());
  Cta& cta = *cluster.ctas[rank];
  if (!cta.live) fail("%s: cta %u (rank %u) has exited", what, cta.id, rank);
  return cta;
}

u32 shared_offset(const void* p) { return offset_in(own_cta(p, 1, "shared address"), p); }

void name_object(const void* p, const char* text) {
  Cta& cta = own_cta(p, 1, "name");
  u32 offset = offset_in(cta, p);
  for (auto& entry : cta.names)
    if (entry.first == offset) {
      entry.second = text;
      return;
    }
  cta.names.emplace_back(offset, text);
}

static void check_aligned(const void* p, u32 bytes, const char* what) {
  if (reinterpret_cast<size_t>(p) % bytes) fail("%s of %u bytes at %p is not aligned", what, bytes, p);
}

void enter_section(u32 stage, u32 role) {
  if (counters::on) counters::section(stage, role);
}
void finish_section() {
  if (counters::on) counters::finishing();
}

void load_shared(const void* p, u32 bytes, const Site& at) {
  check_load(p, bytes);
  if (counters::on) counters::access(counters::Op::ld_shared, p, bytes, at);
}

void store_shared(void* p, u32 bytes, const Site& at) {
  check_store(p, bytes);
  if (counters::on) counters::access(counters::Op::st_shared, p, bytes, at);
}

void check_load(const void* p, u32 bytes) {
  Cta& cta = own_cta(p, bytes, "ld_shared");
  check_aligned(p, bytes, "ld_shared");
  check_read(cta.region, offset_in(cta, p), bytes, actor(self(), "ld_shared"));
}

void check_store(void* p, u32 bytes) {
  Cta& cta = own_cta(p, bytes, "st_shared");
  check_aligned(p, bytes, "st_shared");
  Actor a = actor(self(), "st_shared");
  a.flags |= kOwnShared;
  check_write(cta.region, offset_in(cta, p), bytes, a);
}

void touch_remote(Cta& cta, u32 agent, u32 clock) {
  u32& latest = cta.remote[agent];
  if (latest < clock) latest = clock;
}

void* remote_load(const void* p, u32 rank, u32 bytes, const Site& at) {
  Thread& t = self();
  u32 offset = offset_in(own_cta(p, bytes, "ld_cluster"), p);
  check_aligned(p, bytes, "ld_cluster");
  if (counters::on) counters::access(counters::Op::ld_cluster, p, bytes, at);
  preempt();
  Cta& cta = remote_cta(rank, "ld_cluster");
  check_read(cta.region, offset, bytes, actor(t, "ld_cluster"));
  if (&cta != t.cta) touch_remote(cta, t.agent, t.clock[t.agent]);
  return cta.memory + offset;
}

void* remote_store(void* p, u32 rank, u32 bytes, const Site& at) {
  Thread& t = self();
  u32 offset = offset_in(own_cta(p, bytes, "st_cluster"), p);
  check_aligned(p, bytes, "st_cluster");
  if (counters::on) counters::access(counters::Op::st_cluster, p, bytes, at);
  preempt();
  Cta& cta = remote_cta(rank, "st_cluster");
  Actor a = actor(t, "st_cluster");
  if (&cta == t.cta) a.flags |= kOwnShared;
  check_write(cta.region, offset, bytes, a);
  if (&cta != t.cta) touch_remote(cta, t.agent, t.clock[t.agent]);
  return cta.memory + offset;
}

// --- the end

static void cta_exit(Cta& cta) {
  if (cta.in_flight) fail("the cta exits with %u asynchronous operations on its shared memory in flight", cta.in_flight);
  for (Barrier* b : cta.mbarriers)
    if (b->transactions)
      fail("the cta exits while mbarrier %s still expects %lld bytes: expect_tx and the copies disagree",
           describe(cta.region, b->offset).c_str(), b->transactions);
  for (auto [agent, clock] : cta.remote)
    if (cta.exits.at[agent] < clock)
      fail("the cta exits, and nothing orders that after an access to its shared memory by %s: cluster_sync is missing",
           agent_name(agent).c_str());
}

void thread_exit() {
  Machine& m = *machine;
  Thread& t = self();
  if (counters::on) counters::exits(t);
  thread_exit_registers(t);
  thread_exit_wgmma(t);
  thread_exit_copies(t);
  Cta& cta = *t.cta;
  if (t.warp->arrived) fail("the thread exits while lanes of its warp wait in %s", t.warp->operation);
  release(cta.exits, t, Reach::cta);
  t.state = Thread::done;
  --m.live;
  --cta.cluster->live;
  if (--cta.live == 0) {
    t.state = Thread::ready;  // for messages
    cta_exit(cta);
    t.state = Thread::done;
  }
  // Barriers over a CTA or a cluster wait for those who have not exited.
  barriers_after_exit(cta);
}

}  // namespace kitsune::emulator
