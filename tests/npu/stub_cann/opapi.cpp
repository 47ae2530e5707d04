// libopapi.so without kernels: makes the handles that torch_npu passes (aclTensor, aclIntArray, ...), decodes the
// arguments of every aclnn*GetWorkspaceSize call, and hands them as JSON to two hooks, which Python sets:
//
//   check(name, arguments)    at GetWorkspaceSize; what it returns is the call's status (161002: refused)
//   launch(name, arguments)   at the launch itself
//
// aclnn calls have no header here, so the trampolines (build.py) save the registers and the stack, and `record` finds
// the end of the arguments: torch_npu's last two are addresses of its zeroed locals workspace_size and executor.
// x86-64 System V only. For tests only.

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kNoHook = 561000;
constexpr int kMaxStackWords = 80;
constexpr size_t kMaxText = 24;  // longest string argument that is told from a pointer

enum class Kind { kTensor, kScalar, kIntegers, kFloats, kTensors, kOther };

struct Handle {
  Kind kind;
  int dtype = -1, format = -1;
  int64_t offset = 0;
  void* data = nullptr;
  std::vector<int64_t> shape, strides, integers;
  std::vector<float> floats;
  std::vector<void*> items;
  unsigned char scalar[8]{};
};

using Hook = int (*)(const char* name, const char* arguments);

std::mutex mutex;
std::unordered_map<const void*, Handle*> handles;
Hook check_hook = nullptr, launch_hook = nullptr;

void* keep(Handle* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  handles[handle] = handle;
  return handle;
}

int drop(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = handles.find(pointer);
  if (found != handles.end()) {
    delete found->second;
    handles.erase(found);
  }
  return 0;
}

template <typename T>
std::string list(const std::vector<T>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? "," : "") + std::to_string(values[i]);
  return text + "]";
}

std::string json(const Handle& handle) {
  switch (handle.kind) {
    case Kind::kTensor:
      return "{\"shape\":" + list(handle.shape) + ",\"strides\":" + list(handle.strides) +
             ",\"dtype\":" + std::to_string(handle.dtype) + ",\"offset\":" + std::to_string(handle.offset) +
             ",\"format\":" + std::to_string(handle.format) +
             ",\"data\":" + std::to_string(reinterpret_cast<uintptr_t>(handle.data)) + "}";
    case Kind::kScalar: {
      std::string hex;
      for (unsigned char byte : handle.scalar) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", byte);
        hex += digits;
      }
      return "{\"scalar\":\"" + hex + "\",\"dtype\":" + std::to_string(handle.dtype) + "}";
    }
    case Kind::kIntegers:
      return "{\"integers\":" + list(handle.integers) + "}";
    case Kind::kFloats:
      return "{\"floats\":" + list(handle.floats) + "}";
    case Kind::kTensors: {
      std::string text = "{\"tensors\":[";
      for (size_t i = 0; i < handle.items.size(); ++i) {
        const auto found = handles.find(handle.items[i]);
        text += (i ? "," : "") + (found == handles.end() ? std::string("null") : json(*found->second));
      }
      return text + "]}";
    }
    case Kind::kOther:
      break;
  }
  return "null";
}

bool read_memory(uint64_t address, void* target, size_t bytes) {  // without a fault where nothing is mapped
  iovec local{target, bytes}, remote{reinterpret_cast<void*>(address), bytes};
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
}

bool is_pointer(uint64_t word) { return word > 0x10000 && word < 0x7fffffffffffULL; }

// The string that a word points to, in quotes, or the word as a number.
std::string text_or_number(uint64_t word) {
  if (is_pointer(word)) {
    char text[kMaxText + 1] = {0};
    size_t readable = kMaxText;
    while (readable && !read_memory(word, text, readable)) readable -= 8;
    size_t length = 0;
    while (length < readable && text[length] >= ' ' && text[length] <= '~' && text[length] != '"' &&
           text[length] != '\\')
      ++length;
    if (length && length < kMaxText && text[length] == 0) return "\"" + std::string(text, length) + "\"";
  }
  return std::to_string(static_cast<int64_t>(word));
}

class Stack {
 public:
  Stack() {
    pthread_attr_t attributes;
    void* base;
    size_t bytes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &base, &bytes);
    pthread_attr_destroy(&attributes);
    first_ = reinterpret_cast<uint64_t>(base), last_ = first_ + bytes;
  }
  bool holds_zero(uint64_t address) const {
    uint64_t value = 1;
    return address >= first_ && address < last_ && address % 8 == 0 && read_memory(address, &value, 8) && value == 0;
  }

 private:
  uint64_t first_, last_;
};

// Whether the last two words are the addresses of workspace_size and executor.
bool is_end(const std::vector<uint64_t>& words, const Stack& stack) {
  if (words.size() < 2) return false;
  const uint64_t a = words[words.size() - 2], b = words.back();
  return stack.holds_zero(a) && stack.holds_zero(b) && (a > b ? a - b : b - a) < 4096 &&
         !handles.count(reinterpret_cast<void*>(b));
}

struct Launch {
  std::string name, arguments;
};

