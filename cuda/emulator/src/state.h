// The emulated machine: threads, warps, warpgroups, CTAs, clusters, and the clocks that order them.
//
// Comes in: a launch. Goes out: the records that every file of this folder works on. Invariant: one OS thread touches them;
// everything here lives for one launch (arena.h), except the stacks and the host memory behind shared memory.
//
// Order is kept as vector clocks (Mattern 1989; races as in FastTrack, Flanagan and Freund 2009). An agent is whatever accesses
// memory on its own time: a thread, a warpgroup's queue of wgmma, the copies that complete on an mbarrier.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/runtime.h"
#include "fiber.h"
#include "random.h"
#include "shadow.h"

namespace kitsune::emulator {

// Host memory per CTA: 256 KB is what the 14-bit address field of a wgmma descriptor reaches, in units of 16 bytes.
constexpr u32 kWindow = 1u << 18;
constexpr u32 kReserved = 1024;     // of each CTA, for the system (CUDA C++ Programming Guide, compute capability 9.0)
constexpr u32 kMaxShared = 232448;  // 227 KB, the opt-in limit of compute capability 9.0

struct Cta;
struct Cluster;
struct Thread;

// What a thread knows of ordinary stores by other CTAs, as times: stores of others to their own shared memory, and to anything
// else, are visible up to then. A vector clock does not say so: order by arrivals of CTA scope is no visibility beyond the CTA.
struct Scope {
  u64 own = 0, all = 0;
  void raise(const Scope& other) {
    if (other.own > own) own = other.own;
    if (other.all > all) all = other.all;
  }
};

// Everything that releases published to a synchronisation object.
struct Clock {
  u32* at = nullptr;
  u64 version = 0;  // time of the latest change
  Scope scope;      // what the releasing threads knew
  Scope released;   // what a cluster-scope acquire of it adds
};

struct Warp {
  Thread* lanes[32];
  void* slots[32];  // what each lane brought to the collective operation
  u32 arrived = 0;
  const char* operation = nullptr;
  u32 bucket = 0;
  u32 of_block = 0;
};

struct Accumulators;  // wgmma.cc
struct Wgmma;
void delete_wgmma(Wgmma* operation);
struct WgmmaDeleter {
  void operator()(Wgmma* operation) const { delete_wgmma(operation); }
};
struct Barrier;

struct Warpgroup {
  Cta* cta = nullptr;
  u32 agent = 0;
  u32 first = 0, issued = 0, landed = 0;  // numbers of operations; `queue` holds those from `first` on
  std::deque<std::unique_ptr<Wgmma, WgmmaDeleter>> queue;
  u64 last_due = 0;
  std::vector<Thread*> waiting;
  std::vector<u32> register_counts;  // of each setmaxnreg so far, in order: all threads execute the same ones
};

struct ActiveAccumulators {
  std::shared_ptr<Accumulators> tile;
  float* registers;
  u32 group;
};

struct Piece {
  Region* region;
  size_t offset, bytes;
  bool add;
};
// A thread's asynchronous copies between two commits, bulk or cp.async.
struct CopyGroup {
  std::vector<Piece> sources, targets;  // still marked in flight: whoever waits takes the marks away
  u32 reading = 0, writing = 0;         // copies that have not read all their source, or not written all
  Barrier* arrive = nullptr;            // cp.async.mbarrier.arrive: completes on it instead of on a wait
  Thread* waiter = nullptr;
};

struct Thread : Identity {
  Fiber fiber;
  char* stack = nullptr;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  Warpgroup* warpgroup = nullptr;
  enum State { ready, blocked, done } state = ready;
  std::string (*describe)(const Thread&) = nullptr;  // what it waits for
  const void* object = nullptr;
  u64 argument = 0;
  // order
  u32 agent = 0;
  u32* clock = nullptr;
  u32* proxy_clock[2] = {nullptr, nullptr};  // what it knew at its last proxy fence: shared, global
  bool learned = true;                       // since the warp's last syncwarp
  Scope scope;
  Clock* remote_fence = nullptr;  // what it knew at its last fence_release_own_shared
  u64 fenced_all = 0;             // time up to which its stores to anything but its own shared memory are released beyond the CTA
  // wgmma
  bool wgmma_fenced = false;
  u32 wgmma_issued = 0, wgmma_waited = 0;
  std::vector<u32> wgmma_groups;  // issued counts at each commit
  std::vector<ActiveAccumulators> active;
  // copies
  std::shared_ptr<CopyGroup> bulk_open, copy_open;
  std::deque<std::shared_ptr<CopyGroup>> bulk_groups, copy_groups;
  u32 registers = 0, register_changes = 0;
  bool at_cluster_barrier = false;
};

struct Barrier {  // an mbarrier; the 8 bytes in shared memory hold its number
  Cta* cta;
  u32 offset;
  u32 expected, pending;
  i64 transactions = 0;
  u32 phase = 0;
  // The agent of the copies that complete here, once there is one; its clock is base + phase.
  u32 agent = ~0u, base = 0;
  u32 initialiser, initialised;  // agent and clock of mbar_init
  bool fenced = false;           // fence_mbar_init came after
  Thread* by = nullptr;
  Clock arriving, completed;
  std::vector<Thread*> waiting;
};

struct NamedBarrier {
  u32 threads = 0, arrived = 0;
  u32 of_warp[32] = {};
  Clock clock;
  std::vector<Thread*> waiting;
};

struct Cta {
  Cluster* cluster;
  u32 id, rank, slot;  // slot: which of the resident CTAs
  u32 live;
  char* memory;
  Region region;
  std::vector<Warp> warps;
  std::deque<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
  std::vector<std::pair<u32, std::string>> names;  // by offset
  std::vector<Barrier*> mbarriers, copy_barriers;  // copy_barriers: those with an agent
  i64 free_registers = 0;                          // of those that the launch gave the CTA: what its threads have given back
  std::vector<Thread*> waiting_registers;
  u32 in_flight = 0;                    // asynchronous operations on its memory
  std::unordered_map<u32, u32> remote;  // agents of other CTAs that accessed its memory: their latest clock
  Clock exits;
};

struct Cluster {
  u32 id, slot;
  std::vector<Cta*> ctas;
  u32 live = 0, arrived = 0;
  Clock clock;
  std::vector<Thread*> waiting;
};

struct Flag {
  Clock clock;
  std::vector<Thread*> waiting;
};

struct Event {
  u64 due, order;
  std::function<void()> run;
  bool operator<(const Event& other) const { return due != other.due ? due > other.due : order > other.order; }
};

struct Machine {
  Launch launch;
  Options options;
  Random random;
  const std::function<void()>* body = nullptr;
  // agents: threads or warps, then warpgroups, then mbarriers
  bool lane_clocks = true;
  u32 slots = 0, threads_per_cta = 0, agents = 0, first_warpgroup = 0, first_barrier = 0, barriers_per_cta = 0;
  std::vector<u32> barrier_base;            // of each mbarrier agent: its latest clock
  std::vector<u64> acquired;                // of each thread agent: the version of the clock that it acquired last
  std::vector<std::vector<u32>> fences[2];  // of each thread agent: its clock at each proxy fence (shared, global)
  std::vector<Thread> threads;
  std::vector<std::unique_ptr<Cluster>> clusters;  // by slot
  std::vector<std::unique_ptr<Cta>> ctas;          // by slot
  std::vector<std::unique_ptr<Barrier>> barriers;
  std::unordered_map<const void*, Flag> flags;
  u32 polling = 0;
  char* shared = nullptr;
  u32 next_cluster = 0, live = 0;
  // schedule
  Fiber main;
  std::vector<Thread*> ready[8];
  u32 ready_count = 0, buckets = 1;
  std::vector<Event> events;
  u64 step = 0, time = 1, event_order = 0, copies = 0;
  u64 started_ns = 0;  // by the simulated device's clock
  double flops = 0;
  u32 delay_mode = 0;
  bool failed = false;
  std::string error;
};

extern Machine* machine;
inline Thread& self() { return *static_cast<Thread*>(current); }

// --- scheduler.cc
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void preempt();  // a point at which the schedule may go on with another thread
void block(std::string (*describe)(const Thread&), const void* object, u64 argument);
void wake_all(std::vector<Thread*>& threads);
void make_ready(Thread* thread);
u64 random_delay();
void post(u64 due, std::function<void()> run);
void thread_entry();
bool schedule();  // runs fibers until all have ended, or one has failed: false
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));

