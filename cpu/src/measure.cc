#include "measure.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <thread>

#include "huge_pages.h"

namespace kitsune::cpu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSlices = 3;
constexpr double kSliceSeconds = 200e-6;
constexpr double kBatchSeconds = 5e-6;  // between two looks at the clock, which take some 25 ns each
constexpr double kLongSeconds = 1e-3;
constexpr size_t kAlignment = 64;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Seconds that this thread ran. Where the system does not say, it is taken to have had its core.
double own_seconds() {
  timespec t;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) != 0) return -1;
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Aligned memory of a thread, filled with ones of any floating type's exponent: products stay finite and nothing is denormal. Large
// blocks have huge pages: touching two of 48 MB for the first time took two threads of a virtual Zen 4 half a second without.
class Block {
 public:
  explicit Block(size_t bytes) : bytes_(std::max<size_t>((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment)) {
    data_ = static_cast<char*>(std::aligned_alloc(kAlignment, bytes_));
    if (data_ == nullptr) throw std::bad_alloc();
    advise_huge_pages(data_, bytes_);
    std::memset(data_, 0x3c, bytes_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { std::free(data_); }
  char* get() const { return data_; }

 private:
  size_t bytes_;
  char* data_;
};

// One piece of work, made for each thread by that thread, so that its memory is near.
using Work = std::function<void()>;

// All threads start each slice together and repeat their work until it is over; at least once.
Slices run(int64_t threads, const std::function<Work()>& make) {
  const int64_t count = std::max<int64_t>(threads, 1);
  std::atomic<int64_t> arrived{0};
  std::atomic<bool> failed{false};
  std::vector<std::vector<double>> rates(static_cast<size_t>(count), std::vector<double>(kSlices, 0));
  auto meet = [&](int64_t round) {
    arrived.fetch_add(1);
    while (arrived.load() < round * count) std::this_thread::yield();
  };
  auto body = [&](int64_t thread) {
    ThreadsPart part(kernels());
    Work work;
    int64_t batch = 1;
    try {
      work = make();
      work();  // brings code and data into the caches
      const auto start = Clock::now();
      work();
      batch = std::clamp<int64_t>(static_cast<int64_t>(kBatchSeconds / std::max(seconds_since(start), 1e-9)), 1, 1000);
    } catch (const std::exception&) {
      failed = true;
    }
    meet(1);
    for (int s = 0; s < kSlices; ++s) {
      meet(2 + s);
      if (failed) continue;
      const double before = own_seconds();
      auto start = Clock::now();
      int64_t done = 0;
      double passed = 0;
      do {
        for (int64_t i = 0; i < batch; ++i) work();
        done += batch;
        passed = seconds_since(start);
      } while (passed < kSliceSeconds);
      const double after = own_seconds();
      const double own = before < 0 || after <= before ? passed : std::min(after - before, passed);
      // No slice that is a single long piece is over before another program gets the core: what counts is the time in which this
      // thread ran. Of shorter work there are slices that nobody interrupts, and the clock on the wall is never too early for
      // them, as the thread's own is at times where a hypervisor takes part of it away.
      const bool is_long = batch == 1 && done == 1 && passed > kLongSeconds;
      rates[static_cast<size_t>(thread)][static_cast<size_t>(s)] = static_cast<double>(done) / (is_long ? own : passed);
    }
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < count; ++t) others.emplace_back(body, t);
  body(0);
  for (std::thread& t : others) t.join();
  if (failed) throw std::bad_alloc();
  Slices out;
  for (int s = 0; s < kSlices; ++s) {
    double rate = 0;
    for (const auto& of_thread : rates) rate += of_thread[static_cast<size_t>(s)];
    out.push_back(static_cast<double>(count) / rate);
  }
  return out;
}

size_t bytes_of(int64_t elements, DType type) { return static_cast<size_t>(elements) * item_size(type); }

std::vector<int64_t> steps(int64_t n, int64_t stride) {
  std::vector<int64_t> out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) out[static_cast<size_t>(i)] = i * stride;
  return out;
}

DType compute_type_of(DType type) { return type == DType::kF16 || type == DType::kBF16 ? DType::kF32 : type; }

}  // namespace

Slices measure_gemm(DType type, Product product, const ProductShape& s, Activation act, int64_t threads) {
  const KernelTable& table = kernels();
  const Panel panel = table.panel_for(type, product, s);
  return run(threads, [&]() -> Work {
    auto x = std::make_shared<Block>(bytes_of(s.M * s.K, type)), c = std::make_shared<Block>(bytes_of(s.M * s.N, type));
    auto w = std::make_shared<Block>(table.packed_bytes(panel, s.K, s.N)),
         bias = std::make_shared<Block>(bytes_of(s.N, DType::kF64));
    GemmArgs a{s.M, s.N, s.K, x->get(), type, s.K, w->get(), panel, bias->get(), act, c->get(), type, s.N, nullptr};
    a.act_a = a.act_b = 1;
    auto scratch = std::make_shared<Block>(table.gemm_scratch_bytes(a));
    a.scratch = scratch->get();
    return [=, &table] {
      (void)x, (void)c, (void)w, (void)bias, (void)scratch;  // kept alive
      table.gemm(a);
    };
  });
}

Slices measure_outer(DType type, Product product, const ProductShape& s, int64_t threads) {
  const KernelTable& table = kernels();
  const Panel panel = table.panel_for(type, product, s);
  return run(threads, [&]() -> Work {
    auto x = std::make_shared<Block>(bytes_of(s.K * s.M, type)), y = std::make_shared<Block>(bytes_of(s.K * s.N, type));
    auto c = std::make_shared<Block>(bytes_of(s.M * s.N, DType::kF64));
    OuterArgs a{s.K, s.M, s.N, x->get(), y->get(), type, panel, s.M, s.N, c->get(), nullptr};
    auto scratch = std::make_shared<Block>(table.outer_scratch_bytes(a));
    a.scratch = scratch->get();
    return [=, &table] {
      (void)x, (void)y, (void)c, (void)scratch;
      table.outer(a);
    };
  });
}

Slices measure_pack(DType type, Product product, int64_t K, int64_t N, bool transposed, int64_t threads) {
  const KernelTable& table = kernels();
  const Panel panel = table.panel_for(type, product, {K, N, K});
  const std::vector<int64_t> k = steps(K, transposed ? 1 : N), n = steps(N, transposed ? K : 1);
  return run(threads, [&]() -> Work {
    auto w = std::make_shared<Block>(bytes_of(K * N, type)), out = std::make_shared<Block>(table.packed_bytes(panel, K, N));
    return [=, &table, &k, &n] {
      table.pack(panel, PackSource{w->get(), type, K, N, k.data(), n.data()}, 0, table.panel_count(panel, N), out->get());
    };
  });
}

Slices measure_vector(Opcode op, DType type, int64_t n, int64_t threads) {
  const VectorFn f = kernels().vector(op, type);
  if (f == nullptr) return {};
  return run(threads, [&]() -> Work {
    auto a = std::make_shared<Block>(bytes_of(n, type)), b = std::make_shared<Block>(bytes_of(n, type));
    auto c = std::make_shared<Block>(bytes_of(n, type)), d = std::make_shared<Block>(bytes_of(n, type));
    auto out = std::make_shared<Block>(bytes_of(n, DType::kF64));
    return [=] {
      const double imm[4] = {2, 2, 2, 2};
      f(n, out->get(), a->get(), b->get(), c->get(), d->get(), imm);
    };
  });
}

Slices measure_load(DType type, int64_t n, int64_t threads) {
  const LoadFn f = kernels().load(compute_type_of(type), type);
  if (f == nullptr) return {};
  return run(threads, [&]() -> Work {
    auto in = std::make_shared<Block>(bytes_of(n, type)), out = std::make_shared<Block>(bytes_of(n, compute_type_of(type)));
    return [=] { f(n, out->get(), in->get(), 1); };
  });
}

Slices measure_store(DType type, int64_t n, int64_t threads) {
  const StoreFn f = kernels().store(type, compute_type_of(type));
  if (f == nullptr) return {};
  return run(threads, [&]() -> Work {
    auto in = std::make_shared<Block>(bytes_of(n, compute_type_of(type))), out = std::make_shared<Block>(bytes_of(n, type));
    return [=] { f(n, out->get(), 1, in->get()); };
  });
}

Slices measure_fold(int how, DType type, int64_t rows, int64_t n, bool into_row, int64_t threads) {
  const FoldFn along = kernels().fold(how, type, into_row);
  const FoldRowFn down = kernels().fold_row(how, type, into_row);
  if (into_row ? down == nullptr : along == nullptr) return {};
  return run(threads, [&]() -> Work {
    auto in = std::make_shared<Block>(bytes_of(rows * n, type)),
         sums = std::make_shared<Block>(bytes_of(std::max(rows, n), DType::kF64));
    const size_t pitch = bytes_of(n, type);
    return [=] {
      for (int64_t r = 0; r < rows; ++r) {
        const char* row = in->get() + static_cast<size_t>(r) * pitch;
        if (into_row) {
          down(n, row, 1, sums->get());
        } else {
          along(n, row, 1, sums->get() + static_cast<size_t>(r) * sizeof(double));
        }
      }
    };
  });
}

Slices measure_copy(int64_t bytes, int64_t threads) {
  return run(threads, [&]() -> Work {
    auto from = std::make_shared<Block>(static_cast<size_t>(bytes)), to = std::make_shared<Block>(static_cast<size_t>(bytes));
    return [=] {  // no memcpy, which writes large blocks past the caches as no loop does
      using Line = uint64_t __attribute__((vector_size(64)));
      const auto* in = reinterpret_cast<const Line*>(from->get());
      auto* out = reinterpret_cast<Line*>(to->get());
      const Line mask = in[0];
      for (size_t i = 0; i < static_cast<size_t>(bytes) / sizeof(Line); ++i) out[i] = in[i] ^ mask;
    };
  });
}

Slices measure_touch(int64_t bytes, bool huge, int64_t threads) {
  return run(threads, [&]() -> Work {
    return [bytes, huge] {
      const size_t size = static_cast<size_t>(bytes), page = 4096;
      void* fresh = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (fresh == MAP_FAILED) return;
      if (huge) advise_huge_pages(fresh, size);
      for (size_t at = 0; at < size; at += page) static_cast<volatile char*>(fresh)[at] = 1;
      munmap(fresh, size);
    };
  });
}

}  // namespace kitsune::cpu
