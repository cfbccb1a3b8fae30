#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>

#include "base/errors.h"

namespace kvdock::cuda {

namespace {

struct Opened {
  Driver table{};
  std::string why;
};

// Resolves one entry point; remembers the first that is missing.
template <class Pointer>
void resolve(void* library, const char* name, Pointer* entry, std::string* missing) {
  *entry = reinterpret_cast<Pointer>(dlsym(library, name));
  if (*entry == nullptr && missing->empty()) *missing = name;
}

std::string resolve_all(void* library, Driver* t) {
  std::string missing;
#define KVDOCK_RESOLVE(name, ...) resolve(library, #name, &t->name, &missing);
  KVDOCK_DRIVER_CALLS(KVDOCK_RESOLVE)
#undef KVDOCK_RESOLVE
  std::string optional;
  resolve(library, "cuMemcpyBatchAsync", &t->cuMemcpyBatchAsync, &optional);
  return missing;
}

std::string describe(const Driver& table, Result result) {
  const char* text = nullptr;
  if (table.cuGetErrorString(result, &text) != kSuccess || text == nullptr) text = "unknown error";
  return std::string(text) + " (" + std::to_string(result) + ")";
}

// Whether the driver can put this thread in the relaxed mode. Afterwards the thread has its earlier mode again.
bool can_relax(const Driver& table) {
  CaptureMode mode = CaptureMode::relaxed;
  if (table.cuThreadExchangeStreamCaptureMode(&mode) != kSuccess) return false;
  return table.cuThreadExchangeStreamCaptureMode(&mode) == kSuccess && mode == CaptureMode::relaxed;
}

Opened open_driver() {
  Opened opened;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    opened.why = "CUDA: found no NVIDIA driver (libcuda.so.1) on this machine, wanted one: use device=\"cpu\"";
    return opened;
  }
  const std::string missing = resolve_all(library, &opened.table);
  if (!missing.empty()) {
    opened.why = "CUDA: found a driver without " + missing + ", wanted version 525 or later";
    return opened;
  }
  const Driver& table = opened.table;
  int count = 0;
  if (const Result result = table.cuInit(0); result != kSuccess) {
    opened.why = "CUDA: the driver does not start, found " + describe(table, result) + ", wanted a working GPU";
  } else if (table.cuDeviceGetCount(&count) != kSuccess || count == 0) {
    opened.why = "CUDA: found no GPU that this process may use, wanted at least one";
  } else if (!can_relax(table)) {
    opened.why = "CUDA: the driver does not put a thread in the relaxed capture mode, wanted one that does";
  }
  return opened;
}

std::atomic<const Driver*> g_usable{nullptr};  // set once opened_driver() has found that the driver works

const Opened& opened_driver() {
  static const Opened opened = open_driver();
  if (opened.why.empty()) g_usable.store(&opened.table, std::memory_order_release);
  return opened;
}

const Driver& usable() {
  const Opened& opened = opened_driver();
  if (!opened.why.empty()) throw Refused(Refusal::cuda, opened.why, std::string("none"), std::string("a GPU"));
  return opened.table;
}

}  // namespace

const std::string& why_unavailable() { return opened_driver().why; }

Calls::Calls() : table_(usable()) {
  check(table_.cuThreadExchangeStreamCaptureMode(&before_), "the relaxed capture mode");
}

Calls::~Calls() { table_.cuThreadExchangeStreamCaptureMode(&before_); }

void relax_thread() {
  const Driver* table = g_usable.load(std::memory_order_acquire);
  if (table == nullptr) return;
  CaptureMode mode = CaptureMode::relaxed;
  check(table->cuThreadExchangeStreamCaptureMode(&mode), "the relaxed capture mode");
}

void refuse_captured(const Calls& cu, Stream stream) {
  int status = kNotCapturing;
  check(cu->cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  if (status != kNotCapturing)
    refuse(Refusal::cuda, "stream", "one on which a CUDA graph is being captured", "one whose work runs");
}

void check(Result result, const char* what) {
  if (result != kSuccess) refuse(Refusal::cuda, what, describe(opened_driver().table, result), "success");
}

}  // namespace kvdock::cuda
