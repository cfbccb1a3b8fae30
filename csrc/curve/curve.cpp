#include "curve/curve.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/errors.h"
#include "table/layout.h"

namespace kvdock {

namespace {

constexpr uint32_t kWorkLookups = 1024;   // the number of lookups whose mean work is compared with the limit
constexpr double kFewer = 0.5;            // the share of samples that stays when there are too many
constexpr double kMostOfACall = 512;      // sampled chunks: limits the time of one call, however long its lookup is
constexpr double kLeastAtOnce = 0.25, kMostAtOnce = 0.875;  // bounds of that share when lookups take too much time
constexpr double kRememberedWork = 0.2;   // of one remembered name, in MiniPool's unit
constexpr uint32_t kMostSpaces = 1u << 16;

}  // namespace

// Samples of another pool's misses are assumed to be too many or too few by the same ratio as samples of the real
// pool's.
double CurveSums::found(const Missed& sampled) const {
  double alike = sampled.here > 0 ? std::min(1.0, sampled.there / sampled.here) : 0;
  double missing = sampled.there + alike * (static_cast<double>(missed) - sampled.here);
  return std::clamp(1 - missing / static_cast<double>(asked), 0.0, 1.0);
}

void CurveSums::add(const CurveSums& other) {
  lookups += other.lookups;
  samples += other.samples;
  asked += other.asked;
  missed += other.missed;
  auto join = [](Missed& sum, const Missed& one) {
    sum.here += one.here;
    sum.there += one.there;
  };
  for (size_t i = 0; i < kPools; ++i) join(pools[i], other.pools[i]);
  join(ever, other.ever);
}

void CurveSums::scale(double by) {
  for (uint64_t* count : {&lookups, &samples, &asked, &missed})
    *count = static_cast<uint64_t>(std::llround(static_cast<double>(*count) * by));
  auto shrink = [by](Missed& sum) {
    sum.here *= by;
    sum.there *= by;
  };
  for (Missed& pool : pools) shrink(pool);
  shrink(ever);
}

void CurveSums::keep(KeptWriter& out) const {
  for (uint64_t count : {lookups, samples, asked, missed}) out.put(count);
  auto put = [&out](const Missed& sum) {
    out.put(sum.here);
    out.put(sum.there);
  };
  for (const Missed& pool : pools) put(pool);
  put(ever);
}

void CurveSums::take_over(KeptReader& in) {
  for (uint64_t* count : {&lookups, &samples, &asked, &missed}) *count = in.number<uint64_t>(UINT64_MAX / 2);
  auto take = [&in](Missed& sum) {
    sum.here = in.sum();
    sum.there = in.sum();
  };
  for (Missed& pool : pools) take(pool);
  take(ever);
}

void Curve::age(double kept) {
  if (!(kept > 0 && kept <= 1))
    throw TableError("bad_argument", "the share of the counts to keep is out of range", std::to_string(kept),
                     "above 0, at most 1");
  all_.scale(kept);
  for (Space& space : spaces_) space.sums.scale(kept);
}

Curve::Curve(const std::string& policy, uint64_t pool_bytes, const CurveOptions& options)
    : options_(options),
      pool_bytes_(pool_bytes),
      share_(options.most_share < 1 ? options.most_share / kMoreSeen[0] : 1),
      remembered_share_(options.most_share) {
  if (!(options.most_share > 0 && options.most_share <= 1))
    throw TableError("bad_argument", "a share of chunks is out of range", {}, "0 to 1");
  for (double factor : kPoolFactors) pools_.emplace_back(policy, factor);
  resize();
}

Curve::Curve(const std::string& policy, uint64_t pool_bytes, const CurveOptions& options, std::string_view kept)
    : Curve(policy, pool_bytes, options) {
  KeptReader in(kept);
  tick_ = in.number<uint64_t>(UINT64_MAX / 2);
  share_ = in.share();
  remembered_share_ = in.share();
  resize();
  all_.take_over(in);
  for (uint32_t i = 0, count = in.count(sizeof(uint32_t)); i < count; ++i) {
    auto tokens = in.number<uint32_t>(UINT32_MAX);
    set_space(i, tokens, in.number<uint64_t>(UINT64_MAX));
    spaces_[i].sums.take_over(in);
  }
  remembered_.take_over(in);
  for (MiniPool& pool : pools_) pool.take_over(in, tick_);
  in.end();
}

std::string Curve::keep() const {
  KeptWriter out;
  out.reserve(entries() * MiniPool::kKeptEntryBytes + remembered_.size() * 2 * sizeof(uint64_t) +
              spaces_.size() * sizeof(Space));
  out.put(tick_);
  out.put(share_);
  out.put(remembered_share_);
  all_.keep(out);
  out.put(static_cast<uint32_t>(spaces_.size()));
  for (const Space& space : spaces_) {
    out.put(space.chunk_tokens);
    out.put(space.chunk_bytes);
    space.sums.keep(out);
  }
  remembered_.keep(out);
  for (const MiniPool& pool : pools_) pool.keep(out);
  return out.take();
}

void Curve::resize() {
  for (size_t i = 0; i < kPools; ++i) pools_[i].resize(pool_bytes_, seen_by(i));
}

void Curve::set_space(uint32_t space, uint32_t chunk_tokens, uint64_t chunk_bytes) {
  if (space >= kMostSpaces)
    throw TableError("bad_argument", "number of a namespace out of range", space, int64_t{kMostSpaces});
  if (space >= spaces_.size()) spaces_.resize(space + 1);
  spaces_[space] = {chunk_tokens, chunk_bytes, {}};
}

const CurveSums& Curve::of_space(uint32_t space) const {
  if (space >= spaces_.size()) throw TableError("bad_argument", "no such namespace", space);
  return spaces_[space].sums;
}

size_t Curve::entries() const {
  size_t sum = 0;
  for (const MiniPool& pool : pools_) sum += pool.size();
  return sum;
}

std::vector<std::optional<double>> Curve::capacities() const {
  std::vector<std::optional<double>> out;
  for (const MiniPool& pool : pools_) out.push_back(pool.capacity());
  return out;
}

// ---- sampling

bool Curve::is_below(uint64_t name, double share) const {
  return share >= 1 || static_cast<double>(fold(name, options_.salt)) < share * 0x1p64;
}

void Curve::sample(uint32_t space, const uint8_t* keys, size_t count) {
  sampled_.clear();
  double share = std::max(seen_by(0), remembered_share_);
  uint64_t last = share < 1 ? static_cast<uint64_t>(share * 0x1p64) : UINT64_MAX;
  for (size_t i = 0; i < count; ++i) {
    uint64_t name;
    std::memcpy(&name, keys + i * kKeyBytes, sizeof name);
    name = fold(name, space);
    if (fold(name, options_.salt) <= last) sampled_.push_back({name, i});
  }
}

// Puts the call's samples that are below `share` into names_. Returns how many of them are missing in the real pool.
size_t Curve::choose(double share, size_t found) {
  size_t missing = 0;
  names_.clear();
  for (const Sampled& one : sampled_) {
    if (!is_below(one.name, share)) continue;
    names_.push_back(one.name);
    missing += one.at >= found;
  }
  return missing;
}

void Curve::looked_up(uint32_t space, const uint8_t* keys, size_t count, size_t found) {
  finish();
  of_space(space);  // throws if it is unknown
  Space& in = spaces_[space];
  tick_ += std::max<size_t>(1, count);
  sample_fewer_for(count);
  for (CurveSums* sums : {&in.sums, &all_}) {
    ++sums->lookups;
    sums->asked += count * in.chunk_tokens;
    sums->missed += (count - std::min(count, found)) * in.chunk_tokens;
  }
  sample(space, keys, count);
  remember(in, found);
  unfinished_ = {space, true, count, found, 0};
}

void Curve::stored(uint32_t space, const uint8_t* keys, size_t count) {
  finish();
  of_space(space);
  sample_fewer_for(count);
  sample(space, keys, count);
  choose(remembered_share_, 0);
  for (uint64_t name : names_) use(spaces_[space], name);
  unfinished_ = {space, false, count, 0, 0};
}

bool Curve::go_on() {
  if (!unfinished_) return false;
  Unfinished& call = *unfinished_;
  if (call.is_lookup) {
    look(call.pool);
  } else {
    choose(seen_by(call.pool), 0);
    pools_[call.pool].store(names_, tick_, spaces_[call.space].chunk_bytes);
  }
  if (++call.pool < kPools) return true;
  if (call.is_lookup) adapt();
  else keep_few();
  unfinished_.reset();
  return false;
}

void Curve::adapt() {
  work_ += kRememberedWork * static_cast<double>(sampled_.size());
  keep_few();
  bool is_too_much = work_ > options_.most_work * kWorkLookups;
  if (++work_lookups_ < kWorkLookups && !is_too_much) return;
  if (is_too_much) {
    sample_fewer(std::clamp(options_.most_work * work_lookups_ / work_, kLeastAtOnce, kMostAtOnce));
    if (remembered_share_ > seen_by(0)) remember_fewer(seen_by(0) / remembered_share_);
  }
  work_ = 0;
  work_lookups_ = 0;
}

// ---- misses of other pools

// The chunk's reuse distance; nullopt: this is its first use. The sampled bytes behind it stand for all.
std::optional<uint64_t> Curve::use(const Space& space, uint64_t name) {
  std::optional<uint64_t> sampled = remembered_.use(name, std::max<uint64_t>(1, space.chunk_bytes));
  if (!sampled) return std::nullopt;
  uint64_t own = std::min(*sampled, space.chunk_bytes);
  return own + static_cast<uint64_t>(static_cast<double>(*sampled - own) / remembered_share_);
}

void Curve::remember(Space& space, size_t found) {
  size_t here = choose(remembered_share_, found), before = remembered_.size();
  for (uint64_t name : names_)
    if (std::optional<uint64_t> distance = use(space, name)) distances_.add(*distance);
  double stands_for = space.chunk_tokens / remembered_share_;
  for (CurveSums* sums : {&space.sums, &all_}) {
    sums->ever.here += static_cast<double>(here) * stands_for;
    sums->ever.there += static_cast<double>(remembered_.size() - before) * stands_for;
  }
}

// The latest lookup, in one pool.
void Curve::look(size_t pool) {
  const Unfinished& call = *unfinished_;
  Space& space = spaces_[call.space];
  double share = seen_by(pool), stands_for = space.chunk_tokens / share;
  size_t here = choose(share, call.found);
  size_t hits = pools_[pool].look(names_, tick_, call.count, space.chunk_bytes, &work_);
  for (CurveSums* sums : {&space.sums, &all_}) {
    if (pool == 0) sums->samples += names_.size();
    sums->pools[pool].here += static_cast<double>(here) * stands_for;
    sums->pools[pool].there += static_cast<double>(names_.size() - hits) * stands_for;
  }
}

// ---- fewer samples

void Curve::keep_few() {
  if (entries() > options_.most_entries) sample_fewer(kFewer);
  if (remembered_.size() > options_.most_entries) remember_fewer(kFewer);
}

void Curve::sample_fewer_for(size_t count) {
  double most = kMostOfACall / static_cast<double>(std::max<size_t>(1, count));
  while (seen_by(0) > most) sample_fewer(kFewer);
  while (remembered_share_ > most) remember_fewer(kFewer);
}

void Curve::sample_fewer(double by) {
  share_ *= by;
  for (size_t i = 0; i < kPools; ++i) {
    double share = seen_by(i);
    pools_[i].thin([this, share](uint64_t name) { return is_below(name, share); });
    pools_[i].resize(pool_bytes_, share);
  }
}

void Curve::remember_fewer(double by) {
  remembered_share_ *= by;
  std::vector<uint64_t> gone;
  remembered_.for_each([&](uint64_t name, uint32_t) {
    if (!is_below(name, remembered_share_)) gone.push_back(name);
  });
  for (uint64_t name : gone) remembered_.drop(name);
}

void Curve::check() const {
  for (const MiniPool& pool : pools_) pool.check();
  remembered_.check();
}

}  // namespace kvdock
