#include "copy/cpu_paths.h"
#include "base/cpu.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvdock {

namespace {

// ------------------------------------------------------------------ scalar

template <bool kStore>
void scalar_span(const char* from, char* to, size_t bytes, const uint32_t* first, const uint32_t* second, const char*,
                 StripeSums* sums) {
  uint64_t a = sums->a[0], b = sums->b[0];
  for (size_t i = 0; i < bytes; i += 8) {
    uint32_t w[2];
    std::memcpy(w, from + i, 8);
    const size_t word = i / 4;
    a += uint64_t(w[0] + first[word]) * uint32_t(w[1] + first[word + 1]);
    b += uint64_t(w[0] + second[word]) * uint32_t(w[1] + second[word + 1]);
    if (kStore) std::memcpy(to + i, w, 8);
  }
  sums->a[0] = a;
  sums->b[0] = b;
}

constexpr CpuPath kScalar{"scalar", scalar_span<true>, scalar_span<false>};

#if defined(__x86_64__)

// ------------------------------------------------------------------ AVX2

#define KVDOCK_AVX2 __attribute__((target("avx2")))
#define KVDOCK_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline

KVDOCK_AVX2_INLINE __m128i nh128(__m128i w, const uint32_t* key) {
  const __m128i t = _mm_add_epi32(w, _mm_loadu_si128(reinterpret_cast<const __m128i*>(key)));
  return _mm_mul_epu32(t, _mm_srli_epi64(t, 32));
}

// One 16-byte step, for the bytes before and after whole cache lines.
template <bool kStore>
KVDOCK_AVX2_INLINE void step128(const char* from, char* to, const uint32_t* first, const uint32_t* second, __m128i* a,
                                __m128i* b) {
  const __m128i w = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  *a = _mm_add_epi64(*a, nh128(w, first));
  *b = _mm_add_epi64(*b, nh128(w, second));
  if (kStore) _mm_stream_si128(reinterpret_cast<__m128i*>(to), w);
}

// How many bytes come before `to` reaches a cache line. The main loop then fills whole lines.
template <bool kStore>
inline size_t head_bytes(const char* to, size_t bytes) {
  const size_t head = kStore ? -reinterpret_cast<uintptr_t>(to) & 63 : 0;
  return head < bytes ? head : bytes;
}

KVDOCK_AVX2_INLINE __m256i nh256(__m256i w, const uint32_t* key) {
  const __m256i t = _mm256_add_epi32(w, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key)));
  return _mm256_mul_epu32(t, _mm256_srli_epi64(t, 32));
}

template <bool kStore>
KVDOCK_AVX2 void avx2_span(const char* from, char* to, size_t bytes, const uint32_t* first, const uint32_t* second,
                           const char* ahead, StripeSums* sums) {
  auto* sum_a = reinterpret_cast<__m256i*>(sums->a);
  auto* sum_b = reinterpret_cast<__m256i*>(sums->b);
  __m256i a0 = sum_a[0], a1 = sum_a[1], b0 = sum_b[0], b1 = sum_b[1];
  __m128i a = _mm_setzero_si128(), b = a;
  size_t i = 0;
  for (const size_t head = head_bytes<kStore>(to, bytes); i < head; i += 16)
    step128<kStore>(from + i, to + i, first + i / 4, second + i / 4, &a, &b);
  for (; i + 64 <= bytes; i += 64) {
    _mm_prefetch(ahead + i, _MM_HINT_NTA);  // read once, so it need not displace other data in the cache
    const __m256i w0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i w1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    if (kStore) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), w0);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), w1);
    }
    a0 = _mm256_add_epi64(a0, nh256(w0, first + i / 4));
    b0 = _mm256_add_epi64(b0, nh256(w0, second + i / 4));
    a1 = _mm256_add_epi64(a1, nh256(w1, first + i / 4 + 8));
    b1 = _mm256_add_epi64(b1, nh256(w1, second + i / 4 + 8));
  }
  for (; i < bytes; i += 16) step128<kStore>(from + i, to + i, first + i / 4, second + i / 4, &a, &b);
  sum_a[0] = _mm256_add_epi64(a0, _mm256_zextsi128_si256(a));
  sum_b[0] = _mm256_add_epi64(b0, _mm256_zextsi128_si256(b));
  sum_a[1] = a1;
  sum_b[1] = b1;
}

constexpr CpuPath kAvx2{"avx2", avx2_span<true>, avx2_span<false>};

#endif

// The paths that this processor can run, fastest first; the scalar path is last.
std::vector<const CpuPath*> detect() {
  std::vector<const CpuPath*> paths;
#if defined(__x86_64__)
  if (cpu().avx2) paths.push_back(&kAvx2);
#endif
  paths.push_back(&kScalar);
  return paths;
}

const std::vector<const CpuPath*>& available() {
  static const std::vector<const CpuPath*> paths = detect();
  return paths;
}

std::atomic<const CpuPath*> g_chosen{nullptr};  // null: the fastest. The paths are constants, so relaxed is enough

}  // namespace

const CpuPath& cpu_path() {
  const CpuPath* chosen = g_chosen.load(std::memory_order_relaxed);
  return chosen != nullptr ? *chosen : *available().front();
}

std::vector<std::string> cpu_paths() {
  std::vector<std::string> names;
  for (const CpuPath* path : available()) names.emplace_back(path->name);
  return names;
}

bool use_cpu_path(const std::string& name) {
  const CpuPath* found = nullptr;
  for (const CpuPath* path : available())
    if (name == path->name) found = path;
  const bool usable = found != nullptr || name.empty();
  if (usable) g_chosen.store(found, std::memory_order_relaxed);
  return usable;
}

void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

}  // namespace kvdock
