#include "launch.h"

#include <cstring>

#include "library.h"
#include "timeline.h"

namespace kitsune::cuda {
namespace {

// Loading takes locks inside the driver that a second thread, loading on another device, would take in another order.
std::mutex& load_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// Makes a context current for a while. XLA has done so already, other callers may not have.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUcontext context) : driver_(driver) {
    CUcontext current = nullptr;
    if (context == nullptr || (driver.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context)) return;
    pushed_ = driver.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
  }
  ~CurrentContext() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent_v2(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// The driver's description of a launch. It points into itself, so it stays where it is made.
struct Config {
  CUlaunchConfig config{};
  CUlaunchAttribute attributes[2]{};

  Config(const Launch& launch, int64_t grid, CUstream stream) {
    config.gridDimX = static_cast<unsigned>(grid);
    config.blockDimX = static_cast<unsigned>(launch.block);
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = static_cast<unsigned>(launch.shared_bytes);
    config.hStream = stream;
    config.attrs = attributes;
    if (launch.cluster > 1) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attribute.value.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
    }
  }
  void make_cooperative() {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute.value.cooperative = 1;
  }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;
};

// As in cuda/include/kitsune/pack.h.
constexpr int64_t kPackThreads = 256;
constexpr size_t kPackMostBuffers = 511;
struct PackParameters {
  void* table;
  void* buffers[kPackMostBuffers];
};

std::string arch_name(int capability) { return "sm_" + std::to_string(capability); }

// What keeps kernels with equal images apart: everything that is set on the function.
std::string settings(const Launch& launch) { return std::to_string(launch.shared_bytes) + "/" + std::to_string(launch.cluster); }

// The emulator checks every access against the buffers; the parameters alone do not say how long they are. `parts`: of which
// buffers of the call these are; empty: they are its buffers. One more is that of a timeline's records.
void announce(const Driver& driver, const Launch& launch, const std::vector<Buffer>& buffers, const std::vector<Part>& parts) {
  std::vector<std::string> texts;
  std::vector<const void*> addresses;
  std::vector<size_t> bytes;
  std::vector<const char*> names;
  for (size_t i = 0; i < buffers.size(); ++i) {
    Part part = i < parts.size() ? parts[i] : Part{static_cast<int64_t>(i), 0, 0};
    bool records = i >= (parts.empty() ? static_cast<size_t>(launch.operands + launch.results) : parts.size());
    texts.push_back(records                         ? "the records of a timeline"
                    : part.buffer < launch.operands ? "operand " + std::to_string(part.buffer)
                                                    : "result " + std::to_string(part.buffer - launch.operands));
    if (part.first > 0) texts.back() += " from byte " + std::to_string(part.first);
    addresses.push_back(buffers[i].data);
    bytes.push_back(buffers[i].bytes);
  }
  for (const std::string& text : texts) names.push_back(text.c_str());
  driver.kitsune_emulator_set_buffers(static_cast<int64_t>(buffers.size()), addresses.data(), bytes.data(), names.data());
}

}  // namespace

Kernel::Kernel(std::string image, std::string packer, const Launch& launch, std::string name, bool emulated)
    : image_(std::move(image)), packer_(std::move(packer)), launch_(launch), name_(std::move(name)), emulated_(emulated) {
  if (!is_utf8(name_)) throw std::invalid_argument("kitsune_cuda: the name of a region is not UTF-8");
  if (std::string wrong = check_image(image_, emulated_); !wrong.empty())
    throw std::invalid_argument("kitsune_cuda: " + name_ + ": " + wrong);
  if (launch_.pack_blocks > 0)
    if (std::string wrong = check_image(packer_, emulated_); !wrong.empty())
      throw std::invalid_argument("kitsune_cuda: " + name_ + ": the packing kernel: " + wrong);
  if (launch_.stamped) number_ = Timelines::all().add_kernel(name_);
}

Kernel::~Kernel() {
  if (launch_.stamped) Timelines::all().remove_kernel(number_);
  std::lock_guard<std::mutex> lock(load_mutex());
  library_.reset();
  packer_library_.reset();
}

const Driver& Kernel::driver() const { return emulated_ ? emulator_driver() : device_driver(); }

