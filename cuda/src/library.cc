#include "library.h"

#include <map>
#include <tuple>

namespace kitsune::cuda {
namespace {

constexpr size_t kLogBytes = 8192;

// Never destroyed: executables may outlive this file's static objects when the process ends.
std::map<std::tuple<const Driver*, std::string, std::string>, std::weak_ptr<Library>>& loaded() {
  static auto* map = new std::map<std::tuple<const Driver*, std::string, std::string>, std::weak_ptr<Library>>;
  return *map;
}

std::string message(const Driver& driver, CUresult error, const char* what, const std::string& log) {
  std::string text = failure_text(driver, what, error);
  if (error == CUDA_ERROR_NO_BINARY_FOR_GPU)
    text += "; the kernel was compiled for another device: set KITSUNE_CUDA_ARCH to this one's architecture, or unset it";
  if (error == CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
    text += "; NVRTC is newer than the driver: update the driver, or set KITSUNE_CUDA_ARCH to this device's architecture";
  return log.empty() ? text : text + "\n" + log;
}

}  // namespace

Library::Library(const Driver& driver, const std::string& image, const char* entry) : driver_(driver) {
  // The log is the assembler's, when the image is PTX that the driver compiles; a cubin leaves it empty.
  std::string log(kLogBytes, '\0');
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {log.data(), reinterpret_cast<void*>(kLogBytes)};
  CUresult error = driver.cuLibraryLoadData(&library_, image.data(), options, values, 2, nullptr, nullptr, 0);
  if (error != CUDA_SUCCESS) throw std::runtime_error(message(driver, error, "cuLibraryLoadData", log.c_str()));
  error = driver.cuLibraryGetKernel(&kernel_, library_, entry);
  if (error == CUDA_SUCCESS) return;
  std::string text = message(driver, error, ("cuLibraryGetKernel(" + std::string(entry) + ")").c_str(), "");
  driver.cuLibraryUnload(library_);
  throw std::runtime_error(text);
}

// A driver that is shutting down has unloaded it already and answers CUDA_ERROR_DEINITIALIZED.
Library::~Library() { driver_.cuLibraryUnload(library_); }

std::shared_ptr<Library> Library::share(const Driver& driver, const std::string& image, const std::string& settings,
                                        const char* entry) {
  auto& known = loaded();
  for (auto it = known.begin(); it != known.end();) it = it->second.expired() ? known.erase(it) : std::next(it);
  std::weak_ptr<Library>& kept = known[{&driver, settings, image}];
  if (auto library = kept.lock()) return library;
  std::shared_ptr<Library> library(new Library(driver, image, entry));
  kept = library;
  return library;
}

}  // namespace kitsune::cuda
