// The boundary to XLA: parses the program once per compiled executable, checks the buffers of every call against it, runs it on
// XLA's thread pool. The order of a stream is a call of its own, without a program.
//
// The state's type is registered from inside the instantiate handler, when XLA asks for its metadata. JAX may flush targets
// registered before the backend exists ahead of types, so registering the type separately would depend on the order of imports.
#include "kitsune_cpu/ffi.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kitsune_cpu/executor.h"
#include "kitsune_cpu/order.h"
#include "xla/ffi/api/ffi.h"

namespace kitsune::cpu {
namespace {

namespace ffi = xla::ffi;

constexpr double kNsPerThread = 20000;  // work that pays for waking one more thread

std::atomic<int64_t> calls{0};

struct State {
  static ffi::TypeId id;
  static const XLA_FFI_TypeInfo info;
  State(const int64_t* words, size_t count) : executable(parse(words, count)) {}
  Executable executable;
};
ffi::TypeId State::id = XLA_FFI_UNKNOWN_TYPE_ID;
const XLA_FFI_TypeInfo State::info = ffi::MakeTypeInfo<State>();

class XlaPool final : public Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& pool) : pool_(pool) {}
  int64_t num_threads(double ns) const override {
    return std::min(static_cast<int64_t>(std::min(ns / kNsPerThread, 4096.0)), pool_.num_threads());
  }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

// The error of an exception. There may be no memory for its text: the last one is short enough to need none.
ffi::Error error_of(const std::exception& e, ffi::ErrorCode code) noexcept {
  try {
    if (dynamic_cast<const std::bad_alloc*>(&e) == nullptr) return ffi::Error(code, e.what());
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string("kitsune: out of memory: ") + e.what() + "; set KITSUNE_DISABLE=1 to run without pipelines");
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
  }
}

ffi::ErrorOr<std::unique_ptr<State>> instantiate(ffi::Span<const int64_t> words) {
  try {
    return std::make_unique<State>(words.begin(), words.size());
  } catch (const std::exception& e) {
    return ffi::Unexpected(error_of(e, ffi::ErrorCode::kInvalidArgument));
  }
}

// XLA's data type of one of ours; PRED for bool.
ffi::DataType xla_type(DType t) {
  static constexpr ffi::DataType kTypes[kNumDTypes] = {ffi::PRED, ffi::S8,  ffi::S16, ffi::S32,  ffi::S64, ffi::U8, ffi::U16,
                                                       ffi::U32,  ffi::U64, ffi::F16, ffi::BF16, ffi::F32, ffi::F64};
  return kTypes[static_cast<int>(t)];
}

std::string check_buffer(const char* role, size_t i, const Array& want, ffi::AnyBuffer got) {
  bool sized = static_cast<int64_t>(got.element_count()) == want.elements;
  if (got.element_type() == xla_type(want.dtype) && sized) return "";
  return std::string("kitsune_cpu: ") + role + " " + std::to_string(i) + " of the call has " + std::to_string(got.element_count()) +
         " elements of XLA type " + std::to_string(static_cast<int>(got.element_type())) + ", but the program wants " +
         std::to_string(want.elements) + " of " + dtype_name(want.dtype);
}

ffi::Error execute(ffi::ThreadPool pool, State* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Call& call = state->executable.call();
  // The last result is a byte that nobody writes or reads: it keeps XLA from making the call the root of a loop's body. A long call
  // has one more operand, which nobody reads: it tells XLA that the program is not cheap (targets/cpu/call.py).
  const size_t operands = static_cast<size_t>(call.operands), results = static_cast<size_t>(call.results);
  if (args.size() < operands || args.size() > operands + 1 || rets.size() != results + 1)
    return ffi::Error::InvalidArgument("kitsune_cpu: the call has " + std::to_string(args.size()) + " operands and " +
                                       std::to_string(rets.size()) + " results, but the program '" + call.name + "' wants " +
                                       std::to_string(operands) + " and " + std::to_string(results + 1));
  std::vector<const void*> ins;
  std::vector<void*> outs;
  for (size_t i = 0; i < operands; ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    if (std::string e = check_buffer("operand", i, call.arrays[i], *buffer); !e.empty()) return ffi::Error::InvalidArgument(e);
    ins.push_back(buffer->untyped_data());
  }
  for (size_t i = 0; i < results; ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    if (std::string e = check_buffer("result", i, call.arrays[operands + i], **buffer); !e.empty())
      return ffi::Error::InvalidArgument(e);
    outs.push_back((*buffer)->untyped_data());
  }
  calls.fetch_add(1, std::memory_order_relaxed);
  XlaPool threads(pool);
  std::string error = state->executable.run(ins.data(), outs.data(), threads);
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kResourceExhausted, error);
}

// Our data type of an integer type of XLA's, or kBool.
DType integer_type(ffi::DataType type) {
  for (DType t : {DType::kI8, DType::kI16, DType::kI32, DType::kI64, DType::kU8, DType::kU16, DType::kU32, DType::kU64})
    if (xla_type(t) == type) return t;
  return DType::kBool;
}

ffi::Error order(ffi::ThreadPool pool, ffi::AnyBuffer ids, ffi::ResultBuffer<ffi::S32> out, int64_t n) {
  const int64_t rows = static_cast<int64_t>(ids.element_count());
  const DType type = integer_type(ids.element_type());
  if (type == DType::kBool) return ffi::Error::InvalidArgument("kitsune_cpu_order: ids are integers");
  if (rows > kMostOrdered || static_cast<int64_t>(out->element_count()) != rows)
    return ffi::Error::InvalidArgument("kitsune_cpu_order: " + std::to_string(rows) + " ids, and room for " +
                                       std::to_string(out->element_count()) + " positions; there may be 2**31 - 1");
  if (n < 0 || n > kMostOrderKeys)
    return ffi::Error::InvalidArgument("kitsune_cpu_order: n is " + std::to_string(n) + ", not in 0..2**32 - 1");
  XlaPool threads(pool);
  std::string error = order_by(type, ids.untyped_data(), rows, n, out->typed_data(), threads);
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kResourceExhausted, error);
}

XLA_FFI_Error* call_order(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Ret<ffi::Buffer<ffi::S32>>()
                                   .Attr<int64_t>("n")
                                   .To(order)
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* call_instantiate(XLA_FFI_CallFrame* frame) {
  bool metadata = frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata;
  if (metadata) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (State::id == XLA_FFI_UNKNOWN_TYPE_ID)
      if (XLA_FFI_Error* error = ffi::Ffi::RegisterTypeId(frame->api, "kitsune_cpu_state", &State::id, &State::info)) return error;
  }
  static const auto* handler = ffi::Ffi::BindInstantiate().Attr<ffi::Span<const int64_t>>("program").To(instantiate).release();
  return handler->Call(frame);
}

XLA_FFI_Error* call_execute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::ThreadPool>()
                                   .Ctx<ffi::State<State>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To([](ffi::ThreadPool pool, State* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
                                     try {
                                       return execute(pool, state, args, rets);
                                     } catch (const std::exception& e) {
                                       return error_of(e, ffi::ErrorCode::kInternal);
                                     }
                                   })
                                   .release();
  return handler->Call(frame);
}

}  // namespace

void* instantiate_handler() { return reinterpret_cast<void*>(&call_instantiate); }
void* execute_handler() { return reinterpret_cast<void*>(&call_execute); }
void* order_handler() { return reinterpret_cast<void*>(&call_order); }
int64_t executed_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace kitsune::cpu
