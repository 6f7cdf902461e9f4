// The Python module kitsune_jax._cuda: handlers for jax.ffi, and what tests need to reach a driver without XLA.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "ffi.h"
#include "launch.h"
#include "launch_words.h"
#include "timeline.h"

namespace nb = nanobind;

namespace kitsune::cuda {
namespace {

using Words = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::dict stages(const Handlers& handlers) {
  nb::dict d;
  auto add = [&](const char* stage, void* handler) {
    if (handler) d[stage] = nb::capsule(handler);
  };
  add("instantiate", handlers.instantiate);
  add("prepare", handlers.prepare);
  add("initialize", handlers.initialize);
  add("execute", handlers.execute);
  return d;
}

nb::dict handlers() {
  nb::dict d;
  d["cuda"] = stages(device_handlers());
  d["cpu"] = stages(emulator_handlers());
  return d;
}

nb::object driver_info() {
  try {
    const Driver& driver = device_driver();
    nb::list found;
    for (const DeviceInfo& device : devices(driver)) {
      nb::dict d;
      d["compute_capability"] = device.capability;
      d["multiprocessors"] = device.multiprocessors;
      d["shared_bytes"] = device.shared_bytes;
      d["name"] = nb::str(device.name.c_str());
      d["clock"] = 1e3 * device.clock_khz;
      d["memory_bandwidth"] = 1e3 * device.memory_clock_khz * 2 * (device.memory_bus_bits / 8);
      d["l2_bytes"] = device.l2_bytes;
      found.append(d);
    }
    nb::dict d;
    d["version"] = driver.version;
    d["devices"] = found;
    return d;
  } catch (const DriverError& e) {
    return nb::str(e.what());
  }
}

std::string check_launch(const Words& words) {
  try {
    parse_launch(words.data(), words.size());
    return "";
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
}

nb::dict launch_info(const Words& words) {
  Launch launch = parse_launch(words.data(), words.size());
  nb::dict d;
  d["sm"] = launch.sm;
  d["grid"] = launch.grid;
  d["block"] = launch.block;
  d["cluster"] = launch.cluster;
  d["shared_bytes"] = launch.shared_bytes;
  d["cooperative"] = launch.cooperative;
  d["stamped"] = launch.stamped;
  d["instance"] = launch.instance;
  d["operands"] = launch.operands;
  d["results"] = launch.results;
  d["workspace_zero_bytes"] = launch.workspace_zero_bytes;
  d["bytes"] = launch.bytes;
  d["pack_blocks"] = launch.pack_blocks;
  d["table"] = launch.table;
  d["pointers"] = launch.pointers.size();
  d["maps"] = launch.maps.size();
  return d;
}

void make_kernel(Kernel* self, const nb::bytes& image, const Words& words, const std::string& name, bool emulated,
                 const nb::bytes& packer) {
  new (self) Kernel(std::string(image.c_str(), image.size()), std::string(packer.c_str(), packer.size()),
                    parse_launch(words.data(), words.size()), name, emulated);
}

void launch_kernel(Kernel& kernel, const std::vector<std::pair<uintptr_t, size_t>>& buffers, uintptr_t stream) {
  std::vector<Buffer> given;
  for (auto [address, bytes] : buffers) given.push_back({reinterpret_cast<void*>(address), bytes});
  nb::gil_scoped_release release;
  kernel.launch(reinterpret_cast<CUstream>(stream), given);
}

// ([(device, head, chunks, host's nanoseconds) of each context], names of kernels, launches of kernels without stamps).
nb::tuple stop_timeline() {
  Timelines::Recording found = [] {
    nb::gil_scoped_release release;
    return Timelines::all().stop();
  }();
  nb::list contexts;
  for (const Timelines::Recorded& c : found.contexts)
    contexts.append(nb::make_tuple(c.device, nb::bytes(c.head.data(), c.head.size() * sizeof(uint32_t)),
                                   nb::bytes(c.chunks.data(), c.chunks.size()), c.host_ns));
  nb::list names;
  for (const std::string& name : found.names) names.append(nb::bytes(name.data(), name.size()));
  return nb::make_tuple(contexts, names, found.unstamped);
}

}  // namespace
}  // namespace kitsune::cuda

NB_MODULE(_cuda, m) {
  namespace cuda = kitsune::cuda;
  m.doc() = "The CUDA target of kitsune_jax: the XLA custom call kitsune_cuda, for devices and for the emulator.";
  m.def("handlers", &cuda::handlers, "Capsules of the FFI handlers by platform and stage, for jax.ffi.register_ffi_target.");
  m.def("use_emulator", &cuda::use_emulator, nb::arg("path"),
        "Opens the emulator's shared library; calls on platform \"cpu\" run in it. RuntimeError if it cannot be used.");
  m.def("driver_info", &cuda::driver_info,
        "The driver's CUDA version and its devices as a dict, or a sentence that says what is missing.");
  m.def("calls", &cuda::executed_calls, "Custom calls launched so far in this process.");
  m.def("launch_version", [] { return cuda::kLaunchVersion; }, "The version of the launch words this extension reads.");
  m.def("check_launch", &cuda::check_launch, nb::arg("words"), "'' for valid launch words, else what is wrong with them.");
  m.def("launch_info", &cuda::launch_info, nb::arg("words"), "The launch words by name. ValueError if they are invalid.");
  m.def(
      "start_timeline", [](int64_t chunks, bool devices) { cuda::Timelines::all().start(chunks, devices); }, nb::arg("chunks"),
      nb::arg("devices"), nb::call_guard<nb::gil_scoped_release>(),
      "Stamped kernels record from now on, in the emulator and, with `devices`, on the devices in use.");
  m.def("clock_ns", &cuda::now_ns, "The clock of the host that timelines of kernels are laid beside.");
  m.def("stop_timeline", &cuda::stop_timeline, "The records since start_timeline: cuda/src/timeline.h.");
  nb::class_<cuda::Kernel>(m, "Kernel", "One kernel outside of XLA, as the handlers use it.")
      .def("__init__", &cuda::make_kernel, nb::arg("image"), nb::arg("words"), nb::arg("name"), nb::arg("emulated") = false,
           nb::arg("packer") = nb::bytes("", 0))
      .def("load_current", &cuda::Kernel::load_current, nb::call_guard<nb::gil_scoped_release>(),
           "Loads it into the calling thread's context; False if there is none.")
      .def(
          "load", [](cuda::Kernel& kernel, uintptr_t stream) { kernel.load(reinterpret_cast<cuda::CUstream>(stream)); },
          nb::arg("stream") = 0, nb::call_guard<nb::gil_scoped_release>(), "Loads it into the context of a stream.")
      .def("launch", &cuda::launch_kernel, nb::arg("buffers"), nb::arg("stream") = 0,
           "Launches it on (address, bytes) of each operand and result.");
}
