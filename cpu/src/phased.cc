#include "kitsune_cpu/phased.h"

#include <algorithm>
#include <limits>

#include "executor_internal.h"
#include "executor_memory.h"
#include "words.h"

namespace kitsune::cpu {
namespace {

constexpr int64_t kMostPhases = int64_t{1} << 20;
constexpr int64_t kBefore = -1;  // the phase of operands
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

std::string text(const Array& a) { return std::to_string(a.elements) + " of " + dtype_name(a.dtype); }

}  // namespace

// Reads the words of several parts and checks that they fit together.
class Phased::Parser {
 public:
  Parser(Phased& phased, const int64_t* words, size_t count) : p_(phased), r_(open_words(words, count, kPhasedMagic)) {}

  void run(const KernelTable& table) {
    p_.name_ = r_.text("name");
    arrays_ = r_.many("arrays", [&] { return read_array(r_); });
    int64_t n = static_cast<int64_t>(arrays_.size());
    size_t operands = static_cast<size_t>(r_.in_range("operands", 0, n));
    size_t results = static_cast<size_t>(r_.in_range("results", 0, n - static_cast<int64_t>(operands)));
    made_.assign(arrays_.size(), kNever);
    std::fill_n(made_.begin(), operands, kBefore);
    p_.parts_ = r_.many("parts", [&] { return part(table); });
    if (!r_.at_end()) reject(std::to_string(r_.left()) + " words are left over after the last part");
    for (size_t i = 0; i < arrays_.size(); ++i)
      if (made_[i] == kNever) reject("array " + std::to_string(i) + " is never written");
    auto begin = arrays_.begin();
    p_.operands_.assign(begin, begin + operands);
    p_.results_.assign(begin + operands, begin + operands + results);
    for (auto a = begin + operands + results; a != arrays_.end(); ++a) {
      p_.inner_offset_.push_back(p_.inner_bytes_);
      p_.inner_bytes_ = plus(p_.inner_bytes_, align_up(times(static_cast<size_t>(a->elements), item_size(a->dtype))));
    }
    limit_memory(p_.inner_bytes_, p_.operands_, p_.results_, "arrays between phases");
  }

 private:
  [[noreturn]] void reject(const std::string& what) const { throw ProgramError("kitsune program '" + p_.name_ + "': " + what); }

  Part part(const KernelTable& table) {
    Part part;
    part.phase = r_.in_range("phase", last_phase_, kMostPhases);
    last_phase_ = part.phase;
    part.reads = indices("reads");
    part.writes = indices("writes");
    std::vector<int64_t> words = r_.list("program");
    part.executable = std::make_unique<const Executable>(parse(words.data(), words.size()), table);
    const Program& program = part.executable->program();
    match("reads", part.reads, program.inputs, program.name);
    match("writes", part.writes, program.outputs, program.name);
    for (size_t k : part.reads)
      if (made_[k] >= part.phase)
        reject("'" + program.name + "' reads array " + std::to_string(k) + ", which no earlier phase writes");
    for (size_t k : part.writes) {
      if (made_[k] != kNever) reject("'" + program.name + "' writes array " + std::to_string(k) + ", which is there already");
      made_[k] = part.phase;
    }
    return part;
  }

  std::vector<size_t> indices(const char* field) {
    return r_.many(field, [&] { return static_cast<size_t>(r_.in_range(field, 0, static_cast<int64_t>(arrays_.size()) - 1)); });
  }

  void match(const char* field, const std::vector<size_t>& numbers, const std::vector<Array>& wanted,
             const std::string& who) const {
    if (numbers.size() != wanted.size())
      reject("'" + who + "' " + field + " " + std::to_string(numbers.size()) + " arrays, but the program wants " +
             std::to_string(wanted.size()));
    for (size_t i = 0; i < numbers.size(); ++i) {
      const Array &a = arrays_[numbers[i]], &b = wanted[i];
      if (a.dtype != b.dtype || a.elements != b.elements)
        reject("'" + who + "' " + field + " array " + std::to_string(numbers[i]) + ", which has " + text(a) + ", as " + text(b));
    }
  }

  Phased& p_;
  Reader r_;
  std::vector<Array> arrays_;
  std::vector<int64_t> made_;  // the phase that writes each array
  int64_t last_phase_ = 0;
};

Phased::Phased(const int64_t* words, size_t count, const KernelTable& table) {
  if (count > 0 && words[0] == kPhasedMagic) {
    Parser(*this, words, count).run(table);
    return;
  }
  Part part{0, {}, {}, std::make_unique<const Executable>(parse(words, count), table)};
  const Program& p = part.executable->program();
  name_ = p.name;
  operands_ = p.inputs;
  results_ = p.outputs;
  for (size_t i = 0; i < operands_.size(); ++i) part.reads.push_back(i);
  for (size_t i = 0; i < results_.size(); ++i) part.writes.push_back(operands_.size() + i);
  parts_.push_back(std::move(part));
}

Phased::~Phased() = default;

size_t Phased::memory_bytes() const {
  size_t most = 0;
  for (const Part& part : parts_) most = std::max(most, part.executable->memory_bytes());
  return plus(inner_bytes_, most);
}

double Phased::estimated_ns() const {
  double ns = 0;
  for (const Part& part : parts_) ns += part.executable->estimated_ns();
  return ns;
}

int64_t Phased::tiles() const {
  int64_t n = 0;
  for (const Part& part : parts_) {
    const Program& p = part.executable->program();
    n = std::min(kMaxCount, n + p.tiles * static_cast<int64_t>(p.stages.size()));
  }
  return n;
}

struct Phased::Arrays::Inner {
  explicit Inner(size_t bytes) : block(bytes, "arrays between phases") {}
  CachedBlock block;
};

Phased::Arrays::Arrays(const Phased& phased, const void* const* operands, void* const* results)
    : inner(std::make_unique<const Inner>(phased.inner_bytes_)) {
  for (size_t i = 0; i < phased.operands_.size(); ++i) at.push_back(const_cast<void*>(operands[i]));  // no part writes operands
  at.insert(at.end(), results, results + phased.results_.size());
  for (size_t offset : phased.inner_offset_) at.push_back(inner->block.data() + offset);
}

Phased::Arrays::~Arrays() = default;

void Phased::Arrays::bind(const Part& part) {
  ins.clear();
  outs.clear();
  for (size_t k : part.reads) ins.push_back(at[k]);
  for (size_t k : part.writes) outs.push_back(at[k]);
}

}  // namespace kitsune::cpu
