#include "aligned.h"

#include <algorithm>

namespace kitsune::cuda {
namespace {

CUdeviceptr address_of(const Buffer& buffer) { return reinterpret_cast<CUdeviceptr>(buffer.data); }

}  // namespace

KeptMemory::~KeptMemory() {
  for (const auto& [place, address] : pieces_) {
    CUcontext previous = nullptr;
    bool pushed = std::get<CUcontext>(place) != nullptr && driver_->cuCtxPushCurrent_v2(std::get<CUcontext>(place)) == CUDA_SUCCESS;
    driver_->cuMemFree_v2(address);  // a driver that is shutting down has freed it already
    if (pushed) driver_->cuCtxPopCurrent_v2(&previous);
  }
}

CUresult KeptMemory::get(const Driver& driver, CUcontext context, size_t buffer, size_t bytes, CUdeviceptr* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  driver_ = &driver;
  auto [piece, fresh] = pieces_.try_emplace({context, buffer, bytes}, 0);
  if (fresh) {
    // A thread that captures a stream may not allocate until it says that this is no part of the capture.
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUresult error = driver.cuThreadExchangeStreamCaptureMode(&mode);
    if (error == CUDA_SUCCESS) {
      error = driver.cuMemAlloc_v2(&piece->second, bytes);
      driver.cuThreadExchangeStreamCaptureMode(&mode);
    }
    if (error != CUDA_SUCCESS) {
      pieces_.erase(piece);
      return error;
    }
  }
  *address = piece->second;
  return CUDA_SUCCESS;
}

AlignedBuffers::~AlignedBuffers() {
  for (const Copy& copy : copies_)
    if (copy.owned) driver_.cuMemFreeAsync(copy.aligned, stream_);
}

AlignedBuffers::Status AlignedBuffers::allocate(size_t buffer, size_t bytes, CUdeviceptr* address, bool* owned) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  if (CUresult error = driver_.cuStreamIsCapturing(stream_, &capture); error != CUDA_SUCCESS) return {error, "cuStreamIsCapturing"};
  CUresult error = CUDA_ERROR_NOT_SUPPORTED;
  if (capture == CU_STREAM_CAPTURE_STATUS_NONE) error = driver_.cuMemAllocAsync(address, bytes, stream_);
  *owned = error == CUDA_SUCCESS;
  if (error != CUDA_ERROR_NOT_SUPPORTED) return {error, "cuMemAllocAsync"};  // not every virtual GPU has memory pools
  return {kept_.get(driver_, context_, buffer, bytes, address), "cuMemAlloc"};
}

AlignedBuffers::Status AlignedBuffers::before(std::vector<Buffer>& buffers, size_t operands) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (is_aligned(buffers[i])) continue;
    const bool result = i >= operands && i + 1 < buffers.size();
    const auto same = [&](const Copy& copy) { return copy.given.data == buffers[i].data && copy.given.bytes == buffers[i].bytes; };
    // A result in the memory of an operand, which the kernel finds there, shares the operand's copy.
    if (auto shared = std::find_if(copies_.begin(), copies_.end(), same); result && shared != copies_.end()) {
      shared->result = true;
      buffers[i].data = reinterpret_cast<void*>(shared->aligned);
      continue;
    }
    Copy copy{buffers[i], 0, result, false};
    if (Status status = allocate(i, copy.given.bytes, &copy.aligned, &copy.owned); status.error != CUDA_SUCCESS) return status;
    copies_.push_back(copy);
    buffers[i].data = reinterpret_cast<void*>(copy.aligned);
    if (i >= operands) continue;
    CUresult error = driver_.cuMemcpyDtoDAsync_v2(copy.aligned, address_of(copy.given), copy.given.bytes, stream_);
    if (error != CUDA_SUCCESS) return {error, "cuMemcpyDtoDAsync"};
  }
  return {};
}

AlignedBuffers::Status AlignedBuffers::after() {
  for (const Copy& copy : copies_) {
    if (!copy.result) continue;
    CUresult error = driver_.cuMemcpyDtoDAsync_v2(address_of(copy.given), copy.aligned, copy.given.bytes, stream_);
    if (error != CUDA_SUCCESS) return {error, "cuMemcpyDtoDAsync"};
  }
  return {};
}

}  // namespace kitsune::cuda
