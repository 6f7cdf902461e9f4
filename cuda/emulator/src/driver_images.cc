// Images of the emulated CUDA driver: ELF shared libraries in memory, and the kernels in them.

#include <elf.h>
#include <sys/mman.h>

#include <cstring>

#include "driver.h"

namespace {

using namespace kitsune::emulator::driver;

// An image comes without its size; the section headers are the last thing in the files that linkers write.
size_t elf_bytes(const void* image) {
  Elf64_Ehdr header;
  memcpy(&header, image, sizeof header);
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) || header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_type != ET_DYN) return 0;
  return header.e_shoff + static_cast<size_t>(header.e_shnum) * header.e_shentsize;
}

int load(Library*& out, const void* image) {
  size_t bytes = image ? elf_bytes(image) : 0;
  if (!bytes) return kInvalidImage;
  auto library = std::make_unique<Library>();
  library->file = memfd_create("kitsune_kernel", MFD_CLOEXEC);
  if (library->file < 0) return kOutOfMemory;
  for (size_t done = 0; done < bytes;) {
    ssize_t n = write(library->file, static_cast<const char*>(image) + done, bytes - done);
    if (n <= 0) return kOutOfMemory;
    done += static_cast<size_t>(n);
  }
  library->handle = dlopen(("/proc/self/fd/" + std::to_string(library->file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library->handle) {
    std::lock_guard<std::mutex> lock(launching);
    last_error = dlerror();
    return kInvalidImage;
  }
  out = library.release();
  return kSuccess;
}

int find(Function*& out, Library* library, const char* name) {
  if (!library || !name) return kInvalidHandle;
  auto& slot = library->functions[name];
  if (!slot) {
    void* entry = dlsym(library->handle, name);
    if (!entry) {
      library->functions.erase(name);
      return kNotFound;
    }
    slot = std::make_unique<Function>();
    slot->entry = reinterpret_cast<void (*)(const void*)>(entry);
    if (void* limit = dlsym(library->handle, (std::string(name) + "_max_threads").c_str()))
      slot->max_threads = *static_cast<const unsigned*>(limit);
    if (void* registers = dlsym(library->handle, (std::string(name) + "_registers").c_str()))
      slot->registers = *static_cast<const unsigned*>(registers);
  }
  out = slot.get();
  return kSuccess;
}

}  // namespace

EXPORT int cuLibraryLoadData(void** library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  return load(*reinterpret_cast<Library**>(library), code);
}
EXPORT int cuLibraryUnload(void* library) {
  delete static_cast<Library*>(library);
  return kSuccess;
}
EXPORT int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  return find(*reinterpret_cast<Function**>(kernel), static_cast<Library*>(library), name);
}
EXPORT int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return kernel ? kSuccess : kInvalidHandle;
}
EXPORT int cuModuleLoadData(void** module, const void* image) { return load(*reinterpret_cast<Library**>(module), image); }
EXPORT int cuModuleUnload(void* module) { return cuLibraryUnload(module); }
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  return cuLibraryGetKernel(function, module, name);
}
