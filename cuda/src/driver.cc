#include "driver.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>

namespace kitsune::cuda {
namespace {

constexpr int kMinVersion = 12000;  // cuLaunchKernelEx, cuLibraryLoadData and cuGetProcAddress_v2
constexpr uint64_t kLegacyStream = 0;

using GetProcAddress = CUresult (*)(const char* name, void** function, int version, uint64_t flags, int* status);
using GetVersion = CUresult (*)(int* version);

std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

// An open library and how its symbols are found: through cuGetProcAddress, which gives a function as CUDA 12.0 declared it
// however often it has changed since, or by their exported names.
class Symbols {
 public:
  Symbols(void* library, bool by_version) : library_(library) {
    if (by_version) get_ = reinterpret_cast<GetProcAddress>(exported("cuGetProcAddress_v2"));
  }

  void* exported(const char* name) const { return dlsym(library_, name); }

  void* find(const std::string& name) const {
    bool suffixed = name.size() > 3 && name.compare(name.size() - 3, 3, "_v2") == 0;  // cuGetProcAddress wants the plain name
    if (void* function = versioned(suffixed ? name.substr(0, name.size() - 3).c_str() : name.c_str(), kMinVersion)) return function;
    return exported(name.c_str());
  }

  void* versioned(const char* name, int version) const {
    void* function = nullptr;
    int status = 0;
    if (get_ == nullptr || get_(name, &function, version, kLegacyStream, &status) != CUDA_SUCCESS || status != 0) return nullptr;
    return function;
  }

