// The Python module kitsune_jax._cpu: handlers for jax.ffi, and what tests need to reach the executor without XLA.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "kitsune_cpu/executor.h"
#include "kitsune_cpu/ffi.h"
#include "measure.h"
#include "thread_pool.h"
#include "timeline.h"

namespace nb = nanobind;

namespace kitsune::cpu {
namespace {

using Words = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;

constexpr int kMaxIsas = 8;

nb::dict handlers() {
  nb::dict d;
  d["instantiate"] = nb::capsule(instantiate_handler());
  d["execute"] = nb::capsule(execute_handler());
  return d;
}

std::vector<std::string> opcodes() {
  std::vector<std::string> names;
  for (int i = 0; i < static_cast<int>(Opcode::kCount); ++i) names.emplace_back(opcode_name(static_cast<Opcode>(i)));
  return names;
}

std::vector<std::string> isas() {
  const char* names[kMaxIsas];
  int n = available_isas(names, kMaxIsas);
  return {names, names + std::min(n, kMaxIsas)};
}

std::string check(const Words& words) {
  try {
    Executable executable(parse(words.data(), words.size()));
    return "";
  } catch (const ProgramError& e) {
    return e.what();
  }
}

size_t memory_bytes(const Words& words) {
  try {
    return Executable(parse(words.data(), words.size())).memory_bytes();
  } catch (const ProgramError& e) {
    throw nb::value_error(e.what());
  }
}

// NumPy has no bfloat16 of its own, so arrays are checked by size, not by type.
void check_bytes(const char* role, size_t i, size_t bytes, const Array& want) {
  size_t wanted = static_cast<size_t>(want.elements) * item_size(want.dtype);
  if (bytes != wanted)
    throw nb::value_error((std::string(role) + " " + std::to_string(i) + " has " + std::to_string(bytes) +
                           " bytes, but the program wants " + std::to_string(wanted))
                              .c_str());
}

void run(const Words& words, const std::vector<Input>& inputs, const std::vector<Output>& outputs, int64_t threads) {
  if (threads < 1) throw nb::value_error("threads must be at least 1");
  std::unique_ptr<Executable> executable;
  try {
    executable = std::make_unique<Executable>(parse(words.data(), words.size()));
  } catch (const ProgramError& e) {
    throw nb::value_error(e.what());
  }
  const Call& call = executable->call();
  const size_t operands = static_cast<size_t>(call.operands), results = static_cast<size_t>(call.results);
  if (inputs.size() != operands || outputs.size() != results)
    throw nb::value_error(
        ("the program has " + std::to_string(operands) + " inputs and " + std::to_string(results) + " outputs").c_str());
  std::vector<const void*> ins;
  std::vector<void*> outs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_bytes("input", i, inputs[i].nbytes(), call.arrays[i]);
    ins.push_back(inputs[i].data());
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_bytes("output", i, outputs[i].nbytes(), call.arrays[operands + i]);
    outs.push_back(outputs[i].data());
  }
  std::string error;
  {
    nb::gil_scoped_release release;
    ThreadPool pool(threads);
    error = executable->run(ins.data(), outs.data(), pool);
  }
  if (!error.empty()) throw std::runtime_error(error);
}

// The names, the events as rows of seven int64 (`timeline::Event`), and how many were dropped.
nb::tuple stop_timeline() {
  const timeline::Recording found = timeline::stop();
  static_assert(sizeof(timeline::Event) == 7 * sizeof(int64_t));
  nb::list names;  // a name is what a user calls a file: it may hold any bytes
  for (const std::string& name : found.names) names.append(nb::bytes(name.data(), name.size()));
  return nb::make_tuple(names, nb::bytes(found.events.data(), found.events.size() * sizeof(timeline::Event)), found.dropped);
}

nb::dict build_info() {
  nb::dict d;
  d["compiler"] = __VERSION__;
  d["format_version"] = kFormatVersion;
  d["isas"] = isas();
  return d;
}

template <class F>
Slices unlocked(F f) {
  nb::gil_scoped_release release;
  return f();
}

DType dtype_of(int code) {
  if (code < 0 || code >= kNumDTypes) throw nb::value_error("no such dtype");
  return static_cast<DType>(code);
}

Product product_of(int code) {
  if (code < 0 || code >= kNumProducts) throw nb::value_error("no such product");
  return static_cast<Product>(code);
}

// Sizes of what is measured come from this package; the bounds only keep a slip from becoming a crash.
void check_sizes(std::initializer_list<int64_t> sizes) {
  for (int64_t n : sizes)
    if (n < 1 || n > (int64_t{1} << 30)) throw nb::value_error("sizes and threads must lie between 1 and 2**30");
}

void def_measurements(nb::module_& m) {
  m.def(
      "measure_gemm",
      [](int dtype, int product, int64_t rows, int64_t K, int64_t N, int activation, int64_t threads) {
        check_sizes({rows, K, N, threads});
        if (activation < 0 || activation >= kNumActivations) throw nb::value_error("no such activation");
        const DType type = dtype_of(dtype);
        const Product how = product_of(product);
        return unlocked([&] { return measure_gemm(type, how, {rows, N, K}, static_cast<Activation>(activation), threads); });
      },
      nb::arg("dtype"), nb::arg("product"), nb::arg("rows"), nb::arg("K"), nb::arg("N"), nb::arg("activation"), nb::arg("threads"),
      "Seconds of act(X W + bias) on one of `threads` busy threads, in each of several slices of time. "
      "dtype, product, activation: indices into the lists of bytecode.py.");
  m.def(
      "measure_outer",
      [](int dtype, int product, int64_t rows, int64_t K, int64_t N, int64_t threads) {
        check_sizes({rows, K, N, threads});
        const DType type = dtype_of(dtype);
        const Product how = product_of(product);
        return unlocked([&] { return measure_outer(type, how, {K, N, rows}, threads); });
      },
      nb::arg("dtype"), nb::arg("product"), nb::arg("rows"), nb::arg("K"), nb::arg("N"), nb::arg("threads"),
      "Seconds of adding X^T Y of rows x K and rows x N, as measure_gemm.");
  m.def(
      "measure_pack",
      [](int dtype, int product, int64_t K, int64_t N, bool transposed, int64_t threads) {
        check_sizes({K, N, threads});
        const DType type = dtype_of(dtype);
        const Product how = product_of(product);
        return unlocked([&] { return measure_pack(type, how, K, N, transposed, threads); });
      },
      nb::arg("dtype"), nb::arg("product"), nb::arg("K"), nb::arg("N"), nb::arg("transposed"), nb::arg("threads"),
      "Seconds of packing a weight, or one that lies transposed in memory, as measure_gemm.");
  m.def(
      "measure_vector",
      [](int opcode, int dtype, int64_t n, int64_t threads) {
        check_sizes({n, threads});
        if (opcode < 0 || opcode >= static_cast<int>(Opcode::kCount)) throw nb::value_error("no such micro-operation");
        const DType type = dtype_of(dtype);
        return unlocked([&] { return measure_vector(static_cast<Opcode>(opcode), type, n, threads); });
      },
      nb::arg("opcode"), nb::arg("dtype"), nb::arg("n"), nb::arg("threads"),
      "Seconds of a micro-operation on n elements, as measure_gemm; no slices where there is none for the dtype.");
  m.def(
      "measure_move",
      [](const std::string& what, int dtype, int64_t n, int64_t threads) {
        check_sizes({n, threads});
        const DType type = dtype_of(dtype);
        if (what != "load" && what != "store") throw nb::value_error("what is moved is a load or a store");
        return unlocked([&] { return what == "load" ? measure_load(type, n, threads) : measure_store(type, n, threads); });
      },
      nb::arg("what"), nb::arg("dtype"), nb::arg("n"), nb::arg("threads"),
      "Seconds to load n elements of a storage dtype as its compute dtype, or to store them, as measure_gemm.");
  m.def(
      "measure_fold",
      [](int how, int dtype, int64_t rows, int64_t n, bool into_row, int64_t threads) {
        check_sizes({rows, n, threads});
        const DType type = dtype_of(dtype);
        if (how < 0 || how > 3) throw nb::value_error("no such reduction");
        return unlocked([&] { return measure_fold(how, type, rows, n, into_row, threads); });
      },
      nb::arg("how"), nb::arg("dtype"), nb::arg("rows"), nb::arg("n"), nb::arg("into_row"), nb::arg("threads"),
      "Seconds to reduce rows x n elements along the rows, or into one row, as measure_gemm.");
  m.def(
      "measure_copy",
      [](int64_t bytes, int64_t threads) {
        check_sizes({bytes, threads});
        return unlocked([&] { return measure_copy(bytes, threads); });
      },
      nb::arg("bytes"), nb::arg("threads"), "Seconds to copy so many bytes, as measure_gemm.");
  m.def(
      "measure_touch",
      [](int64_t bytes, bool huge, int64_t threads) {
        check_sizes({bytes, threads});
        return unlocked([&] { return measure_touch(bytes, huge, threads); });
      },
      nb::arg("bytes"), nb::arg("huge"), nb::arg("threads"),
      "Seconds to write to so many bytes of fresh pages, huge ones where the kernel gives them, as measure_gemm.");
}

}  // namespace
}  // namespace kitsune::cpu

