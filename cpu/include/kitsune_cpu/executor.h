// Runs a checked Program on a thread pool. Nothing here depends on XLA.
//
// Comes in: a Program, once (Executable resolves kernels and loop nests), then pointers to the arrays, once per call (run). Goes
// out: the output arrays, the same bits for any number of threads. Invariant: a call never waits for a pool task that has not
// started, so it ends even if the pool is busy for ever; tasks that start after it ended find that out and touch nothing.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu {

class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t num_threads() const = 0;
  // Runs the task some time, on some thread; may be on this one, before it returns.
  virtual void schedule(std::function<void()> task) = 0;
};

class Executable {
 public:
  // Resolves every operation against `table`. Throws ProgramError where the table lacks an operation for a type.
  explicit Executable(Program program, const KernelTable& table = kernels());
  ~Executable();
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  const Program& program() const;

  // A rough lower bound of one call's time on one thread, in ns: below some 20 000 it is not worth waking other threads.
  double estimated_ns() const;

  // Bytes that a call takes beside its arrays on one thread: packed weights, queues, partial sums, and the thread's temporary
  // memory.
  size_t memory_bytes() const;

  // Runs the program once: ins[i] and outs[i] are the arrays in the program's order, aligned to their element size. Any number of
  // calls may run at once. Returns an empty string, or what went wrong (out of memory), and how to go on: the outputs are then
  // undefined.
  std::string run(const void* const* ins, void* const* outs, Pool& pool) const;

  struct Plan;  // executor_internal.h

 private:
  std::unique_ptr<const Plan> plan_;
};

// What `run` returns for an exception in a call of the program `name`. Needs no memory.
std::string error_text(const std::exception& why, const char* name) noexcept;

}  // namespace kitsune::cpu
