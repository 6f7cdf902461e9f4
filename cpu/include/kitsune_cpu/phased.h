// A call of several phases: programs that run one after the other on arrays of the call.
//
// Comes in: the words that kitsune_jax/targets/cpu/phased.py encodes, or those of a single program. Goes out: a Phased, and its
// runs. Invariant: a program reads operands and what programs of earlier phases wrote, and finds arrays of the type and size that
// it was checked against; every result and every inner array is written by one program.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kitsune_cpu/executor.h"

namespace kitsune::cpu {

constexpr int64_t kPhasedMagic = 0x4B49545350484153;

class Phased {
 public:
  // Parses, checks and compiles. Throws ProgramError with a sentence that names what is wrong (or std::bad_alloc).
  Phased(const int64_t* words, size_t count, const KernelTable& table = kernels());
  ~Phased();

  const std::string& name() const { return name_; }
  const std::vector<Array>& operands() const { return operands_; }
  const std::vector<Array>& results() const { return results_; }
  // What a call takes beside its operands and results, at most at one time: see Executable::memory_bytes.
  size_t memory_bytes() const;
  double estimated_ns() const;  // of all phases
  int64_t tiles() const;        // of all phases and stages

  // Runs every phase: ins[i] and outs[i] are the operands and results. `pool_for(ns)` gives the pool for a program of `ns`
  // (Executable::estimated_ns). Returns an empty string, or what went wrong: the results are then undefined.
  template <class PoolFor>
  std::string run(const void* const* ins, void* const* outs, PoolFor pool_for) const {
    try {
      Arrays arrays(*this, ins, outs);
      for (const Part& part : parts_) {
        arrays.bind(part);
        auto&& pool = pool_for(part.executable->estimated_ns());
        std::string error = part.executable->run(arrays.ins.data(), arrays.outs.data(), pool);
        if (!error.empty()) return error;
      }
      return "";
    } catch (const std::exception& e) {
      return error_text(e, name_.c_str());
    }
  }

 private:
  struct Part {
    int64_t phase;
    std::vector<size_t> reads, writes;  // arrays: operands, then results, then inner ones
    std::unique_ptr<const Executable> executable;
  };
  // Where the arrays of one call lie.
  struct Arrays {
    Arrays(const Phased& phased, const void* const* ins, void* const* outs);
    ~Arrays();
    void bind(const Part& part);
    struct Inner;
    std::unique_ptr<const Inner> inner;
    std::vector<void*> at;
    std::vector<const void*> ins;  // of the program bound last
    std::vector<void*> outs;
  };
  class Parser;

  std::string name_;
  std::vector<Array> operands_, results_;
  std::vector<size_t> inner_offset_;
  size_t inner_bytes_ = 0;
  std::vector<Part> parts_;
};

}  // namespace kitsune::cpu
