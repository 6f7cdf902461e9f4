// A call: its parts one after the other, and the memory of the arrays between them.
#include <algorithm>
#include <map>

#include "executor_internal.h"
#include "executor_memory.h"
#include "executor_together.h"
#include "huge_pages.h"

namespace kitsune::cpu {
namespace {

std::vector<Array> from(const std::vector<Array>& arrays, int64_t first, int64_t count) {
  return {arrays.begin() + first, arrays.begin() + first + count};
}

// Places for arrays in one block, in the order in which they are made: the smallest gap that is large enough, or the end.
class Places {
 public:
  size_t take(size_t bytes) {
    auto best = free_.end();
    for (auto gap = free_.begin(); gap != free_.end(); ++gap)
      if (gap->second >= bytes && (best == free_.end() || gap->second < best->second)) best = gap;
    if (best == free_.end()) {  // the last gap may reach the end
      size_t at = end_;
      if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == end_) {
        at = free_.rbegin()->first;
        free_.erase(std::prev(free_.end()));
      }
      end_ = plus(at, bytes);
      return at;
    }
    const auto [at, size] = *best;
    free_.erase(best);
    if (size > bytes) free_[at + bytes] = size - bytes;
    return at;
  }

  void give_back(size_t at, size_t bytes) {
    auto next = free_.lower_bound(at);
    if (next != free_.end() && at + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    free_[at] = bytes;
  }

  size_t end() const { return end_; }

 private:
  std::map<size_t, size_t> free_;  // place -> bytes, no two of them side by side
  size_t end_ = 0;
};

// Where the arrays that live during the call only lie in the memory between phases. Two of them share bytes only where one is read
// for the last time by a group of parts before the one that makes the other.
std::vector<size_t> place_inner(const Call& call, const std::vector<size_t>& ends, size_t* bytes) {
  const size_t outer = static_cast<size_t>(call.operands + call.results), none = call.parts.size();
  std::vector<size_t> last(call.arrays.size(), none), at(call.arrays.size() - outer);
  for (size_t p = 0; p < call.parts.size(); ++p)
    for (const auto* arrays : {&call.parts[p].reads, &call.parts[p].writes})
      for (int64_t k : *arrays) last[static_cast<size_t>(k)] = p;
  auto size_of = [&](size_t k) {
    return align_up(times(static_cast<size_t>(call.arrays[k].elements), item_size(call.arrays[k].dtype)));
  };
  Places places;
  std::vector<size_t> dying;
  auto end = ends.begin();
  for (size_t p = 0; p < call.parts.size() && places.end() != kTooLarge; ++p) {
    for (int64_t k : call.parts[p].writes)
      if (static_cast<size_t>(k) >= outer) at[static_cast<size_t>(k) - outer] = places.take(size_of(static_cast<size_t>(k)));
    for (const auto* arrays : {&call.parts[p].reads, &call.parts[p].writes})
      for (int64_t k : *arrays)
        if (static_cast<size_t>(k) >= outer && last[static_cast<size_t>(k)] == p) {
          dying.push_back(static_cast<size_t>(k));
          last[static_cast<size_t>(k)] = none;  // a part may read an array twice
        }
    if (p + 1 < *end) continue;
    for (size_t k : dying) places.give_back(at[k - outer], size_of(k));
    dying.clear();
    ++end;
  }
  *bytes = places.end();
  return at;
}

}  // namespace

Executable::Executable(Call call, const KernelTable& table) : call_(std::move(call)) {
  for (const Part& part : call_.parts) plans_.push_back(std::make_unique<const Plan>(part.program, table));
  const int64_t outer = call_.operands + call_.results;
  group_ends_ = groups_of(call_, plans_);
  inner_offset_ = place_inner(call_, group_ends_, &inner_bytes_);
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
    std::vector<char*> arrays;
    arrays.reserve(call_.arrays.size());
    for (int64_t i = 0; i < call_.operands; ++i) arrays.push_back(const_cast<char*>(static_cast<const char*>(ins[i])));
    for (int64_t i = 0; i < call_.results; ++i) {
      const Array& a = call_.arrays[static_cast<size_t>(call_.operands + i)];
      advise_huge_pages(outs[i], static_cast<size_t>(a.elements) * item_size(a.dtype));
      arrays.push_back(static_cast<char*>(outs[i]));
    }
    for (size_t offset : inner_offset_) arrays.push_back(inner.data() + offset);
    std::vector<Member> members;
    size_t begin = 0;
    for (size_t end : group_ends_) {
      members.clear();
      for (size_t i = begin; i < end; ++i) {
        Member& m = members.emplace_back(Member{plans_[i].get(), {}, {}});
        for (int64_t k : call_.parts[i].reads) m.ins.push_back(arrays[static_cast<size_t>(k)]);
        for (int64_t k : call_.parts[i].writes) m.outs.push_back(arrays[static_cast<size_t>(k)]);
      }
      const Member& first = members.front();
      std::string error = end - begin == 1 ? run_program(*first.plan, first.ins.data(), first.outs.data(), pool)
                                           : run_together(members, call_.name.c_str(), pool);
      if (!error.empty()) return error;
      begin = end;
    }
    return "";
  } catch (const std::exception& e) {
    return error_text(e, call_.name.c_str());
  }
}

}  // namespace kitsune::cpu
