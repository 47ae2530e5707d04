// The ACL runtime on host memory: devices, memory, streams and events, so that torch_npu can hold tensors on "npu:0".
// There is no device behind it: work is done when it is submitted, and streams are always idle. While a graph is
// captured, work of any stream is kept in it, to be done at each replay, and what waits for a device is refused.
// Prototypes are those of the ACL headers in the torch_npu wheel. For tests only; see build.py.
//
//   ASCEND_STUB_SOC       the SoC name to report   (Ascend950PR_9599)
//   ASCEND_STUB_CANN      the CANN version          (9.1.0)
//   ASCEND_STUB_DEVICES   the number of devices     (1)
//   ASCEND_STUB_BATCHES   0: a driver without batches of copies, which answers 207000   (1)
//   ASCEND_STUB_COPIES    what copies answer        (0)
//
// ascend_stub_copies() tells, as JSON, which copies were made since it was last asked; ascend_stub_events(), how many
// events were recorded.

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/acl_rt.h>
#include <acl/error_codes/rt_error_codes.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr size_t kMemoryBytes = size_t(8) << 30;
constexpr size_t kAlignment = 512;
constexpr aclError kOutOfMemory = 207001;
constexpr aclError kNotInCapture = 107030;
constexpr int kCores = 24;  // whatever kind of core is asked for

struct Stream {
  int32_t id;
};

struct Event {
  std::chrono::steady_clock::time_point recorded;
};

using Task = std::function<aclError()>;
using Tasks = std::vector<Task>;

struct Graph {
  std::deque<Tasks> groups{1};  // in the order of a replay; a task group of the capture is one of them
};

std::mutex graph_mutex;
Graph* captured = nullptr;  // the graph that is being captured
Tasks* kept = nullptr;      // where work goes instead of being done

thread_local int32_t current_device = 0;
std::atomic<int32_t> next_stream{1};
int the_context;

struct Allocation {
  size_t bytes;
  bool on_host;
};

std::mutex allocations_mutex;
std::map<char*, Allocation> allocations;
size_t used_bytes = 0;

std::atomic<int> recorded_events{0};

std::mutex copies_mutex;
std::string copies;  // JSON objects with commas between

const char* setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

const char* cann() { return setting("ASCEND_STUB_CANN", "9.1.0"); }

aclError allocate(void** pointer, size_t bytes, bool on_host) {
  const size_t rounded = (bytes / kAlignment + 1) * kAlignment;
  std::lock_guard<std::mutex> lock(allocations_mutex);
  void* memory = used_bytes + rounded <= kMemoryBytes ? std::aligned_alloc(kAlignment, rounded) : nullptr;
  if (!memory) return kOutOfMemory;
  std::memset(memory, 0xff, rounded);  // NaN in every float format: what nobody wrote is noticed
  allocations[static_cast<char*>(memory)] = {rounded, on_host};
  used_bytes += rounded;
  *pointer = memory;
  return ACL_SUCCESS;
}

aclError release(void* pointer) {
  std::lock_guard<std::mutex> lock(allocations_mutex);
  const auto found = allocations.find(static_cast<char*>(pointer));
  if (found == allocations.end()) return ACL_ERROR_INVALID_PARAM;
  used_bytes -= found->second.bytes;
  allocations.erase(found);
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError copy(void* target, size_t capacity, const void* source, size_t bytes) {
  if (const int error = std::atoi(setting("ASCEND_STUB_COPIES", "0"))) return error;
  if (bytes > capacity) return ACL_ERROR_INVALID_PARAM;
  std::memmove(target, source, bytes);
  return ACL_SUCCESS;
}

// Whether a stretch of memory lies in one allocation of the runtime, on the device or page-locked on the host.
bool holds(const void* pointer, size_t bytes, aclrtMemLocationType where) {
  const auto* first = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(allocations_mutex);
  auto found = allocations.upper_bound(const_cast<char*>(first));
  if (found == allocations.begin()) return false;
  --found;
  return first + bytes <= found->first + found->second.bytes &&
         found->second.on_host == (where == ACL_MEM_LOCATION_TYPE_HOST);
}

bool keep(Task task) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  if (kept) kept->push_back(std::move(task));
  return kept;
}

