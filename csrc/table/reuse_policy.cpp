#include "table/reuse_policy.h"

#include <algorithm>
#include <bit>

#include "table/layout.h"

namespace kvdock {

namespace {

constexpr double kNewestLookup = 1.0 / 64;  // the weight of the newest lookup in the mean number of keys
// From one learn() to the next pass at least kLearnTicks ticks, and the pool's chunks divided by kLearnShare. If the
// policy sees only a share of the chunks, at least kLearnSamples divided by the share pass, so that learning costs no
// more than with all.
constexpr uint64_t kLearnTicks = 64;
constexpr uint64_t kLearnShare = 4;
constexpr uint64_t kLearnSamples = 256;
// Two uses count as one if fewer ticks lie between them than the pool's chunks divided by this.
constexpr uint64_t kTouchShare = 128;

uint8_t kind_of(int kind, int gap) { return static_cast<uint8_t>(kind % kUses + gap * kUses); }

}  // namespace

void ReusePolicy::asked(uint64_t tick, uint64_t resident, size_t keys) {
  resident_ = resident;
  keys_ += (static_cast<double>(keys) - keys_) * (keys_ == 0 ? 1 : kNewestLookup);
  if (tick < next_learn_) return;
  uint64_t usual = std::max(kLearnTicks, resident / kLearnShare);
  auto seldom = static_cast<uint64_t>(static_cast<double>(kLearnSamples) / share_);
  next_learn_ = tick + (share_ < 1 ? std::max(usual, seldom) : usual);
  learn(tick);
}

void ReusePolicy::learn(uint64_t tick) {
  ReuseModel::Counts alive{};
  for (const Sample& one : samples_) alive[one.kind][ReuseModel::bin_of(tick - std::min(tick, one.used))] += 1;
  double seen = share_ * static_cast<double>(one_in_of_all_) / static_cast<double>(one_in_);  // of all samples
  while (static_cast<double>(samples_.size()) > seen * kMostSamples) {
    one_in_of_all_ *= 2;
    seen *= 2;
  }
  model_.learn(alive, std::max(1.0, keys_) * seen, resident_);
}

uint8_t ReusePolicy::stored(const Chunk& chunk, std::optional<uint8_t> inherited) {
  uint8_t kind = from_parent(inherited);
  if (auto gap = past_gap(chunk.name, chunk.used)) kind = kind_of(kind, *gap);
  past_.drop(chunk.name);
  if (const Ghost* ghost = has_ghost(chunk.name) ? ghosts_.find(chunk.name) : nullptr) {
    Ghost was = *ghost;
    kind = again(was.kind, was.used, chunk.used, was.sample != kNone);
    if (was.sample != kNone) drop_sample(was.sample);
    ghosts_.erase(chunk.name);
  }
  if (sample_of(chunk.record) != kNone) drop_sample(sample_of(chunk.record));
  if (is_sampled(chunk.name)) add_sample(chunk, kind);
  return kind;
}

uint8_t ReusePolicy::used(const Chunk& chunk, uint64_t tick) {
  uint32_t place = sample_of(chunk.record);
  uint8_t kind = again(chunk.kind, chunk.used, tick, place != kNone);
  if (place != kNone) {
    samples_[place].used = tick;
    samples_[place].kind = kind;
  }
  return kind;
}

void ReusePolicy::touched(const Chunk& chunk, uint64_t tick) {
  if (uint32_t place = sample_of(chunk.record); place != kNone) samples_[place].used = tick;
}

uint8_t ReusePolicy::again(uint8_t kind, uint64_t used, uint64_t tick, bool sampled) {
  uint64_t age = tick - std::min(tick, used);
  if (!is_apart(age)) return kind;
  if (sampled) model_.ended(kind, age, true);
  uint8_t more = kind % kUses + 1 < kUses ? kind + 1 : kind;
  return more % kUses == 1 ? more : with_gap(more, age);
}

bool ReusePolicy::is_apart(uint64_t age) const { return age >= std::max<uint64_t>(2, resident_ / kTouchShare); }

// The kind after a use that came `age` ticks after the one before: the gap moves half of the way.
uint8_t ReusePolicy::with_gap(uint8_t kind, uint64_t age) const {
  int octaves = std::bit_width(age) - std::bit_width(resident_ | 1);
  int now = std::clamp(octaves + ReuseModel::kSameGap, 1, kGaps - 1), was = kind / kUses;
  int gap = was == 0 ? now : (was + now + (now > was)) / 2;
  return kind_of(kind, gap);
}

uint8_t ReusePolicy::from_parent(std::optional<uint8_t> inherited) {
  if (!inherited) return 0;
  return kind_of(std::min<uint8_t>(*inherited % kUses, kInherited), *inherited / kUses);
}

// The gap of a chunk that is used after it was evicted or declined.
std::optional<uint8_t> ReusePolicy::past_gap(uint64_t name, uint64_t tick) const {
  auto past = past_.find(name);
  if (const Ghost* ghost = has_ghost(name) ? ghosts_.find(name) : nullptr; !past && ghost)
    past = {ghost->used, ghost->kind};
  if (!past || past->kind == 0) return std::nullopt;  // its next use is its second
  uint64_t age = tick - std::min(tick, past->tick);
  return static_cast<uint8_t>((is_apart(age) ? with_gap(past->kind, age) : past->kind) / kUses);
}

uint8_t ReusePolicy::expected(const std::vector<uint64_t>& names, std::optional<uint8_t> inherited,
                              uint64_t tick) const {
  uint8_t kind = from_parent(inherited);
  for (uint64_t name : names)
    if (auto gap = past_gap(name, tick)) kind = kind_of(kind, *gap);
  return kind;
}

void ReusePolicy::declined(const std::vector<uint64_t>& names, uint8_t kind, uint64_t tick) {
  for (uint64_t name : names) {
    auto gap = past_gap(name, tick);
    past_.put(name, {tick, gap ? kind_of(kind, *gap) : kind}, seen_chunks());
  }
}

void ReusePolicy::evicted(const Chunk& chunk, uint64_t tick) {
  if (chunk.kind >= kUses) past_.put(chunk.name, {chunk.used, chunk.kind}, seen_chunks());
  uint32_t place = sample_of(chunk.record);
  if (!has_ghost(chunk.name)) {
    if (place == kNone) return;
    model_.ended(chunk.kind, tick - std::min(tick, chunk.used), false);
    return drop_sample(place);
  }
  if (const Ghost* known = ghosts_.find(chunk.name); known && known->sample != kNone) drop_sample(known->sample);
  place = sample_of(chunk.record);  // another sample may have moved
  ghosts_.put(chunk.name, {chunk.used, chunk.kind, place});
  sample_of(chunk.record) = kNone;
  if (place != kNone) samples_[place].record = kNone;
  ghosts_in_order_.emplace_back(chunk.name, chunk.used);
  uint64_t most = seen_chunks();
  while (ghosts_in_order_.size() > most) close_oldest_ghost(tick);
}

void ReusePolicy::close_oldest_ghost(uint64_t tick) {
  auto [name, used] = ghosts_in_order_.front();
  ghosts_in_order_.pop_front();
  const Ghost* ghost = ghosts_.find(name);
  if (!ghost || ghost->used != used) return;  // it came back, or was evicted again
  Ghost was = *ghost;
  if (was.sample != kNone) {
    model_.ended(was.kind, tick - std::min(tick, was.used), false);
    drop_sample(was.sample);
  }
  ghosts_.erase(name);
}

void ReusePolicy::removed(const Chunk& chunk) {
  if (uint32_t place = sample_of(chunk.record); place != kNone) drop_sample(place);
}

// ---- samples

uint32_t& ReusePolicy::sample_of(uint32_t record) {
  if (record >= sample_of_.size()) sample_of_.resize(record + 1 + record / 2, kNone);
  return sample_of_[record];
}

uint32_t& ReusePolicy::place_of(const Sample& sample) {
  return sample.record != kNone ? sample_of(sample.record) : ghosts_.find(sample.name)->sample;
}

void ReusePolicy::add_sample(const Chunk& chunk, uint8_t kind) {
  sample_of(chunk.record) = static_cast<uint32_t>(samples_.size());
  samples_.push_back({chunk.name, chunk.used, chunk.record, kind});
  while (samples_.size() > kMostSamples) sample_fewer();
}

void ReusePolicy::drop_sample(uint32_t place) {
  place_of(samples_[place]) = kNone;
  if (place + 1 < samples_.size()) {
    samples_[place] = samples_.back();
    place_of(samples_[place]) = place;
  }
  samples_.pop_back();
}

void ReusePolicy::sample_fewer() {
  one_in_ *= 2;
  one_in_of_all_ = std::max(one_in_of_all_, one_in_);
  for (uint32_t at = static_cast<uint32_t>(samples_.size()); at-- > 0;)
    if (!is_sampled(samples_[at].name)) drop_sample(at);
}

// ---- choosing

double ReusePolicy::worth(uint8_t kind, uint64_t used, uint64_t tick) const {
  return model_.worth(kind, tick - std::min(tick, used));
}

// Between two middles of bins worth() is linear, so that a stretch's least is its oldest or its youngest leaf.
std::optional<Choice> ReusePolicy::least(const Leaves& leaves, uint64_t tick) const {
  std::optional<Choice> best;
  for (uint8_t kind = 0; kind < kKinds; ++kind) {
    auto see = [&](const Leaf& leaf) {
      Choice one{worth(kind, leaf.used, tick), leaf, kind};
      if (!best || one.evict_before(*best)) best = one;
    };
    const std::set<Leaf>& list = leaves[kind];
    for (auto it = list.begin(); it != list.end();) {
      see(*it);
      uint64_t from = model_.stretch_from(tick - std::min(tick, it->used));
      auto end = from == 0 || from > tick ? list.end() : list.lower_bound({tick - from + 1, 0});
      see(*std::prev(end));
      it = end;
    }
  }
  return best;
}

}  // namespace kvdock