int run(void* launch) {
  const auto* made = static_cast<const Launch*>(launch);
  return launch_hook ? launch_hook(made->name.c_str(), made->arguments.c_str()) : kNoHook;
}

}  // namespace

extern "C" bool ascend_stub_keep(int (*run)(void*), void* what);  // runtime.cpp

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT void* aclCreateTensor(const int64_t* shape, uint64_t rank, int dtype, const int64_t* strides, int64_t offset,
                             int format, const int64_t*, uint64_t, void* data) {
  auto* handle = new Handle{Kind::kTensor, dtype, format, offset, data};
  handle->shape.assign(shape, shape + rank);
  if (strides) handle->strides.assign(strides, strides + rank);
  return keep(handle);
}
EXPORT void* aclCreateScalar(void* value, int dtype) {
  auto* handle = new Handle{Kind::kScalar, dtype};
  std::memcpy(handle->scalar, value, dtype == 0 || dtype == 3 ? 4 : dtype == 12 ? 1 : 8);
  return keep(handle);
}
EXPORT void* aclCreateIntArray(const int64_t* values, uint64_t count) {
  auto* handle = new Handle{Kind::kIntegers};
  handle->integers.assign(values, values + count);
  return keep(handle);
}
EXPORT void* aclCreateBoolArray(const bool* values, uint64_t count) {
  auto* handle = new Handle{Kind::kIntegers};
  handle->integers.assign(values, values + count);
  return keep(handle);
}
EXPORT void* aclCreateFloatArray(const float* values, uint64_t count) {
  auto* handle = new Handle{Kind::kFloats};
  handle->floats.assign(values, values + count);
  return keep(handle);
}
EXPORT void* aclCreateTensorList(void* const* values, uint64_t count) {
  auto* handle = new Handle{Kind::kTensors};
  handle->items.assign(values, values + count);
  return keep(handle);
}
EXPORT void* aclCreateScalarList(void* const*, uint64_t) { return keep(new Handle{Kind::kOther}); }
EXPORT int aclDestroyTensor(const void* handle) { return drop(handle); }
EXPORT int aclDestroyScalar(const void* handle) { return drop(handle); }
EXPORT int aclDestroyIntArray(const void* handle) { return drop(handle); }
EXPORT int aclDestroyBoolArray(const void* handle) { return drop(handle); }
EXPORT int aclDestroyFloatArray(const void* handle) { return drop(handle); }
EXPORT int aclDestroyTensorList(const void* handle) { return drop(handle); }
EXPORT int aclDestroyScalarList(const void* handle) { return drop(handle); }
EXPORT int aclDestroyAclOpExecutor(void*) { return 0; }
EXPORT int aclGetViewShape(const void* tensor, int64_t** shape, uint64_t* rank) {
  const auto& sizes = static_cast<const Handle*>(tensor)->shape;
  *rank = sizes.size(), *shape = new int64_t[sizes.size()];
  std::copy(sizes.begin(), sizes.end(), *shape);
  return 0;
}

EXPORT void ascend_stub_set_hooks(Hook check, Hook launch) { check_hook = check, launch_hook = launch; }

// From the trampoline of aclnn<Op>GetWorkspaceSize: six integer and eight float registers, then the stack.
EXPORT int ascend_stub_record(const char* name, const uint64_t* registers, const double* floats,
                              const uint64_t* stack_words) {
  if (!check_hook) return kNoHook;
  static thread_local const Stack stack;  // asking for its bounds reads /proc/self/maps
  std::string arguments = "{\"arguments\":[";
  std::string** executor = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<uint64_t> words;
    bool ended = false;
    for (int i = 0; i < 6 + kMaxStackWords && !ended; ++i) {
      words.push_back(i < 6 ? registers[i] : stack_words[i - 6]);
      ended = is_end(words, stack);
    }
    if (!ended) return kNoHook;
    executor = reinterpret_cast<std::string**>(words.back());
    for (size_t i = 0; i + 2 < words.size(); ++i) {
      const auto found = handles.find(reinterpret_cast<void*>(words[i]));
      arguments += (i ? "," : "") + (found == handles.end() ? text_or_number(words[i]) : json(*found->second));
    }
  }
  arguments += "],\"floats\":[";
  for (int i = 0; i < 8; ++i) {
    char number[40] = "null";
    if (std::isfinite(floats[i]) && std::fabs(floats[i]) < 1e300)
      std::snprintf(number, sizeof number, "%.17g", floats[i]);
    arguments += (i ? "," : "") + std::string(number);
  }
  arguments += "]}";
  const int status = check_hook(name, arguments.c_str());
  if (status == 0) *executor = new std::string(arguments);
  return status;
}

// The launch may come from another thread, behind torch_npu's task queue: the executor carries the arguments. A launch
// into a graph that is captured is kept there for good.
EXPORT int ascend_stub_launch(const char* name, void* executor) {
  std::unique_ptr<Launch> launch(
      new Launch{name, std::move(*std::unique_ptr<std::string>(static_cast<std::string*>(executor)))});
  if (!ascend_stub_keep(&run, launch.get())) return run(launch.get());
  launch.release();
  return 0;
}

}  // extern "C"