bool capturing() {
  std::lock_guard<std::mutex> lock(graph_mutex);
  return captured;
}

aclError wait() { return capturing() ? kNotInCapture : ACL_SUCCESS; }

void note(const char* how, aclrtMemcpyKind kind, size_t count, size_t bytes, aclrtStream stream) {
  const int32_t id = stream ? static_cast<Stream*>(stream)->id : 0;
  std::lock_guard<std::mutex> lock(copies_mutex);
  copies += std::string(copies.empty() ? "" : ",") + "{\"how\":\"" + how + "\",\"kind\":" + std::to_string(kind) +
            ",\"count\":" + std::to_string(count) + ",\"bytes\":" + std::to_string(bytes) +
            ",\"stream\":" + std::to_string(id) + "}";
}

aclError fill(void* target, size_t capacity, int32_t value, size_t bytes) {
  if (bytes > capacity) return ACL_ERROR_INVALID_PARAM;
  std::memset(target, value, bytes);
  return ACL_SUCCESS;
}

aclError make_stream(aclrtStream* stream) {
  *stream = new Stream{next_stream++};
  return ACL_SUCCESS;
}

aclError make_event(aclrtEvent* event) {
  *event = new Event{std::chrono::steady_clock::now()};
  return ACL_SUCCESS;
}

template <typename T>
aclError answer(T* result, T value) {
  if (result) *result = value;
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

// Process, device and context
aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclGetRecentErrMsg() { return ""; }
const char* aclrtGetSocName() { return setting("ASCEND_STUB_SOC", "Ascend950PR_9599"); }
aclError aclsysGetVersionStr(char*, char* version) { return std::strcpy(version, cann()), ACL_SUCCESS; }
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::strcpy(version->version, cann());
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceCount(uint32_t* count) {
  return answer<uint32_t>(count, std::atoi(setting("ASCEND_STUB_DEVICES", "1")));
}
aclError aclrtSetDevice(int32_t device) { return current_device = device, ACL_SUCCESS; }
aclError aclrtGetDevice(int32_t* device) { return answer(device, current_device); }
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetCurrentContext(aclrtContext* context) { return answer<void*>(context, &the_context); }
aclError aclrtSetCurrentContext(aclrtContext) { return ACL_SUCCESS; }
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  return answer<uint32_t>(flags, 0), answer(active, 1);
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) { return answer<int64_t>(value, kCores); }
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) { return answer<int64_t>(value, kCores); }
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t* value) {
  return answer<uint32_t>(value, kCores);
}
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t* value) {
  return answer<uint32_t>(value, kCores);
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) { return answer(can, 0); }

// Options: taken and forgotten
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) { return answer<int64_t>(value, 0); }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t size) {
  return std::snprintf(value, size, "disable"), ACL_SUCCESS;
}

