#include "copy/checksum.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "base/errors.h"

namespace kvdock {

namespace {

std::mutex g_keys_mutex;  // guards g_keys
std::shared_ptr<const ChecksumKeys> g_keys;

}  // namespace

void set_checksum_keys(const char* nh, const char* level2, size_t stripes) {
  auto keys = std::make_shared<ChecksumKeys>();
  std::memcpy(keys->first, nh, kChecksumStripeBytes);
  std::memcpy(keys->second, nh + kChecksumStripeBytes, kChecksumStripeBytes);
  keys->level2.resize(4 * stripes);
  if (stripes != 0) std::memcpy(keys->level2.data(), level2, 32 * stripes);
  for (uint64_t& key : keys->level2) key &= kChecksumPrime;
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
    refuse(Refusal::copy, "checksum keys (stripes)", have, stripes);
  return keys;
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
  // 2^61 = 1 mod p, so the high bits are added to the low ones until one subtraction is enough.
  unsigned __int128 x = (total_ & kChecksumPrime) + (total_ >> 61);
  x = (x & kChecksumPrime) + (x >> 61);
  return x >= kChecksumPrime ? uint64_t(x - kChecksumPrime) : uint64_t(x);
}

void hash_padding(const CpuPath& path, const ChecksumKeys& keys, size_t used, StripeSums* sums) {
  alignas(64) static const char kZeros[kChecksumStripeBytes] = {};
  path.hash(kZeros, nullptr, kChecksumStripeBytes - used, keys.first + used / 4, keys.second + used / 4, kZeros, sums);
}

namespace {

// Hashes one stripe of a part, which may end after `bytes`. Copies these bytes to `to` in the same pass, if `to` is not
// null.
StripeSums take_stripe(const CpuPath& path, const ChecksumKeys& keys, const char* from, char* to, size_t bytes) {
  const SpanLoop loop = to == nullptr ? path.hash : path.copy;
  StripeSums sums{};
  size_t whole = bytes - bytes % 16;
  loop(from, to, whole, keys.first, keys.second, from + whole, &sums);
  if (whole != bytes) {
    alignas(16) char tail[16] = {};
    std::memcpy(tail, from + whole, bytes - whole);
    path.hash(tail, nullptr, 16, keys.first + whole / 4, keys.second + whole / 4, tail, &sums);
    if (to != nullptr) std::memcpy(to + whole, tail, bytes - whole);
    whole += 16;
  }
  if (whole != kChecksumStripeBytes) hash_padding(path, keys, whole, &sums);
  return sums;
}

// Hashes bytes that begin with the stripe `first` of a part. Copies them to `to` in the same pass, if it is not null.
uint64_t take_stripes(const char* from, char* to, size_t bytes, size_t first) {
  const size_t stripes = stripes_of(bytes);
  const auto keys = checksum_keys(first + stripes);
  const CpuPath& path = cpu_path();
  PartSum total(*keys);
  for (size_t stripe = 0; stripe < stripes; ++stripe) {
    const size_t start = stripe * kChecksumStripeBytes;
    char* const into = to == nullptr ? nullptr : to + start;
    total.add(first + stripe,
              take_stripe(path, *keys, from + start, into, std::min(bytes - start, kChecksumStripeBytes)));
  }
  return total.value();
}

}  // namespace

uint64_t checksum(const char* data, size_t bytes, size_t first, size_t last) {
  const size_t stripes = stripes_of(bytes);
  const auto keys = checksum_keys(stripes);
  const CpuPath& path = cpu_path();
  PartSum total(*keys);
  for (size_t stripe = first; stripe < std::min(last, stripes); ++stripe) {
    const size_t start = stripe * kChecksumStripeBytes;
    total.add(stripe, take_stripe(path, *keys, data + start, nullptr, std::min(bytes - start, kChecksumStripeBytes)));
  }
  return total.value();
}

uint64_t copy_hashed(const char* from, char* to, size_t bytes, size_t first) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
  if (!is_aligned) std::memcpy(to, from, bytes);
  const uint64_t share = take_stripes(from, is_aligned ? to : nullptr, bytes, first);
  store_fence();
  return share;
}

uint64_t share_of_checksum(const char* data, size_t bytes, size_t first) {
  return take_stripes(data, nullptr, bytes, first);
}

}  // namespace kvdock
