#include "timeline.h"

#include <algorithm>
#include <chrono>

namespace kitsune::cuda {
namespace {

void check(const Driver& driver, CUresult error, const char* function) {
  if (error != CUDA_SUCCESS) throw DriverError(failure_text(driver, function, error));
}

// Makes a context current, and waits for all work in it at both ends: no kernel is in the middle of its records then.
class Quiet {
 public:
  Quiet(const Driver& driver, CUcontext context) : driver_(driver) {
    if (context != nullptr) check(driver, driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
    pushed_ = context != nullptr;
    if (CUresult error = driver.cuCtxSynchronize(); error != CUDA_SUCCESS) {
      pop();
      check(driver, error, "cuCtxSynchronize");
    }
  }
  ~Quiet() {
    driver_.cuCtxSynchronize();
    pop();
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  void pop() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent_v2(&popped);
  }

  const Driver& driver_;
  bool pushed_ = false;
};

void copy_out(const Driver& driver, void* to, CUdeviceptr from, size_t bytes) {
  check(driver, driver.cuMemcpyDtoH_v2(to, from, bytes), "cuMemcpyDtoH");
}

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Timelines& Timelines::all() {
  static Timelines* const found = new Timelines;  // kernels may outlive the statics of this library
  return *found;
}

Timelines::Buffer Timelines::made(const Driver& driver, CUcontext context, int device) {
  auto [at, fresh] = buffers_.try_emplace(context, Buffer{&driver, device, 0});
  if (fresh) {
    CUresult error = driver.cuMemAlloc_v2(&at->second.memory, static_cast<size_t>(kBytes));
    if (error != CUDA_SUCCESS) {
      buffers_.erase(at);
      check(driver, error, "cuMemAlloc (64 MiB for the timeline)");
    }
  }
  return at->second;
}

// `on`: 1 from here on, with no records yet.
void Timelines::set_head(const Buffer& buffer, uint32_t on) const {
  std::vector<uint32_t> head(kHeadBytes / sizeof(uint32_t), 0);
  head[0] = on;
  head[1] = static_cast<uint32_t>(chunks_);
  check(*buffer.driver, buffer.driver->cuMemcpyHtoD_v2(buffer.memory, head.data(), kHeadBytes), "cuMemcpyHtoD");
}

void Timelines::start(int64_t chunks, bool devices) {
  chunks_ = std::clamp<int64_t>(chunks, 1, kMostChunks);
  unstamped_ = 0;
  if (devices) {
    const Driver& driver = device_driver();
    if (!driver.cuDevicePrimaryCtxGetState || !driver.cuDevicePrimaryCtxRetain || !driver.cuCtxSynchronize ||
        !driver.cuMemcpyDtoH_v2 || !driver.cuMemcpyHtoD_v2)
      throw DriverError("the CUDA driver lacks a function that timelines need: update the NVIDIA driver");
    int count = 0;
    check(driver, driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      CUdevice device = 0;
      unsigned flags = 0;
      int active = 0;
      CUcontext context = nullptr;
      check(driver, driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
      check(driver, driver.cuDevicePrimaryCtxGetState(device, &flags, &active), "cuDevicePrimaryCtxGetState");
      if (!active) continue;
      check(driver, driver.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
      Quiet quiet(driver, context);
      std::lock_guard<std::mutex> lock(mutex_);
      set_head(made(driver, context, ordinal), 1);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto emulated = buffers_.find(nullptr); emulated != buffers_.end()) set_head(emulated->second, 1);
  on_ = true;
}

Timelines::Recording Timelines::stop() {
  if (!on_.exchange(false)) return {};
  Recording found{{}, {}, unstamped_};
  std::map<CUcontext, Buffer> buffers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    buffers = buffers_;
    found.names = names_;
  }
  for (const auto& [context, buffer] : buffers) {
    const Driver& driver = *buffer.driver;
    Quiet quiet(driver, context);
    Recorded recorded{buffer.device, std::vector<uint32_t>(kHeadBytes / sizeof(uint32_t)), "", now_ns()};
    copy_out(driver, recorded.head.data(), buffer.memory, kHeadBytes);
    if (recorded.head[0] == 0) continue;
    recorded.chunks.resize(std::min(recorded.head[1], recorded.head[2]) * static_cast<size_t>(kChunkBytes));
    if (!recorded.chunks.empty()) copy_out(driver, recorded.chunks.data(), buffer.memory + kHeadBytes, recorded.chunks.size());
    set_head(buffer, 0);
    found.contexts.push_back(std::move(recorded));
  }
  return found;
}

size_t Timelines::add_kernel(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t number = static_cast<size_t>(std::find(used_.begin(), used_.end(), false) - used_.begin());
  if (number == kKernels) return number;
  if (number == used_.size()) {
    used_.push_back(true);
    names_.push_back(name);
  }
  used_[number] = true;
  names_[number] = name;
  return number;
}

// The name stays until the number is given again, for the records of the timeline that runs.
void Timelines::remove_kernel(size_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number < used_.size()) used_[number] = false;
}

CUdeviceptr Timelines::buffer(const Driver& driver, CUcontext context) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto at = buffers_.find(context); at != buffers_.end()) return at->second.memory;
  if (!driver.emulated || !on_) return 0;
  const Buffer fresh = made(driver, context, -1);
  set_head(fresh, 1);
  return fresh.memory;
}

void Timelines::count_unstamped() {
  if (on_) ++unstamped_;
}

}  // namespace kitsune::cuda
