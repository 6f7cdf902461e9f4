// The handlers for devices, called as XLA:GPU calls them: metadata, instantiate, prepare, initialize, execute.
//
// The stand-in for XLA keeps one state and one stream, and only has the functions that these handlers reach; the driver is
// fake_driver.cc, found as libcuda.so.1. XLA's own order is in xla/backends/gpu/runtime/custom_call_thunk.cc: prepare has no
// stream, instantiate neither stream nor buffers.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "ffi.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

using kitsune::cuda::device_handlers;

// What XLA hands to a handler as its opaque context.
struct Context {
  void* state = nullptr;
  int64_t state_type = 0;
  void* stream = nullptr;
};
template <class Args>
Context& context_of(Args* args) {
  return *reinterpret_cast<Context*>(args->ctx);
}

XLA_FFI_TypeInfo state_info{};

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
void destroy_error(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* register_type(XLA_FFI_Type_Register_Args* args) {
  state_info = *args->type_info;
  args->type_id->type_id = 42;
  return nullptr;
}
XLA_FFI_Error* set_state(XLA_FFI_State_Set_Args* args) {
  context_of(args).state = args->state;
  context_of(args).state_type = args->type_id->type_id;
  return nullptr;
}
XLA_FFI_Error* get_state(XLA_FFI_State_Get_Args* args) {
  if (context_of(args).state == nullptr || context_of(args).state_type != args->type_id->type_id)
    return new XLA_FFI_Error{"no such state"};
  args->state = context_of(args).state;
  return nullptr;
}
XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  if (context_of(args).stream == nullptr) return new XLA_FFI_Error{"no stream"};
  args->stream = context_of(args).stream;
  return nullptr;
}

const XLA_FFI_Api& api() {
  static const XLA_FFI_Api table = [] {
    XLA_FFI_Api a{};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.XLA_FFI_Error_Create = create_error;
    a.XLA_FFI_Error_Destroy = destroy_error;
    a.XLA_FFI_Type_Register = register_type;
    a.XLA_FFI_State_Set = set_state;
    a.XLA_FFI_State_Get = get_state;
    a.XLA_FFI_Stream_Get = get_stream;
    return a;
  }();
  return table;
}

// One call site: its attributes and its buffers, 16 floats each.
struct Call {
  std::string image = "image", packer, name = "mlp (train.py:12)";
  std::vector<int64_t> words{6, 900, 132, 384, 2, 1024, 1, 0, 2, 1, 32, 64, 64, 64};
  Context context;

  XLA_FFI_CallFrame frame(XLA_FFI_ExecutionStage stage) {
    XLA_FFI_CallFrame f{};
    f.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    f.api = &api();
    f.ctx = reinterpret_cast<decltype(f.ctx)>(&context);
    f.stage = stage;
    f.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
    f.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
    f.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 4, types_, names_, values_};
    arrays_[0] = {XLA_FFI_DataType_U8, image.size(), image.data()};
    arrays_[1] = {XLA_FFI_DataType_S64, words.size(), words.data()};
    arrays_[2] = {XLA_FFI_DataType_U8, packer.size(), packer.data()};
    text_ = {name.data(), name.size()};
    return f;
  }

  void shorten(int64_t elements = 15) { dims_[0] = elements; }

  // "" or the error's message.
  std::string run(void* handler, XLA_FFI_ExecutionStage stage, int operands = 0) {
    XLA_FFI_CallFrame f = frame(stage);
    if (operands > 0) {
      f.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operands, operand_types_, pointers_};
      f.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 1, result_types_, pointers_ + 3};
    }
    XLA_FFI_Error* error = reinterpret_cast<XLA_FFI_Handler*>(handler)(&f);
    std::string message = error ? error->message : "";
    delete error;
    return message;
  }

 private:
  XLA_FFI_AttrType types_[4] = {XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_STRING, XLA_FFI_AttrType_ARRAY};
  XLA_FFI_ByteSpan keys_[4] = {{"image", 5}, {"launch", 6}, {"name", 4}, {"packer", 6}};
  XLA_FFI_ByteSpan* names_[4] = {&keys_[0], &keys_[1], &keys_[2], &keys_[3]};
  XLA_FFI_Array arrays_[3]{};
  XLA_FFI_ByteSpan text_{};
  void* values_[4] = {&arrays_[0], &arrays_[1], &text_, &arrays_[2]};
  int64_t dims_[1] = {16};
  alignas(16) float data_[4][16]{};
  XLA_FFI_Buffer buffers_[4] = {buffer(0), buffer(1), buffer(2), buffer(3)};
  void* pointers_[4] = {&buffers_[0], &buffers_[1], &buffers_[2], &buffers_[3]};
  XLA_FFI_ArgType operand_types_[3] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType result_types_[1] = {XLA_FFI_RetType_BUFFER};

  XLA_FFI_Buffer buffer(int i) { return {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, data_[i], 1, dims_}; }
};

