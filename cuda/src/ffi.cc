// The boundary to XLA. Attributes of a call: `image` (bytes), `packer` (the image of the packing kernel, empty where the launch
// words name none), `launch` (launch_words.h), `name` (region and source line).
//
//   instantiate   once per compiled executable, perhaps ahead of time and without a device: checks the attributes, calls no driver
//   prepare       before each run: loads the kernel into the current context, which XLA has activated by then
//   initialize    the same by the run's stream, which prepare does not have; both come before XLA's devices wait for each other
//   execute       zeroes the head of the workspace, packs and launches; may be captured into a command buffer
//
// Loading never happens in execute: it takes locks inside the driver, and may wait for a kernel that spins until another device,
// whose thread waits for the same lock, has started its own. XLA:CPU has no prepare and initialize; the emulator has no such locks.
//
// The state's type is registered from inside the instantiate handler, when XLA asks for its metadata: JAX may flush targets that
// were registered before the backend exists ahead of types. Each platform may be another copy of XLA with types of its own.
#include "ffi.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace kitsune::cuda {
namespace {

namespace ffi = xla::ffi;

enum class Platform { kDevice, kEmulator };

std::atomic<int64_t> calls{0};

template <Platform platform>
struct State {
  static ffi::TypeId id;
  static const XLA_FFI_TypeInfo info;
  State(std::string image, std::string packer, const Launch& launch, std::string name)
      : kernel(std::move(image), std::move(packer), launch, std::move(name), platform == Platform::kEmulator) {}
  Kernel kernel;
};
template <Platform platform>
ffi::TypeId State<platform>::id = XLA_FFI_UNKNOWN_TYPE_ID;
template <Platform platform>
const XLA_FFI_TypeInfo State<platform>::info = ffi::MakeTypeInfo<State<platform>>();

// Runs `body`, and turns what it throws into XLA's error.
template <class Body>
ffi::Error guarded(const Body& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(e.what());
  } catch (const DriverError& e) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, std::string("kitsune_cuda: ") + e.what());
  } catch (const std::bad_alloc&) {
    try {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "kitsune_cuda: out of host memory; set KITSUNE_DISABLE=1 to run without pipelines");
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");  // short enough to need none
    }
  } catch (const std::exception& e) {
    return ffi::Error(ffi::ErrorCode::kInternal, e.what());
  }
}

template <Platform platform>
ffi::ErrorOr<std::unique_ptr<State<platform>>> instantiate(ffi::Span<const uint8_t> image, ffi::Span<const uint8_t> packer,
                                                           ffi::Span<const int64_t> words, std::string_view name) {
  std::unique_ptr<State<platform>> state;
  ffi::Error error = guarded([&] {
    std::string bytes(reinterpret_cast<const char*>(image.begin()), image.size());
    std::string packing(reinterpret_cast<const char*>(packer.begin()), packer.size());
    Launch launch = parse_launch(words.begin(), words.size());
    if (launch.bytes.empty()) throw std::invalid_argument("launch words: the bytes of the buffers are missing");
    state = std::make_unique<State<platform>>(std::move(bytes), std::move(packing), launch, std::string(name));
  });
  if (error.failure()) return ffi::Unexpected(std::move(error));
  return state;
}

ffi::Error launch(Kernel& kernel, CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Launch& config = kernel.config();
  if (static_cast<int64_t>(args.size()) != config.operands || static_cast<int64_t>(rets.size()) != config.results)
    return ffi::Error::InvalidArgument("kitsune_cuda: the call has " + std::to_string(args.size()) + " operands and " +
                                       std::to_string(rets.size()) + " results, but its kernel wants " +
                                       std::to_string(config.operands) + " and " + std::to_string(config.results));
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers.push_back({buffer->untyped_data(), buffer->size_bytes()});
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers.push_back({(*buffer)->untyped_data(), (*buffer)->size_bytes()});
  }
  kernel.launch(stream, buffers);
  calls.fetch_add(1, std::memory_order_relaxed);
  return ffi::Error::Success();
}

template <Platform platform>
XLA_FFI_Error* call_instantiate(XLA_FFI_CallFrame* frame) {
  using S = State<platform>;
  bool metadata = frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata;
  if (metadata) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (S::id == XLA_FFI_UNKNOWN_TYPE_ID) {
      const char* name = platform == Platform::kDevice ? "kitsune_cuda_state" : "kitsune_cuda_emulator_state";
      if (XLA_FFI_Error* error = ffi::Ffi::RegisterTypeId(frame->api, name, &S::id, &S::info)) return error;
    }
  }
  static const auto* handler = ffi::Ffi::BindInstantiate()
                                   .Attr<ffi::Span<const uint8_t>>("image")
                                   .Attr<ffi::Span<const uint8_t>>("packer")
                                   .Attr<ffi::Span<const int64_t>>("launch")
                                   .Attr<std::string_view>("name")
                                   .To(instantiate<platform>)
                                   .release();
  return handler->Call(frame);
}

using DeviceState = State<Platform::kDevice>;
using EmulatorState = State<Platform::kEmulator>;

XLA_FFI_Error* call_prepare(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindPrepare()
                                   .Ctx<ffi::State<DeviceState>>()
                                   .To([](DeviceState* state) { return guarded([&] { state->kernel.load_current(); }); })
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* call_initialize(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      ffi::Ffi::BindInitialize()
          .Ctx<ffi::PlatformStream<CUstream>>()
          .Ctx<ffi::State<DeviceState>>()
          .To([](CUstream stream, DeviceState* state) { return guarded([&] { state->kernel.load(stream); }); })
          .release();
  return handler->Call(frame);
}

XLA_FFI_Error* call_execute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::PlatformStream<CUstream>>()
                                   .Ctx<ffi::State<DeviceState>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(
                                       [](CUstream stream, DeviceState* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
                                         ffi::Error result;
                                         ffi::Error error = guarded([&] { result = launch(state->kernel, stream, args, rets); });
                                         return error.failure() ? error : result;
                                       },
                                       {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* call_emulated_execute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::State<EmulatorState>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To([](EmulatorState* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
                                     ffi::Error result;
                                     ffi::Error error = guarded([&] {
                                       state->kernel.load(nullptr);
                                       result = launch(state->kernel, nullptr, args, rets);
                                     });
                                     return error.failure() ? error : result;
                                   })
                                   .release();
  return handler->Call(frame);
}

void* opaque(XLA_FFI_Handler* handler) { return reinterpret_cast<void*>(handler); }

}  // namespace

Handlers device_handlers() {
  return {opaque(&call_instantiate<Platform::kDevice>), opaque(&call_prepare), opaque(&call_initialize), opaque(&call_execute)};
}

Handlers emulator_handlers() {
  return {opaque(&call_instantiate<Platform::kEmulator>), nullptr, nullptr, opaque(&call_emulated_execute)};
}

int64_t executed_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace kitsune::cuda
