// From a launch to running fibers, and back.
//
// Comes in: geometry, body, seed. Goes out: a Result. Invariant: clusters start in order; all CTAs of a cluster start together. A
// cooperative launch starts everything; otherwise the seed decides how many clusters are resident, and the next one takes the slot
// (memory, stacks, agents) of one that has ended, with clocks that go on.

#include <fenv.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "counters.h"
#include "state.h"

namespace kitsune::emulator {

namespace {

// Shared memory of `ctas` CTAs, aligned to a window so that an address tells its CTA.
char* shared_windows(u32 ctas) {
  static char* base = nullptr;
  static u32 mapped = 0;
  if (mapped < ctas) {
    size_t bytes = static_cast<size_t>(ctas + 1) * kWindow;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    if (base) munmap(base, static_cast<size_t>(mapped) * kWindow);
    base = reinterpret_cast<char*>((reinterpret_cast<size_t>(p) + kWindow - 1) & ~size_t{kWindow - 1});
    mapped = ctas;
  }
  return base;
}

// Kernels keep subnormal numbers and round to nearest, as a device does by default; XLA flushes them on the threads that call us.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    fegetenv(&callers_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { fesetenv(&callers_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  fenv_t callers_;
};

std::string invalid(const Launch& l) {
  if (!l.grid || !l.cluster || !l.block) return "grid, block and cluster must not be empty";
  if (l.block % 32 || l.block > 1024) return format("a block has a multiple of 32 threads, at most 1024: %u", l.block);
  if (l.grid % l.cluster) return format("a grid of %u is not a multiple of the cluster size %u", l.grid, l.cluster);
  if (l.cluster > 16) return format("a cluster has at most 16 ctas: %u", l.cluster);
  if (l.shared_bytes > kMaxShared) return format("%u bytes of shared memory, a cta has at most %u", l.shared_bytes, kMaxShared);
  return "";
}

// kLaunchRegisters of a block that is known at run time only.
constexpr u32 launch_registers(u32 block) { return 65536 / block < 255 ? 65536 / block / 8 * 8 : 255; }
static_assert(launch_registers(384) == kLaunchRegisters<384> && launch_registers(128) == kLaunchRegisters<128>);

void start_thread(Cta& cta, u32 index) {
  Machine& m = *machine;
  u32 slot = cta.slot * m.launch.block + index;
  Thread& t = m.threads[slot];
  u32* clock = t.clock;
  char* stack = t.stack;
  u32 agent = t.agent;
  t = Thread();
  t.clock = clock;
  t.stack = stack;
  t.agent = agent;
  t.thread = index;
  t.lane = index % 32;
  t.block = cta.id;
  t.rank = cta.rank;
  t.cta = &cta;
  t.warp = &cta.warps[index / 32];
  t.warp->lanes[t.lane] = &t;
  t.warpgroup = &cta.warpgroups[index / 128];
  t.wgmma_issued = t.wgmma_waited = t.warpgroup->issued;
  t.registers = m.launch.registers;
  // Stack tops on different cache lines: aligned stacks would share a few sets of the cache.
  size_t skew = index % 61 * 128;
  fiber_prepare(t.fiber, stack, m.options.stack_bytes - skew, thread_entry);
  make_ready(&t);
}

// Threads of a new CTA know nothing of others; their own clocks go on where the slot's former threads left them.
void reset_clocks(Cta& cta) {
  Machine& m = *machine;
  u32 rows = m.lane_clocks ? m.launch.block : m.launch.block / 32, stride = m.lane_clocks ? 1 : 32;
  for (u32 i = 0; i < rows; ++i) {
    Thread& t = m.threads[cta.slot * m.launch.block + i * stride];
    u32 own = t.clock[t.agent] + 1;
    memset(t.clock, 0, m.agents * sizeof(u32));
    t.clock[t.agent] = own;
    m.acquired[t.agent] = 0;
  }
}

void start_cta(Cluster& cluster, u32 rank) {
  Machine& m = *machine;
  u32 slot = cluster.slot * m.launch.cluster + rank, groups = (m.launch.block + 127) / 128;
  std::vector<u32> issued(groups, 0);
  if (m.ctas[slot])
    for (u32 g = 0; g < groups; ++g) issued[g] = m.ctas[slot]->warpgroups[g].issued;
  m.ctas[slot] = std::make_unique<Cta>();
  Cta& cta = *m.ctas[slot];
  cta.cluster = &cluster;
  cta.rank = rank;
  cta.id = cluster.id * m.launch.cluster + rank;
  cta.slot = slot;
  cta.live = m.launch.block;
  cta.memory = m.shared + static_cast<size_t>(slot) * kWindow;
  memset(cta.memory, 0xff, kReserved + m.launch.shared_bytes);  // NaN in every format
  region_init(cta.region, cta.memory, kReserved + m.launch.shared_bytes);
  cta.region.cta = &cta;
  cta.warps.resize(m.launch.block / 32);
  for (Warp& warp : cta.warps) warp.bucket = m.random.below(m.buckets);
  for (u32 g = 0; g < groups; ++g) {
    cta.warpgroups.emplace_back();
    Warpgroup& group = cta.warpgroups.back();
    group.cta = &cta;
    group.agent = m.first_warpgroup + slot * groups + g;
    group.first = group.issued = group.landed = issued[g];
  }
  cluster.ctas.push_back(&cta);
  reset_clocks(cta);
  for (u32 i = 0; i < m.launch.block; ++i) start_thread(cta, i);
  cluster.live += m.launch.block;
  m.live += m.launch.block;
}

// Threads, or warps where there are too many threads, then warpgroups, then mbarriers.
void number_agents() {
  Machine& m = *machine;
  u32 ctas = m.slots * m.launch.cluster, threads = ctas * m.launch.block, groups = ctas * ((m.launch.block + 127) / 128);
  // A kernel has some tens of mbarriers; with many resident CTAs clocks for all of them would be longer than those for threads.
  m.barriers_per_cta = ctas <= 16 ? 64 : 16;
  size_t others = groups + static_cast<size_t>(ctas) * m.barriers_per_cta + 1;
  m.lane_clocks = (threads + others) * threads * sizeof(u32) <= m.options.clock_bytes;
  u32 rows = m.lane_clocks ? threads : threads / 32;
  m.first_warpgroup = rows;
  m.first_barrier = rows + groups;
  m.agents = static_cast<u32>((rows + others + 15) & ~size_t{15});
  m.barrier_base.assign(static_cast<size_t>(ctas) * m.barriers_per_cta, 0);
  m.acquired.assign(rows, 0);
  for (auto& fences : m.fences) fences.resize(rows);
  auto* clocks = static_cast<u32*>(arena_allocate(static_cast<size_t>(rows) * m.agents * sizeof(u32)));
  m.threads.resize(threads);
  char* stacks = fiber_stacks(threads, m.options.stack_bytes);
  for (u32 i = 0; i < threads; ++i) {
    Thread& t = m.threads[i];
    t.agent = m.lane_clocks ? i : i / 32;
    t.clock = clocks + static_cast<size_t>(t.agent) * m.agents;
    t.stack = stacks + static_cast<size_t>(i) * m.options.stack_bytes;
  }
}

// How many clusters are resident: all of a cooperative launch; else what the seed says, up to 1024 or, rarely, 2048 threads (the
// cost of a clock grows with them). Races between clusters are found whether they run together or not.
u32 resident_clusters(Machine& m) {
  u32 clusters = m.launch.grid / m.launch.cluster;
  if (m.launch.cooperative) return clusters;
  u32 most = (m.random.below(4) ? 1024 : 2048) / (m.launch.cluster * m.launch.block);
  if (most < 1) most = 1;
  if (most > clusters) most = clusters;
  return 1 + m.random.below(most);
}

u64 steady_ns(std::chrono::steady_clock::time_point at) {
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count());
}
u64 device_ns = 0;  // when the latest launch ended, by the simulated device's clock

}  // namespace