NB_MODULE(_cpu, m) {
  namespace cpu = kitsune::cpu;
  m.doc() = "The CPU target of kitsune_jax: the XLA custom call kitsune_cpu, and its executor for tests.";
  m.def("handlers", &cpu::handlers, "Capsules of the FFI handlers by stage, for jax.ffi.register_ffi_target.");
  m.def("order_handler", [] { return nb::capsule(cpu::order_handler()); }, "Capsule of the FFI handler of kitsune_cpu_order.");
  m.def("opcodes", &cpu::opcodes, "Names of the micro-operations of a Vector program, in the order of their codes.");
  m.def("isa", [] { return cpu::kernels().isa; }, "Name of the kernel table in use.");
  m.def("available_isas", &cpu::isas, "Kernel tables this CPU can run, best first.");
  m.def(
      "set_isa", [](const char* name) { return cpu::set_isa(name); }, nb::arg("name"),
      "Selects a kernel table for programs instantiated from now on; False if this CPU cannot run it.");
  m.def("format_version", [] { return cpu::kFormatVersion; }, "The program format this extension reads.");
  m.def("build_info", &cpu::build_info, "How this extension was built.");
  m.def("calls", &cpu::executed_calls, "Custom calls executed so far in this process.");
  m.def("memory_bytes", &cpu::memory_bytes, nb::arg("words"),
        "Bytes that a call of a program takes beside its operands and results on one thread. ValueError if it is invalid.");
  m.def("validate", &cpu::check, nb::arg("words"), "'' for a valid program, else what is wrong with it.");
  m.def("run", &cpu::run, nb::arg("words"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("threads") = 1,
        "Runs a program on NumPy arrays, C-contiguous and of the program's sizes in bytes, writing `outputs`. ValueError if it is "
        "invalid.");
  m.def("start_timeline", &cpu::timeline::start, nb::arg("most"), "Records events from now on, at most so many of each thread.");
  m.def("stop_timeline", &cpu::stop_timeline,
        "(names as bytes, events as rows of seven int64, dropped): what was recorded since start_timeline. A row: begin and end by "
        "clock_ns, thread, kind (call, prepare, tile, combine, wait), name, stage, tile.");
  m.def("clock_ns", &cpu::timeline::now_ns, "The clock of the timeline, in ns.");
  cpu::def_measurements(m);
}