// --- launch.cc
void start_clusters();

// --- clocks.cc
enum class Reach { cta, remote, wide };  // remote: cluster scope, but only the own shared memory (fence_release_own_shared)
void release(Clock& clock, Thread& thread, Reach reach);
void publish(Clock& to, const Clock& fenced);  // a relaxed arrival behind a fence
void acquire(Thread& thread, const Clock& clock, bool wide);
// The same for a thread that has waited since its own release of the clock: the clock holds all that it knew.
void acquire_after_release(Thread& thread, const Clock& clock, bool wide);
void join(u32* into, const u32* from);
void tick(Thread& thread);
Actor actor(Thread& thread, const char* what);
Actor async_actor(Thread& thread, u32 agent, u32 clock, const char* what);
bool proxy_fenced(const Access& write, const Actor& actor, bool global);
std::string agent_name(u32 agent);
inline u32 unclocked_agent() { return machine->agents - 1; }  // its clock stays 0, which everybody knows
Cta* agent_cta(u32 agent);

// --- shared_memory.cc, global_memory.cc
Cta& own_cta(const void* p, u32 bytes, const char* what);  // fails unless p lies in the caller's shared memory
Cta& remote_cta(u32 rank, const char* what);               // fails unless rank is a live CTA of the cluster
inline u32 offset_in(const Cta& cta, const void* p) { return static_cast<u32>(static_cast<const char*>(p) - cta.memory); }
void check_load(const void* p, u32 bytes);
void check_store(void* p, u32 bytes);
void touch_remote(Cta& cta, u32 agent, u32 clock);
Region& global_region(const void* p, size_t bytes, const char* what);
void register_pages();  // the registered buffers become the launch's regions
void thread_exit();

// --- mbarrier.cc
Barrier& barrier_at(Cta& cta, u32 offset, bool beyond_generic);  // used by a copy or another CTA
void barrier_complete(Barrier& barrier, u32 bytes);
void barrier_arrived(Barrier& barrier);
Actor copy_actor(Thread& thread, Barrier& barrier, const char* what);  // of a copy that completes on the barrier

// --- warp.cc: true for the last lane, which does the work for all before warp_release
bool warp_meet(const char* operation, void* slot);
void warp_release();
void barriers_after_exit(Cta& cta);  // barriers.cc

void thread_exit_registers(Thread& thread);
void thread_exit_wgmma(Thread& thread);
void thread_exit_copies(Thread& thread);

}  // namespace kitsune::emulator