void Kernel::fail(const std::string& what) const {
  throw LaunchError("kitsune_cuda: " + name_ + ": " + what + " [" + geometry(launch_) + "]");
}

void Kernel::check(const Driver& driver, CUresult error, const char* what) const {
  if (error != CUDA_SUCCESS) fail(failure_text(driver, what, error));
}

CUcontext Kernel::context_of(const Driver& driver, CUstream stream) const {
  CUcontext context = nullptr;
  if (emulated_) return context;
  check(driver, driver.cuStreamGetCtx(stream, &context), "cuStreamGetCtx");
  return context;
}

const Kernel::Loaded* Kernel::find(CUcontext context) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Loaded& loaded : loaded_)
    if (loaded.context == context) return &loaded;
  return nullptr;
}

void Kernel::load(CUstream stream) {
  const Driver& table = driver();
  load_into(table, context_of(table, stream));
}

bool Kernel::load_current() {
  const Driver& table = driver();
  CUcontext context = nullptr;
  if (!emulated_ && (table.cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == nullptr)) return false;
  load_into(table, context);
  return true;
}

void Kernel::load_into(const Driver& driver, CUcontext context) {
  if (find(context)) return;
  std::lock_guard<std::mutex> loading(load_mutex());
  if (find(context)) return;  // another thread was faster
  CurrentContext current(driver, context);
  check_device(driver);
  try {
    if (!library_) library_ = Library::share(driver, image_, settings(launch_));
  } catch (const std::runtime_error& e) {
    fail(e.what());
  }
  CUfunction function = nullptr;
  check(driver, driver.cuKernelGetFunction(&function, library_->kernel()), "cuKernelGetFunction");
  if (launch_.shared_bytes > 0)
    check(driver,
          driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                    static_cast<int>(launch_.shared_bytes)),
          "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)");
  if (launch_.cluster > kPortableCluster)
    check(driver, driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
          "cuFuncSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)");
  // The driver loads code when it is first used (CUDA C++ guide, "Lazy Loading"), which would be inside execute.
  if (driver.cuFuncLoad) check(driver, driver.cuFuncLoad(function), "cuFuncLoad");
  Loaded loaded{context, function, load_packer(driver), fitted_grid(driver, function)};
  std::lock_guard<std::mutex> lock(mutex_);
  loaded_.push_back(loaded);  // a deque: what `find` has given stays where it is
}

CUfunction Kernel::load_packer(const Driver& driver) {
  CUfunction function = nullptr;
  if (launch_.pack_blocks == 0) return function;
  try {
    if (!packer_library_) packer_library_ = Library::share(driver, packer_, "", kPackEntryPoint);
  } catch (const std::runtime_error& e) {
    fail(e.what());
  }
  check(driver, driver.cuKernelGetFunction(&function, packer_library_->kernel()), "cuKernelGetFunction");
  if (driver.cuFuncLoad) check(driver, driver.cuFuncLoad(function), "cuFuncLoad");
  return function;
}

