// A call: its parts one after the other, and the memory of the arrays between them.
#include <algorithm>

#include "executor_internal.h"
#include "executor_memory.h"
#include "huge_pages.h"

namespace kitsune::cpu {
namespace {

std::vector<Array> from(const std::vector<Array>& arrays, int64_t first, int64_t count) {
  return {arrays.begin() + first, arrays.begin() + first + count};
}

}  // namespace

Executable::Executable(Call call, const KernelTable& table) : call_(std::move(call)) {
  for (const Part& part : call_.parts) plans_.push_back(std::make_unique<const Plan>(part.program, table));
  const int64_t outer = call_.operands + call_.results;
  for (size_t k = static_cast<size_t>(outer); k < call_.arrays.size(); ++k) {
    const Array& a = call_.arrays[k];
    inner_offset_.push_back(inner_bytes_);
    inner_bytes_ = plus(inner_bytes_, align_up(times(static_cast<size_t>(a.elements), item_size(a.dtype))));
  }
  limit_memory(inner_bytes_, from(call_.arrays, 0, outer), {}, "arrays between phases");
}

Executable::~Executable() = default;

double Executable::estimated_ns() const {
  double ns = 0;
  for (const auto& plan : plans_) ns += plan->estimated_ns;
  return ns;
}

size_t Executable::memory_bytes() const {
  size_t most = 0;
  for (const auto& plan : plans_) most = std::max(most, plan->memory_bytes());
  return plus(inner_bytes_, most);
}

std::string Executable::run(const void* const* ins, void* const* outs, Pool& pool) const {
  try {
    CachedBlock inner(inner_bytes_, "arrays between phases");
    std::vector<char*> arrays, reads, writes;
    arrays.reserve(call_.arrays.size());
    for (int64_t i = 0; i < call_.operands; ++i) arrays.push_back(const_cast<char*>(static_cast<const char*>(ins[i])));
    for (int64_t i = 0; i < call_.results; ++i) {
      const Array& a = call_.arrays[static_cast<size_t>(call_.operands + i)];
      advise_huge_pages(outs[i], static_cast<size_t>(a.elements) * item_size(a.dtype));
      arrays.push_back(static_cast<char*>(outs[i]));
    }
    for (size_t offset : inner_offset_) arrays.push_back(inner.data() + offset);
    for (size_t i = 0; i < plans_.size(); ++i) {
      const Part& part = call_.parts[i];
      reads.clear(), writes.clear();
      for (int64_t k : part.reads) reads.push_back(arrays[static_cast<size_t>(k)]);
      for (int64_t k : part.writes) writes.push_back(arrays[static_cast<size_t>(k)]);
      std::string error = run_program(*plans_[i], reads.data(), writes.data(), pool);
      if (!error.empty()) return error;
    }
    return "";
  } catch (const std::exception& e) {
    return error_text(e, call_.name.c_str());
  }
}

}  // namespace kitsune::cpu
