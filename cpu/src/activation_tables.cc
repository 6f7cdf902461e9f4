#include "activation_tables.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

namespace kitsune::cpu {
namespace {

constexpr int64_t kOperands = 65536;
constexpr int kMostTables = 64;

struct Table {
  RoundedActivation of;
  EvaluateRounded evaluate;
  float* results;
  Table* next;
};

std::atomic<Table*> tables{nullptr};  // never shrinks, so it is read without a lock
std::mutex adding;

bool same(float x, float y) { return std::memcmp(&x, &y, sizeof x) == 0; }

const Table* find(const RoundedActivation& of, EvaluateRounded evaluate) {
  for (const Table* t = tables.load(std::memory_order_acquire); t != nullptr; t = t->next) {
    const RoundedActivation& o = t->of;
    if (o.kind == of.kind && same(o.a, of.a) && same(o.b, of.b) && o.rounds == of.rounds && o.coarse == of.coarse &&
        t->evaluate == evaluate)
      return t;
  }
  return nullptr;
}

}  // namespace

const float* activation_table(const RoundedActivation& of, EvaluateRounded evaluate) {
  if (const Table* known = find(of, evaluate)) return known->results;
  const std::lock_guard<std::mutex> lock(adding);
  if (const Table* known = find(of, evaluate)) return known->results;
  Table* first = tables.load(std::memory_order_relaxed);
  int count = 0;
  for (const Table* t = first; t != nullptr; t = t->next) ++count;
  if (count >= kMostTables) return nullptr;
  float* results = static_cast<float*>(std::aligned_alloc(64, kOperands * sizeof(float)));
  if (results == nullptr) return nullptr;
  std::vector<uint16_t> operands(kOperands);
  std::iota(operands.begin(), operands.end(), uint16_t{0});
  kernels().load(DType::kF32, of.rounds)(kOperands, results, operands.data(), 1);
  evaluate(of, kOperands, results, results);
  tables.store(new Table{of, evaluate, results, first}, std::memory_order_release);
  return results;
}

}  // namespace kitsune::cpu
