// Tests of the micro-kernels, for every ISA this CPU runs: `test_kernels [isa]`, or `test_kernels --bench [isa]` for throughput, or
// `test_kernels --tables` for the names of the ISAs, best first. Prints "N passed, N failed"; the exit status is 0 only if nothing
// failed and something was tested.
#include <cstdio>
#include <cstring>

#include "kernels_bench.h"
#include "kernels_check.h"
#include "kernels_edge_test.h"
#include "kernels_gemm_test.h"
#include "kernels_math_test.h"
#include "kernels_outer_test.h"
#include "kernels_pointwise_test.h"
#include "kernels_runs_test.h"
#include "kernels_tiles_test.h"

using namespace kitsune::cpu;

namespace {

void test_dispatch() {
  test::check(kernels().vector(Opcode::op_load, DType::kF32) == nullptr, "load is the executor's");
  test::check(kernels().vector(Opcode::op_add, DType::kBF16) == nullptr, "bf16 is not a compute type");
  test::check(kernels().vector(Opcode::op_exp, DType::kI32) == nullptr, "exp of integers");
  test::check(kernels().vector(Opcode::op_and, DType::kF32) == nullptr, "and of floats");
  test::check(kernels().vector(Opcode::op_not, DType::kBool) != nullptr, "not of bools");
  test::check(kernels().convert(DType::kF16, DType::kF32) == nullptr, "f16 is not a compute type");
  test::check(!set_isa("no such machine"), "unknown ISA");
}

}  // namespace

int main(int argc, char** argv) {
  const bool bench = argc > 1 && std::strcmp(argv[1], "--bench") == 0;
  const char* names[8];
  const int count = available_isas(names, 8);
  if (argc > 1 && std::strcmp(argv[1], "--tables") == 0) {
    for (int i = 0; i < count; ++i) std::printf("%s%s", names[i], i + 1 < count ? " " : "\n");
    return 0;
  }
  const char* only = argc > 1 + bench ? argv[1 + bench] : nullptr;
  for (int i = 0; i < count; ++i) {
    if (only && std::strcmp(only, names[i]) != 0) continue;
    if (!test::check(set_isa(names[i]) && std::strcmp(kernels().isa, names[i]) == 0, "set_isa(%s)", names[i])) continue;
    if (bench) {
      test::bench_gemm();
      test::bench_activations();
      test::bench_vector();
      continue;
    }
    test_dispatch();
    test::test_gemm();
    test::test_outer();
    test::test_elementary();
    test::test_special_functions();
    test::test_pointwise();
    test::test_edges();
    test::test_runs();
  }
  for (int i = 0; i < test::models().count && !bench && !only; ++i) {
    set_kernels(&test::models().all[i]->table);
    test::test_gemm();
    test::test_outer();
  }
  if (!bench) test::test_tiles();
  set_kernels(nullptr);
  if (!bench) test::test_more_activations_than_tables();
  std::printf("%lld passed, %lld failed\n", static_cast<long long>(test::counts().passed),
              static_cast<long long>(test::counts().failed));
  return test::counts().failed == 0 && test::counts().passed > 0 ? 0 : 1;
}
