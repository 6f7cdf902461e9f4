// An image that the driver has loaded, shared by the kernels that have the same one.
//
// Comes in: an image, the name of its kernel, and its launch words. Goes out: the driver's kernel. Invariant: the layers of a deep
// network that compile to the same code load it once, and it is unloaded with the last of them. Not thread-safe: the caller holds
// the lock under which kernels are loaded.
#pragma once

#include <memory>
#include <string>

#include "driver.h"

namespace kitsune::cuda {

inline constexpr const char* kEntryPoint = "kitsune_region";
inline constexpr const char* kPackEntryPoint = "kitsune_pack";

class Library {
 public:
  // `settings` keeps apart kernels whose function attributes differ. Throws std::runtime_error with the driver's log.
  static std::shared_ptr<Library> share(const Driver& driver, const std::string& image, const std::string& settings,
                                        const char* entry = kEntryPoint);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  CUkernel kernel() const { return kernel_; }

 private:
  Library(const Driver& driver, const std::string& image, const char* entry);

  const Driver& driver_;
  CUlibrary library_ = nullptr;
  CUkernel kernel_ = nullptr;
};

}  // namespace kitsune::cuda