// Fills free slots with the next clusters.
void start_clusters() {
  Machine& m = *machine;
  u32 clusters = m.launch.grid / m.launch.cluster;
  for (u32 slot = 0; slot < m.slots && m.next_cluster < clusters; ++slot) {
    if (m.clusters[slot] && m.clusters[slot]->live) continue;
    m.clusters[slot] = std::make_unique<Cluster>();
    Cluster& cluster = *m.clusters[slot];
    cluster.id = m.next_cluster++;
    cluster.slot = slot;
    for (u32 rank = 0; rank < m.launch.cluster; ++rank) start_cta(cluster, rank);
  }
}

Result run(const Launch& launch, const std::function<void()>& body, const Options& options) {
  Result result;
  result.message = invalid(launch);
  if (!result.message.empty()) {
    result.ok = false;
    return result;
  }
  auto started = std::chrono::steady_clock::now();
  DefaultArithmetic arithmetic;
  arena_reset();
  Machine m;
  machine = &m;
  m.started_ns = std::max(steady_ns(started), device_ns);
  m.launch = launch;
  if (!m.launch.registers) m.launch.registers = launch_registers(launch.block);
  m.options = options;
  m.body = &body;
  m.random.state = options.seed * 7919 + 13;
  m.delay_mode = m.random.below(4);
  m.buckets = m.random.below(2) ? 8 : 1;
  m.slots = resident_clusters(m);
  m.threads_per_cta = launch.block;
  m.clusters.resize(m.slots);
  m.ctas.resize(static_cast<size_t>(m.slots) * launch.cluster);
  dimensions = {launch.grid, launch.block, launch.cluster};
  m.shared = shared_windows(m.slots * launch.cluster);
  number_agents();
  register_pages();
  if (counters::on) counters::begin(launch, options.seed, counting_options());
  start_clusters();
  result.ok = schedule();
  if (counters::on) counters::end(result.ok);
  result.message = m.error;
  for (const Thread& t : m.threads)
    if (t.cta && fiber_overflowed(t.stack)) {
      result.ok = false;
      result.message = format("stack overflow of cta %u thread %u: more than %u bytes", t.block, t.thread, options.stack_bytes);
    }
  device_ns = m.started_ns + m.step + 1;
  result.steps = m.step;
  result.copies = m.copies;
  result.flops = m.flops;
  result.delay_mode = m.delay_mode;
  result.lane_clocks = m.lane_clocks;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  machine = nullptr;
  return result;
}

}  // namespace kitsune::emulator