std::string journal() {
  static auto* read = reinterpret_cast<const char* (*)()>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "fake_journal"));
  return read();
}

int count(const std::string& text, const std::string& what) {
  int n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

int failures = 0;
void check(bool holds, const char* what, const std::string& seen) {
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n%s\n", what, seen.c_str());
}

XLA_FFI_Metadata metadata_of(Call& call, void* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, nullptr};
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = call.frame(XLA_FFI_ExecutionStage_EXECUTE);
  frame.extension_start = &extension.extension_base;
  XLA_FFI_Error* error = reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame);
  check(error == nullptr, "metadata is answered", error ? error->message : "");
  return metadata;
}

}  // namespace

int main() {
  auto handlers = device_handlers();
  Call call;
  check(metadata_of(call, handlers.instantiate).state_type_id.type_id == 42, "the state's type is registered on the metadata call",
        "");
  check((metadata_of(call, handlers.execute).traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) != 0,
        "execute may be captured into a command buffer", "");

  std::string error = call.run(handlers.instantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
  check(error.empty() && journal().empty(), "instantiate calls no driver", error + journal());

  // Streams from 200 on belong to device 1; the current context is device 0's.
  error = call.run(handlers.prepare, XLA_FFI_ExecutionStage_PREPARE);
  check(error.empty() && count(journal(), "function in context 0") == 1, "prepare loads into the current context",
        error + journal());
  call.context.stream = reinterpret_cast<void*>(200);
  error = call.run(handlers.execute, XLA_FFI_ExecutionStage_EXECUTE, 2);
  check(count(error, "not loaded into this context") == 1, "execute does not load", error + journal());
  error = call.run(handlers.initialize, XLA_FFI_ExecutionStage_INITIALIZE);
  check(error.empty() && count(journal(), "function in context 1") == 1, "initialize loads into the stream's context",
        error + journal());
  call.run(handlers.prepare, XLA_FFI_ExecutionStage_PREPARE);
  call.run(handlers.initialize, XLA_FFI_ExecutionStage_INITIALIZE);
  check(count(journal(), "function in context") == 2, "a later run loads nothing", journal());

  error = call.run(handlers.execute, XLA_FFI_ExecutionStage_EXECUTE, 2);
  check(error.empty() && count(journal(), "context=1") == 1, "execute launches in the stream's context", error + journal());
  check(count(journal(), " 32 stream=200") == 1, "execute zeroes the workspace", journal());
  error = call.run(handlers.execute, XLA_FFI_ExecutionStage_EXECUTE, 3);
  check(count(error, "3 operands and 1 results, but its kernel wants 2 and 1") == 1, "execute counts the operands", error);
  call.shorten();
  error = call.run(handlers.execute, XLA_FFI_ExecutionStage_EXECUTE, 2);
  check(count(error, "buffer 0 has 60 bytes, but the kernel was made for 64") == 1, "execute checks the sizes of buffers", error);
  call.shorten(16);
  setenv("FAKE_CUDA", "launch=720", 1);
  error = call.run(handlers.execute, XLA_FFI_ExecutionStage_EXECUTE, 2);
  check(count(error, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE") == 1, "a failed launch is an error", error);
  check(kitsune::cuda::executed_calls() == 1, "failed launches are not counted", "");

  state_info.deleter(call.context.state);
  check(count(journal(), "unload") == 1, "the state's deleter unloads the kernel", journal());
  Call bad;
  bad.words[0] = 9;
  error = bad.run(handlers.instantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
  check(count(error, "launch words: version 9") == 1, "instantiate checks the words", error);
  Call unsized;
  unsized.words.resize(11);
  error = unsized.run(handlers.instantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
  check(count(error, "the bytes of the buffers are missing") == 1, "instantiate wants the sizes of buffers", error);
  Call cut;
  cut.image.assign("\177ELF", 4);
  error = cut.run(handlers.instantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
  Call named;
  named.name = "caf\xE9";
  check(count(named.run(handlers.instantiate, XLA_FFI_ExecutionStage_INSTANTIATE), "not UTF-8") == 1, "instantiate checks the name",
        "");
  check(count(error, "the image is cut off") == 1, "instantiate checks the image", error);
  return failures == 0 ? 0 : 1;
}