// Memory
aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes, false); }
aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  return allocate(pointer, bytes, false);
}
aclError aclrtMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, true); }
aclError aclrtFree(void* pointer) { return release(pointer); }
aclError aclrtFreeHost(void* pointer) { return release(pointer); }
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> lock(allocations_mutex);
  return answer(total_bytes, kMemoryBytes), answer(free_bytes, kMemoryBytes - used_bytes);
}
aclError aclrtMemcpy(void* target, size_t capacity, const void* source, size_t bytes, aclrtMemcpyKind kind) {
  if (capturing()) return kNotInCapture;
  note("blocking", kind, 1, bytes, nullptr);
  return copy(target, capacity, source, bytes);
}
aclError aclrtMemcpyAsync(void* target, size_t capacity, const void* source, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  note("async", kind, 1, bytes, stream);
  if (keep([=] { return copy(target, capacity, source, bytes); })) return ACL_SUCCESS;
  return copy(target, capacity, source, bytes);
}
// From page-locked host memory to the device, or back, as each attribute says.
aclError aclrtMemcpyBatchAsync(void** targets, size_t* capacities, void** sources, size_t* sizes, size_t count,
                               aclrtMemcpyBatchAttr* attributes, size_t* first_copies, size_t num_attributes,
                               size_t* failed, aclrtStream stream) {
  if (!std::atoi(setting("ASCEND_STUB_BATCHES", "1"))) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
  size_t bytes = 0;
  aclrtMemLocationType from = ACL_MEM_LOCATION_TYPE_HOST;
  for (size_t i = 0, next = 0; i < count; ++i) {
    *failed = i;
    if (next < num_attributes && first_copies[next] == i) ++next;
    if (next == 0) return ACL_ERROR_INVALID_PARAM;
    from = attributes[next - 1].srcLoc.type;
    const aclrtMemLocationType to = attributes[next - 1].dstLoc.type;
    if (from == to || !holds(sources[i], sizes[i], from) || !holds(targets[i], sizes[i], to))
      return ACL_ERROR_INVALID_PARAM;
    if (const aclError error = copy(targets[i], capacities[i], sources[i], sizes[i])) return error;
    bytes += sizes[i];
  }
  const bool in = from == ACL_MEM_LOCATION_TYPE_HOST;
  note("batch", in ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST, count, bytes, stream);
  return ACL_SUCCESS;
}
const char* ascend_stub_copies() {
  static std::string told;
  std::lock_guard<std::mutex> lock(copies_mutex);
  told = "[" + copies + "]";
  copies.clear();
  return told.c_str();
}
aclError aclrtMemset(void* target, size_t capacity, int32_t value, size_t bytes) {
  return fill(target, capacity, value, bytes);
}
aclError aclrtMemsetAsync(void* target, size_t capacity, int32_t value, size_t bytes, aclrtStream) {
  if (keep([=] { return fill(target, capacity, value, bytes); })) return ACL_SUCCESS;
  return fill(target, capacity, value, bytes);
}

// Streams
aclError aclrtCreateStream(aclrtStream* stream) { return make_stream(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return make_stream(stream); }
aclError aclrtDestroyStream(aclrtStream stream) { return delete static_cast<Stream*>(stream), ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  return answer(id, stream ? static_cast<Stream*>(stream)->id : 0);
}
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) { return answer(status, ACL_STREAM_STATUS_COMPLETE); }
aclError aclrtSynchronizeStream(aclrtStream) { return wait(); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return wait(); }
aclError aclrtSynchronizeDevice() { return wait(); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return wait(); }

// Graphs
bool ascend_stub_keep(int (*run)(void*), void* what) {
  return keep([=] { return run(what); });
}
aclError aclmdlRICaptureBegin(aclrtStream, aclmdlRICaptureMode) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  if (captured) return kNotInCapture;
  captured = new Graph, kept = &captured->groups.back();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  return answer(status, captured ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE),
         answer<void*>(graph, captured);
}
aclError aclmdlRICaptureEnd(aclrtStream, aclmdlRI* graph) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  *graph = captured, captured = nullptr, kept = nullptr;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return ACL_SUCCESS; }
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  kept = &captured->groups.emplace_back();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream, aclrtTaskGrp* group) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  *group = kept, kept = &captured->groups.emplace_back();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream, aclrtTaskGrp group) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  kept = static_cast<Tasks*>(group), kept->clear();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  kept = nullptr;
  return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream) {
  for (const Tasks& tasks : static_cast<Graph*>(graph)->groups)
    for (const Task& task : tasks)
      if (const aclError error = task()) return error;
  return ACL_SUCCESS;
}
aclError aclmdlRIDestroy(aclmdlRI graph) { return delete static_cast<Graph*>(graph), ACL_SUCCESS; }

// Events
aclError aclrtCreateEvent(aclrtEvent* event) { return make_event(event); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return make_event(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return make_event(event); }
aclError aclrtDestroyEvent(aclrtEvent event) { return delete static_cast<Event*>(event), ACL_SUCCESS; }
int ascend_stub_events() { return recorded_events; }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  ++recorded_events;
  if (event) static_cast<Event*>(event)->recorded = std::chrono::steady_clock::now();
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  return answer(status, ACL_EVENT_RECORDED_STATUS_COMPLETE);
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  return answer(status, ACL_EVENT_WAIT_STATUS_COMPLETE);
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent first, aclrtEvent second) {
  const auto span = static_cast<Event*>(second)->recorded - static_cast<Event*>(first)->recorded;
  return answer(milliseconds, std::chrono::duration<float, std::milli>(span).count());
}

}  // extern "C"
