// Runs a checked Call on a thread pool. Nothing here depends on XLA.
//
// Comes in: a Call, once (Executable resolves kernels and loop nests), then pointers to the arrays, once per call (run). Goes
// out: the results, the same bits for any number of threads. Invariant: a call never waits for a pool task that has not
// started, so it ends even if the pool is busy for ever; tasks that start after it ended find that out and touch nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu {

class Pool {
 public:
  virtual ~Pool() = default;
  // Threads, the caller's included, that are worth waking for work that takes one thread `ns`.
  virtual int64_t num_threads(double ns) const = 0;
  // Runs the task some time, on some thread; may be on this one, before it returns.
  virtual void schedule(std::function<void()> task) = 0;
};

class Executable {
 public:
  // Resolves every operation against `table`. Throws ProgramError where the table lacks an operation for a type.
  explicit Executable(Call call, const KernelTable& table = kernels());
  ~Executable();
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  const Call& call() const { return call_; }

  // A rough lower bound of one call's time on one thread, in ns.
  double estimated_ns() const;

  // Bytes that a call takes beside its operands and results on one thread, at most at one time: arrays between phases, packed
  // weights, queues, partial sums, and the thread's temporary memory.
  size_t memory_bytes() const;

  // Runs the parts in their order: ins[i] and outs[i] are the operands and results, aligned to their element size. Any number of
  // calls may run at once. Returns an empty string, or what went wrong (out of memory), and how to go on: the results are then
  // undefined.
  std::string run(const void* const* ins, void* const* outs, Pool& pool) const;

 private:
  Call call_;
  std::vector<std::unique_ptr<const struct Plan>> plans_;  // of the parts; executor_internal.h
  std::vector<size_t> group_ends_;                         // of parts that run together
  std::vector<size_t> inner_offset_;                       // of arrays that live during the call only
  size_t inner_bytes_ = 0;
};

}  // namespace kitsune::cpu