void Kernel::check_device(const Driver& driver) const {
  CUdevice device = 0;
  check(driver, driver.cuCtxGetDevice(&device), "cuCtxGetDevice");
  int capability = 0, shared_bytes = 0, cooperative = 0;
  try {
    capability = compute_capability(driver, device);
    shared_bytes = device_attribute(driver, device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    cooperative = device_attribute(driver, device, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
  } catch (const DriverError& e) {
    fail(e.what());
  }
  if (launch_.sm == kSm90a && capability != 90)
    fail("the kernel was generated for sm_90a, the device is " + arch_name(capability) +
         ": set KITSUNE_CUDA_ARCH=" + arch_name(capability) + ", or unset it, and compile again");
  if (launch_.sm == kPortable && capability < 80)
    fail("the kernel needs sm_80 or later, the device is " + arch_name(capability) + ": set KITSUNE_DISABLE=1");
  if (launch_.shared_bytes > shared_bytes)
    fail("the kernel needs more shared memory than a block of this " + arch_name(capability) + " may have (" +
         std::to_string(shared_bytes) + " bytes): set KITSUNE_CUDA_ARCH=" + arch_name(capability) +
         ", or unset it, and compile again");
  if (launch_.cooperative && !cooperative) fail("the device has no cooperative launch");
}

// How many blocks the device holds at once. Clusters lie in one GPC each, so only the driver knows how many of them fit: GPCs
// differ in how many of their multiprocessors work, and a MIG slice has a part of them.
int64_t Kernel::resident_blocks(const Driver& driver, CUfunction function) const {
  if (launch_.cluster > 1) {
    int clusters = 0;
    Config config(launch_, launch_.grid, nullptr);
    check(driver, driver.cuOccupancyMaxActiveClusters(&clusters, function, &config.config), "cuOccupancyMaxActiveClusters");
    if (clusters < 1)
      fail("no cluster of this kernel fits on the device: set KITSUNE_CUDA_ARCH=compute_80, which makes kernels without clusters");
    return clusters * launch_.cluster;
  }
  CUdevice device = 0;
  int per_multiprocessor = 0;
  check(driver,
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, function, static_cast<int>(launch_.block),
                                                           static_cast<size_t>(launch_.shared_bytes)),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  if (per_multiprocessor < 1) fail("no block of this kernel fits on a multiprocessor");
  check(driver, driver.cuCtxGetDevice(&device), "cuCtxGetDevice");
  int64_t multiprocessors = device_attribute(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  // The tiles are shared out evenly over blocks that have a multiprocessor each.
  return launch_.instance > 0 ? multiprocessors : per_multiprocessor * multiprocessors;
}

// The grid for this device. Blocks that wait for each other must all be resident: the launch enforces it too, but only with an
// error number.
int64_t Kernel::fitted_grid(const Driver& driver, CUfunction function) const {
  int64_t blocks = resident_blocks(driver, function);
  if (launch_.grid <= blocks) return launch_.grid;
  if (launch_.instance > 0 && launch_.instance <= blocks) return blocks / launch_.instance * launch_.instance;
  if (!launch_.cooperative) return launch_.grid;
  std::string what = launch_.instance > 0 ? "the " + std::to_string(launch_.instance) + " blocks of a pipeline" : "its blocks";
  fail(what + " must all be resident, but only " + std::to_string(blocks) +
       " fit on the device: the kernel was planned for a larger one; trace and compile the function on this machine");
}

void Kernel::check_buffers(const std::vector<Buffer>& buffers) const {
  auto refuse = [&](const std::string& what) { throw std::invalid_argument("kitsune_cuda: " + name_ + ": " + what); };
  if (static_cast<int64_t>(buffers.size()) != launch_.operands + launch_.results)
    refuse("the call has " + std::to_string(buffers.size()) + " buffers, but the kernel has " + std::to_string(launch_.operands) +
           " operands and " + std::to_string(launch_.results) + " results");
  for (size_t i = 0; i < launch_.bytes.size(); ++i)
    if (buffers[i].bytes != static_cast<size_t>(launch_.bytes[i]))
      refuse("buffer " + std::to_string(i) + " has " + std::to_string(buffers[i].bytes) + " bytes, but the kernel was made for " +
             std::to_string(launch_.bytes[i]));
  if (static_cast<uint64_t>(launch_.workspace_zero_bytes) > buffers.back().bytes)
    refuse("the workspace has " + std::to_string(buffers.back().bytes) + " bytes, fewer than the " +
           std::to_string(launch_.workspace_zero_bytes) + " to be zeroed");
}

// Its one parameter is the table, and then every buffer: it reads operands, and writes the workspace and results.
void Kernel::pack(const Driver& driver, const Loaded& loaded, const std::vector<Buffer>& buffers, CUstream stream) const {
  PackParameters parameters{};
  parameters.table = buffers[static_cast<size_t>(launch_.table)].data;
  for (size_t i = 0; i < buffers.size(); ++i) parameters.buffers[i] = buffers[i].data;
  Launch launch{};
  launch.block = kPackThreads;
  launch.cluster = 1;
  Config config(launch, launch_.pack_blocks, stream);
  void* pointers[] = {&parameters};
  if (driver.kitsune_emulator_set_buffers) announce(driver, launch_, buffers, {});
  check(driver, driver.cuLaunchKernelEx(&config.config, loaded.packer, pointers, nullptr), "cuLaunchKernelEx(kitsune_pack)");
}

CUtensorMap Kernel::tensor_map(const Driver& driver, size_t number, void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Encoded& known : encoded_)
    if (known.number == number && known.address == address) return known.map;
  constexpr size_t kMostKnown = 64;  // XLA gives a call few addresses, which return
  if (encoded_.size() == kMostKnown) encoded_.clear();
  const Map& of = launch_.maps[number];
  const uint64_t sizes[] = {static_cast<uint64_t>(of.columns), static_cast<uint64_t>(of.rows)};
  const uint64_t pitches[] = {2 * sizes[0]};
  const uint32_t box[] = {64, 64}, strides[] = {1, 1};
  Encoded made{number, address, {}};
  check(driver,
        driver.cuTensorMapEncodeTiled(&made.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, address, sizes, pitches, box, strides,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  encoded_.push_back(made);
  return made.map;
}

std::vector<CUtensorMap> Kernel::with_maps(const Driver& driver, const std::vector<void*>& pointers) {
  std::vector<CUtensorMap> found;
  if (launch_.maps.empty()) return found;
  for (size_t k = 0; k < launch_.maps.size(); ++k)
    found.push_back(tensor_map(driver, k, pointers[static_cast<size_t>(launch_.maps[k].pointer)]));
  const size_t bytes = pointers.size() * sizeof(void*);
  found.resize(found.size() + (bytes + kMapBytes - 1) / kMapBytes);
  std::memcpy(&found[launch_.maps.size()], pointers.data(), bytes);
  return found;
}

void Kernel::launch(CUstream stream, std::vector<Buffer> buffers) {
  check_buffers(buffers);
  const Driver& table = driver();
  CUcontext context = context_of(table, stream);
  const Loaded* loaded = find(context);
  if (loaded == nullptr) fail("the kernel was not loaded into this context before the launch");
  CurrentContext current(table, context);
  AlignedBuffers aligned(table, kept_, context, stream);
  auto done = [&](const AlignedBuffers::Status& status) { check(table, status.error, status.function); };
  done(aligned.before(buffers, static_cast<size_t>(launch_.operands)));
  // What an earlier call has left would hide that nothing was packed, or too late: NaN in every format.
  if (table.emulated && loaded->packer != nullptr)
    for (size_t i = static_cast<size_t>(launch_.operands); i < buffers.size(); ++i)
      check(table, table.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(buffers[i].data), 0xff, buffers[i].bytes, stream),
            "cuMemsetD8Async");
  if (launch_.workspace_zero_bytes > 0)
    check(table,
          table.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(buffers.back().data), 0,
                                static_cast<size_t>(launch_.workspace_zero_bytes), stream),
          "cuMemsetD8Async");
  if (loaded->packer != nullptr) pack(table, *loaded, buffers, stream);
  std::vector<Buffer> given = launch_.pointers.empty() ? buffers : std::vector<Buffer>();
  for (const Part& part : launch_.pointers)
    given.push_back(
        {static_cast<char*>(buffers[static_cast<size_t>(part.buffer)].data) + part.first, static_cast<size_t>(part.bytes)});
  std::vector<void*> pointers;  // the kernel's one parameter is a struct of tensor maps and of these
  for (const Buffer& buffer : given) pointers.push_back(buffer.data);
  if (launch_.stamped) {
    bool numbered = number_ < Timelines::kKernels;
    CUdeviceptr records = numbered ? Timelines::all().buffer(table, context) : 0;
    pointers.push_back(reinterpret_cast<void*>(records));
    pointers.push_back(reinterpret_cast<void*>(number_));
    if (records && emulated_) given.push_back({pointers[pointers.size() - 2], static_cast<size_t>(Timelines::kBytes)});
  } else {
    Timelines::all().count_unstamped();
  }
  if (table.kitsune_emulator_set_buffers) announce(table, launch_, given, launch_.pointers);
  Config config(launch_, loaded->grid, stream);
  if (launch_.cooperative) config.make_cooperative();
  std::vector<CUtensorMap> with = with_maps(table, pointers);
  void* parameters[] = {with.empty() ? static_cast<void*>(pointers.data()) : with.data()};
  check(table, table.cuLaunchKernelEx(&config.config, loaded->function, parameters, nullptr), "cuLaunchKernelEx");
  done(aligned.after());
}

}  // namespace kitsune::cuda
