// Memory that runs out while a call runs: every allocation of a call fails in turn, alone or with all that follow, on the caller
// and on helpers. The call must come back with a message, and the next one with the right result.
#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "amx_models.h"
#include "executor_memory.h"
#include "programs.h"

namespace {

std::atomic<int64_t> left{INT64_MAX};     // allocations that succeed
std::atomic<bool> all_that_follow{true};  // else only the one
std::atomic<size_t> large{0};             // smaller ones always succeed
std::atomic<int64_t> failed{0};

bool fails(size_t bytes) {
  if (bytes < large) return false;
  int64_t before = left.load();
  do {
    if (before == INT64_MAX) return false;
  } while (!left.compare_exchange_weak(before, before - 1));
  bool fail = all_that_follow ? before <= 0 : before == 0;
  failed += fail;
  return fail;
}

void* allocate(size_t bytes, size_t alignment) {
  if (fails(bytes)) return nullptr;
  return std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
}

void* allocate_or_throw(size_t bytes, size_t alignment) {
  void* p = allocate(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(size_t n) { return allocate_or_throw(n, alignof(std::max_align_t)); }
void* operator new(size_t n, const std::nothrow_t&) noexcept { return allocate(n, alignof(std::max_align_t)); }
void* operator new(size_t n, std::align_val_t a) { return allocate_or_throw(n, static_cast<size_t>(a)); }
void* operator new(size_t n, std::align_val_t a, const std::nothrow_t&) noexcept { return allocate(n, static_cast<size_t>(a)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace kitsune::cpu::test {
namespace {

// Runs `exe` when `n` more allocations may succeed; on a thread and a pool that have no memory left over from earlier calls.
std::string starve(const Executable& exe, Arrays& a, int64_t threads, int64_t n, bool forever) {
  std::string error;
  std::thread fresh([&] {
    ThreadPool pool(threads);
    free_cached_blocks();
    all_that_follow = forever;
    failed = 0;
    left = n;
    error = exe.run(a.in_pointers.data(), a.out_pointers.data(), pool);
    left = INT64_MAX;
  });
  fresh.join();
  return error;
}

void starve_all(const std::vector<int64_t>& words, int64_t threads, bool forever) {
  Executable exe(parse(words.data(), words.size()));
  Arrays want(exe.call(), 7);
  CHECK(starve(exe, want, threads, INT64_MAX, false).empty(), "%s does not run", exe.call().name.c_str());
  int errors = 0;
  for (int64_t n = 0, done = 0; n < 400 && !done; ++n) {
    Arrays got(exe.call(), 7), after(exe.call(), 7);
    std::string error = starve(exe, got, threads, n, forever);
    done = failed == 0;
    errors += !error.empty();
    CHECK(failed > 0 || error.empty(), "an error without a reason: %s", error.c_str());
    CHECK(error.empty() || error.find("out of memory") != std::string::npos, "\"%s\" is no message", error.c_str());
    CHECK(!error.empty() || got.outs == want.outs, "allocation %d failed in silence", static_cast<int>(n));
    error = starve(exe, after, threads, INT64_MAX, false);
    CHECK(error.empty() && after.outs == want.outs, "after the failure of allocation %d: %s", static_cast<int>(n), error.c_str());
  }
  CHECK(errors > 5, "only %d allocations failed", errors);
}

void test_starved_calls() {
  for (const std::vector<int64_t>& words :
       {encode(residual_call(67, 8, 2)), encode(weight_gradient(BF16, 45, 3)), encode(matmul(F32, 45, 3)), encode(two_phases())})
    for (int64_t threads : {1, 3})
      for (bool forever : {false, true}) starve_all(words, threads, forever);
}

// Threads that hold tiles give them back however the call ends.
void test_starved_tiles() {
  for (int i = 0; i < models().count; ++i) {
    const Model& model = *models().all[i];
    set_kernels(&model.table);
    for (int64_t threads : {1, 3}) {
      const int64_t before = *model.configured;
      starve_all(encode(tile_network(67, 16)), threads, true);
      CHECK(*model.configured > before && *model.released == *model.configured, "%s: %lld configurations, %lld releases",
            model.table.isa, static_cast<long long>(*model.configured), static_cast<long long>(*model.released));
    }
  }
  set_kernels(nullptr);
}

// How many bytes, what for, and how to go on.
void test_messages() {
  Program p = matmul(F32, 45, 3);
  p.name = "mlp (train.py:12)";
  std::vector<int64_t> words = encode(p);
  Executable exe(parse(words.data(), words.size()));
  Arrays a(exe.call(), 4);
  std::string seen;
  for (size_t bytes : {2048, 0}) {
    large = bytes;
    for (int64_t n = 0; n < 40; ++n) seen += starve(exe, a, 1, n, bytes > 0) + "\n";
  }
  for (const char* what :
       {"kitsune: out of memory in 'mlp (train.py:12)': there is no memory for ", " bytes of packed weights; ",
        " bytes of a thread's temporary memory; ", "its bookkeeping; ", "set KITSUNE_DISABLE=1 to run without pipelines"})
    CHECK(seen.find(what) != std::string::npos, "no message says \"%s\":\n%s", what, seen.c_str());
}

// A pool some of whose threads, or all, cannot be started.
void test_thread_start() {
  int made = 0;
  for (int64_t n = 0; n < 12; ++n) {
    all_that_follow = true;
    left = n;
    try {
      ThreadPool pool(4);
      left = INT64_MAX;
      std::vector<int64_t> words = encode(residual_pipeline(67, 8, 2));
      Executable exe(parse(words.data(), words.size()));
      Arrays a(exe.call(), 1);
      CHECK(exe.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "a pool with too few threads fails");
      ++made;
    } catch (const std::bad_alloc&) {
      left = INT64_MAX;
    }
  }
  CHECK(made > 3, "only %d pools were made", made);
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu::test;
  section("starved calls", test_starved_calls);
  section("starved tiles", test_starved_tiles);
  section("messages", test_messages);
  section("thread start", test_thread_start);
  std::printf("memory: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
