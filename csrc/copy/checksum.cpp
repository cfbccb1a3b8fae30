#include "copy/checksum.h"

#include <atomic>
#include <cstring>
#include <mutex>

#include "copy/cpu_paths.h"
#include "base/errors.h"

namespace kvdock {

namespace {

std::mutex g_keys_mutex;  // guards g_keys
std::shared_ptr<const ChecksumKeys> g_keys;

std::atomic<const CpuPath*> g_chosen{nullptr};

const CpuPath& fastest() {
  static const CpuPath& path = *available_cpu_paths().front();
  return path;
}

}  // namespace

void set_checksum_keys(const char* nh, const char* level2, size_t stripes) {
  auto keys = std::make_shared<ChecksumKeys>();
  std::memcpy(keys->first, nh, kStripeBytes);
  std::memcpy(keys->second, nh + kStripeBytes, kStripeBytes);
  keys->level2.resize(4 * stripes);
  if (stripes != 0) std::memcpy(keys->level2.data(), level2, 32 * stripes);
  for (uint64_t& key : keys->level2) key &= kPrime;
  const std::lock_guard<std::mutex> guard(g_keys_mutex);
  if (!g_keys || g_keys->stripes() < stripes) g_keys = std::move(keys);
}

std::shared_ptr<const ChecksumKeys> checksum_keys(size_t stripes) {
  std::shared_ptr<const ChecksumKeys> keys;
  {
    const std::lock_guard<std::mutex> guard(g_keys_mutex);
    keys = g_keys;
  }
  const size_t have = keys ? keys->stripes() : 0;
  if (!keys || have < stripes)
    throw Refused(Refusal::copy, "checksum keys (stripes): found " + std::to_string(have) + ", wanted " +
                                     std::to_string(stripes), (long long)(have), (long long)(stripes));
  return keys;
}

const CpuPath& cpu_path() {
  const CpuPath* chosen = g_chosen.load(std::memory_order_relaxed);
  return chosen != nullptr ? *chosen : fastest();
}

std::vector<std::string> cpu_paths() {
  std::vector<std::string> names;
  for (const CpuPath* path : available_cpu_paths()) names.emplace_back(path->name);
  return names;
}

bool use_cpu_path(const std::string& name) {
  if (name.empty()) {
    g_chosen.store(nullptr);
    return true;
  }
  for (const CpuPath* path : available_cpu_paths()) {
    if (name == path->name) {
      g_chosen.store(path);
      return true;
    }
  }
  return false;
}

void PartSum::add(size_t stripe, const StripeSums& sums) {
  uint64_t a = 0, b = 0;
  for (int lane = 0; lane < 8; ++lane) {
    a += sums.a[lane];
    b += sums.b[lane];
  }
  const uint64_t* key = keys_.level2.data() + 4 * stripe;
  using Wide = unsigned __int128;
  total_ += Wide(uint32_t(a)) * key[0] + Wide(a >> 32) * key[1] + Wide(uint32_t(b)) * key[2] + Wide(b >> 32) * key[3];
}

uint64_t PartSum::value() const {
  // 2^61 = 1 mod p: fold the high bits onto the low ones until one subtraction is enough.
  unsigned __int128 x = (total_ & kPrime) + (total_ >> 61);
  x = (x & kPrime) + (x >> 61);
  return x >= kPrime ? uint64_t(x - kPrime) : uint64_t(x);
}

void hash_padding(const CpuPath& path, const ChecksumKeys& keys, size_t used, StripeSums* sums) {
  alignas(64) static const char kZeros[kStripeBytes] = {};
  path.hash(kZeros, nullptr, kStripeBytes - used, keys.first + used / 4, keys.second + used / 4, kZeros, sums);
}

uint64_t checksum(const char* data, size_t bytes, size_t first_stripe) {
  const auto keys = checksum_keys(stripes_of(bytes));
  const CpuPath& path = cpu_path();
  PartSum total(*keys);
  for (size_t start = first_stripe * kStripeBytes; start < bytes; start += kStripeBytes) {
    StripeSums sums{};
    const size_t here = bytes - start < kStripeBytes ? bytes - start : kStripeBytes;
    size_t whole = here - here % 16;
    path.hash(data + start, nullptr, whole, keys->first, keys->second, data + start + whole, &sums);
    if (whole != here) {
      alignas(16) char tail[16] = {};
      std::memcpy(tail, data + start + whole, here - whole);
      path.hash(tail, nullptr, 16, keys->first + whole / 4, keys->second + whole / 4, tail, &sums);
      whole += 16;
    }
    if (whole != kStripeBytes) hash_padding(path, *keys, whole, &sums);
    total.add(start / kStripeBytes, sums);
  }
  return total.value();
}

}  // namespace kvdock
