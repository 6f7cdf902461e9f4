// Which fiber runs next, when asynchronous work lands, how a launch fails.
//
// Comes in: ready threads and events. Goes out: one switch after the other until every thread has ended. Invariant: every choice
// comes from the seed. Threads are chosen at random; half of the seeds prefer some warps for a while, because starvation finds what
// fair schedules do not.

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "state.h"

namespace kitsune::emulator {

Machine* machine = nullptr;
Identity* current = nullptr;
Dimensions dimensions;

namespace {

void to_scheduler() { fiber_switch(self().fiber, machine->main); }

u64 now() { return machine->step; }

}  // namespace

u64 ticks() { return now(); }
u64 nanoseconds() { return machine->started_ns + now(); }

std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

struct LaunchFailed {};

void fail(const char* text, ...) {
  Machine& m = *machine;
  if (!m.failed) {
    m.failed = true;
    char buffer[1024];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(buffer, sizeof buffer, text, arguments);
    va_end(arguments);
    if (current) {
      Thread& t = self();
      m.error = format("cta %u thread %u (warp %u lane %u): ", t.block, t.thread, t.thread / 32, t.lane);
    }
    m.error += buffer;
  }
  if (current) {
    to_scheduler();  // never resumed
    abort();
  }
  throw LaunchFailed();
}

void make_ready(Thread* thread) {
  Machine& m = *machine;
  thread->state = Thread::ready;
  m.ready[m.buckets > 1 ? thread->warp->bucket : 0].push_back(thread);
  ++m.ready_count;
}

void wake_all(std::vector<Thread*>& threads) {
  for (Thread* thread : threads) make_ready(thread);
  threads.clear();
}

void block(std::string (*describe)(const Thread&), const void* object, u64 argument) {
  Thread& t = self();
  t.state = Thread::blocked;
  t.describe = describe;
  t.object = object;
  t.argument = argument;
  to_scheduler();
}

// One in eight: rare enough to be cheap, frequent enough that no window stays closed over a few seeds.
void preempt() {
  if (machine->random.below(8)) return;
  make_ready(&self());
  to_scheduler();
}

u64 random_delay() {
  Machine& m = *machine;
  switch (m.delay_mode) {
    case 0: return m.random.below(4);                                 // at once
    case 1: return m.random.below(400);                               // some time
    case 2: return m.random.below(2) ? 0 : 1000000;                   // at once, or when nothing else can happen
    default: return m.random.below(3) ? m.random.below(100) : 20000;  // a few stragglers
  }
}

void post(u64 due, std::function<void()> run) {
  Machine& m = *machine;
  m.events.push_back({due, m.event_order++, std::move(run)});
  std::push_heap(m.events.begin(), m.events.end());
  ++m.copies;
}

namespace {

void run_events() {
  Machine& m = *machine;
  if (!m.ready_count && !m.events.empty() && m.events.front().due > m.step) m.step = m.events.front().due;
  while (!m.events.empty() && m.events.front().due <= now()) {
    std::pop_heap(m.events.begin(), m.events.end());
    auto event = std::move(m.events.back());
    m.events.pop_back();
    event.run();
  }
}

Thread* choose() {
  Machine& m = *machine;
  u32 bucket = 0;
  if (m.buckets > 1) {
    if (m.random.below(256) == 0)
      for (auto& cta : m.ctas)
        if (cta) cta->warps[m.random.below(static_cast<u32>(cta->warps.size()))].bucket = m.random.below(m.buckets);
    if (m.random.below(16) == 0) bucket = m.random.below(m.buckets);
    while (m.ready[bucket].empty()) bucket = (bucket + 1) % m.buckets;
  }
  auto& ready = m.ready[bucket];
  u32 i = m.random.below(static_cast<u32>(ready.size()));
  Thread* thread = ready[i];
  ready[i] = ready.back();
  ready.pop_back();
  --m.ready_count;
  return thread;
}

// Threads that spin on global memory see plain stores too: poll them when nothing else can run.
bool wake_pollers() {
  Machine& m = *machine;
  bool any = false;
  for (auto& [address, flag] : m.flags) {
    auto waiting = std::move(flag.waiting);
    flag.waiting.clear();
    for (Thread* t : waiting) {
      if (static_cast<i32>(*static_cast<const u32*>(address) - static_cast<u32>(t->argument)) >= 0) {
        make_ready(t);
        --m.polling;
        any = true;
      } else {
        flag.waiting.push_back(t);
      }
    }
  }
  return any;
}

// "0-3, 5": the indices of set bits.
std::string ranges(u32 bits) {
  std::string text;
  for (u32 first = 0; first < 32; ++first) {
    if (!(bits >> first & 1)) continue;
    u32 last = first;
    while (last + 1 < 32 && bits >> (last + 1) & 1) ++last;
    text += format(first == last ? "%s%u" : "%s%u-%u", text.empty() ? "" : ", ", first, last);
    first = last;
  }
  return text;
}

// Who waits for what: one line for each CTA and reason; what many CTAs wait for comes last and once.
std::string deadlock() {
  const Machine& m = *machine;
  struct Waiters {
    std::map<u32, u32> warps;  // of each CTA, as bits
    u32 threads = 0;
  };
  std::map<std::string, Waiters> reasons;
  u32 blocked = 0;
  for (const Thread& t : m.threads) {
    if (!t.cta || t.state != Thread::blocked) continue;
    ++blocked;
    Waiters& w = reasons[t.describe(t)];
    w.warps[t.block] |= 1u << t.thread / 32;
    ++w.threads;
  }
  std::string text = format("deadlock: %u threads wait, and nothing can happen that they wait for", blocked);
  u32 started = m.next_cluster * m.launch.cluster;
  if (started < m.launch.grid)
    text += format("; %u of %u ctas have started (the launch is not cooperative)", started, m.launch.grid);
  for (bool shared : {false, true})
    for (const auto& [reason, waiters] : reasons) {
      if ((waiters.warps.size() > 1) != shared) continue;
      auto [cta, warps] = *waiters.warps.begin();
      text += shared ? format("\n  %zu ctas", waiters.warps.size()) : format("\n  cta %u, warps %s", cta, ranges(warps).c_str());
      text += format(" (%u threads): ", waiters.threads) + reason;
    }
  return text;
}

}  // namespace

bool schedule() {
  Machine& m = *machine;
  try {
    while (!m.failed) {
      run_events();
      if (!m.ready_count) {
        if (m.polling && wake_pollers()) continue;
        if (!m.events.empty()) continue;
        if (!m.live) break;
        m.failed = true;
        m.error = deadlock();
        break;
      }
      ++m.step;
      Thread* thread = choose();
      current = thread;
      fiber_switch(m.main, thread->fiber);
      current = nullptr;
      if (thread->state == Thread::done && !m.failed) start_clusters();
    }
  } catch (const LaunchFailed&) {
  }
  current = nullptr;
  return !m.failed;
}

void thread_entry() {
  (*machine->body)();
  thread_exit();
  to_scheduler();
  abort();
}

}  // namespace kitsune::emulator