 private:
  void* library_;
  GetProcAddress get_ = nullptr;
};

Driver fill(const Symbols& symbols, const std::string& what, const std::string& advice) {
  Driver driver;
  auto version = reinterpret_cast<GetVersion>(symbols.exported("cuDriverGetVersion"));
  if (version == nullptr || version(&driver.version) != CUDA_SUCCESS)
    throw DriverError(what + " does not say its version (cuDriverGetVersion): " + advice);
  if (driver.version < kMinVersion)
    throw DriverError(what + " supports CUDA " + version_text(driver.version) + ", but kitsune_jax needs " +
                      version_text(kMinVersion) + " or later: " + advice);
#define KITSUNE_FILL(name, parameters)                                        \
  driver.name = reinterpret_cast<decltype(driver.name)>(symbols.find(#name)); \
  if (driver.name == nullptr) throw DriverError(what + " has no function " #name ": " + advice);
  KITSUNE_DRIVER_FUNCTIONS(KITSUNE_FILL)
#undef KITSUNE_FILL
#define KITSUNE_FILL(name, result, parameters)                                                     \
  driver.name = reinterpret_cast<decltype(driver.name)>(symbols.versioned(#name, driver.version)); \
  if (driver.name == nullptr) driver.name = reinterpret_cast<decltype(driver.name)>(symbols.exported(#name));
  KITSUNE_OPTIONAL_DRIVER_FUNCTIONS(KITSUNE_FILL)
#undef KITSUNE_FILL
  return driver;
}

Driver open_device_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) library = dlopen("libcuda.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw DriverError(
        "there is no CUDA driver (libcuda.so.1) on this machine: install the NVIDIA driver, in a container run it with "
        "the GPU made visible");
  Driver driver = fill(Symbols(library, true), "the CUDA driver", "update the NVIDIA driver");
  if (CUresult error = driver.cuInit(0); error == CUDA_ERROR_NO_DEVICE)
    throw DriverError("the CUDA driver finds no device: check nvidia-smi and CUDA_VISIBLE_DEVICES");
  else if (error != CUDA_SUCCESS)
    throw DriverError("the CUDA driver does not start (cuInit): " + error_text(driver, error) + "; check nvidia-smi");
  return driver;
}

Driver open_emulator(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw DriverError("the emulator cannot be opened: " + std::string(why ? why : path));
  }
  Driver driver = fill(Symbols(library, false), "the emulator " + path, "build it from the sources of this version of kitsune_jax");
  driver.emulated = true;
  if (CUresult error = driver.cuInit(0); error != CUDA_SUCCESS)
    throw DriverError("the emulator does not start (cuInit): " + error_text(driver, error));
  return driver;
}

std::mutex emulator_mutex;
std::string emulator_path;
const Driver* emulator = nullptr;  // lives as long as the process, as its library does

}  // namespace

const Driver& device_driver() {
  struct Opened {
    std::optional<Driver> driver;
    std::string error;
  };
  static const Opened opened = [] {
    Opened result;
    try {
      result.driver = open_device_driver();
    } catch (const DriverError& e) {
      result.error = e.what();
    }
    return result;
  }();
  if (!opened.driver) throw DriverError(opened.error);
  return *opened.driver;
}

const Driver& emulator_driver() {
  std::lock_guard<std::mutex> lock(emulator_mutex);
  if (emulator == nullptr) throw DriverError("no emulator is open: call use_emulator(path) before a kernel runs");
  return *emulator;
}

void use_emulator(const std::string& path) {
  std::lock_guard<std::mutex> lock(emulator_mutex);
  if (emulator != nullptr) {
    if (path != emulator_path) throw DriverError("the emulator " + emulator_path + " is open already; a process has one");
    return;
  }
  emulator = new Driver(open_emulator(path));
  emulator_path = path;
}

std::string error_text(const Driver& driver, CUresult error) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(error, &name) != CUDA_SUCCESS || name == nullptr) return "CUDA error " + std::to_string(error);
  if (driver.cuGetErrorString(error, &text) != CUDA_SUCCESS || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

std::string failure_text(const Driver& driver, const char* function, CUresult error) {
  std::string text = std::string(function) + " failed: " + error_text(driver, error);
  bool explained = error == CUDA_ERROR_LAUNCH_FAILED || error == CUDA_ERROR_INVALID_IMAGE;  // else it is an older one's message
  if (explained && driver.kitsune_emulator_last_error)
    if (const char* why = driver.kitsune_emulator_last_error(); why && *why) text += std::string(": ") + why;
  return text;
}

int device_attribute(const Driver& driver, CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  if (CUresult error = driver.cuDeviceGetAttribute(&value, attribute, device); error != CUDA_SUCCESS)
    throw DriverError("cuDeviceGetAttribute(" + std::to_string(attribute) + "): " + error_text(driver, error));
  return value;
}

int compute_capability(const Driver& driver, CUdevice device) {
  return 10 * device_attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
         device_attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
}

std::vector<DeviceInfo> devices(const Driver& driver) {
  int count = 0;
  if (CUresult error = driver.cuDeviceGetCount(&count); error != CUDA_SUCCESS)
    throw DriverError("cuDeviceGetCount: " + error_text(driver, error));
  std::vector<DeviceInfo> found;
  for (int i = 0; i < count; ++i) {
    CUdevice device = 0;
    if (CUresult error = driver.cuDeviceGet(&device, i); error != CUDA_SUCCESS)
      throw DriverError("cuDeviceGet(" + std::to_string(i) + "): " + error_text(driver, error));
    auto optional = [&](CUdevice_attribute attribute) {
      int value = 0;
      return driver.cuDeviceGetAttribute(&value, attribute, device) == CUDA_SUCCESS ? value : 0;
    };
    char name[256] = "";
    if (driver.cuDeviceGetName(name, sizeof name - 1, device) != CUDA_SUCCESS) name[0] = 0;
    found.push_back({compute_capability(driver, device), device_attribute(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                     device_attribute(driver, device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN), name,
                     optional(CU_DEVICE_ATTRIBUTE_CLOCK_RATE), optional(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
                     optional(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH), optional(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)});
  }
  return found;
}

}  // namespace kitsune::cuda
