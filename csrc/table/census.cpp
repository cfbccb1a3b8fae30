#include "table/census.h"

#include <algorithm>

namespace kvdock {

namespace {

// The costs of the other kinds of work, in units of looking at one chunk.
constexpr uint32_t kRankCost = 4, kSortCost = 1024, kFreeCost = 256;
// The most prefixes that one answer looks at, when many of them were removed after they were counted.
constexpr uint32_t kMostLooks = 2048;

bool comes_first(const PrefixCount& a, const PrefixCount& b) {
  if (a.uses != b.uses) return a.uses > b.uses;
  return a.bytes != b.bytes ? a.bytes > b.bytes : a.first < b.first;
}

}  // namespace

Census::Census(const Records& records)
    : records_(records), end_(records.end()), spaces_(kMaxNamespaces), rankings_(kMaxNamespaces) {}

bool Census::step(uint32_t budget) {
  for (int64_t left = budget; left > 0 && phase_ != Phase::done;) left -= work();
  return phase_ == Phase::done;
}

// Does one piece of the work and returns its cost. First every chunk is linked to its parent, then each is added to its
// first ancestor, then prefixes are ranked.
uint32_t Census::work() {
  switch (phase_) {
    case Phase::link:
    case Phase::add:
      return look();
    case Phase::rank:
      if (at_ < prefix_count_) return rank(prefixes_.at(at_++));
      enter(Phase::sort);
      return 1;
    case Phase::sort:
      if (at_ < rankings_.size()) return sort(rankings_[at_++]);
      enter(Phase::free);
      return 1;
    case Phase::free:
      if (!nodes_.drop_last() && !prefixes_.drop_last()) phase_ = Phase::done;
      return kFreeCost;
    case Phase::done:
      return 1;
  }
  return 1;
}

uint32_t Census::look() {
  if (uint32_t next = records_.next(at_); next != at_) at_ = next, walk_ = kNone;
  if (at_ >= end_) {
    enter(phase_ == Phase::link ? Phase::add : Phase::rank);
  } else if (phase_ == Phase::add) {
    if (climb()) ++at_, walk_ = kNone;
  } else {
    if (is_ready(at_)) link(at_);
    ++at_;
  }
  return 1;
}

// False also for an id that does not exist any more, because its page now serves records of another size.
bool Census::is_ready(uint32_t id) const {
  return records_.next(id) == id && records_.at(id).state() == RecordState::kReady;
}

// Whether the record still holds the chunk with that stamp.
bool Census::is_there(uint32_t id, uint32_t stamp) const { return is_ready(id) && this->stamp(id) == stamp; }

void Census::link(uint32_t id) {
  const Record& r = records_.at(id);
  const KeyEntry* before = r.parent.names_chunk() ? records_.find(r.space, r.parent) : nullptr;
  if (!r.parent.names_chunk() || (before && before->ready == id)) nodes_.at(id) = {id, new_prefix(id), stamp(id), 0};
  else if (before && before->ready < end_) nodes_.at(id) = {before->ready, 1, stamp(id), stamp(before->ready)};
  SpaceCount& space = spaces_[r.space];
  ++space.chunks;
  space.bytes += records_.bytes_of(id);
  space.oldest = std::min(space.oldest, r.last_used);
  space.newest = std::max(space.newest, r.last_used);
}

uint32_t Census::new_prefix(uint32_t id) {
  prefixes_.at(prefix_count_) = {0, 0, id, stamp(id), 0, id, stamp(id), 1};
  return prefix_count_++;
}

// One step from chunk at_ towards the first chunk of its prefix; it also shortens the path for later walks. Returns
// true when chunk at_ has been added to its prefix, or has none.
bool Census::climb() {
  if (walk_ == kNone) walk_ = at_, walked_ = 0;
  Node& node = nodes_.at(walk_);
  if (node.above == walk_) {
    add(at_, prefixes_.at(node.up), walked_ + 1);
    return true;
  }
  if (node.above == kNone) return true;  // it was stored during the count, or an ancestor was removed
  Node over = nodes_.at(node.above);
  if (over.stamp != node.above_stamp) {  // another chunk took that record
    node.above = kNone;
    return true;
  }
  if (over.above != node.above && over.above != kNone) {
    node = {over.above, node.up + over.up, node.stamp, over.above_stamp};
    // Chunks that name each other as parents form a circle: any of them serves as the first.
    if (node.above == walk_) {
      node = is_there(walk_, node.stamp) ? Node{walk_, new_prefix(walk_), node.stamp, 0} : Node{};
      return false;
    }
  }
  walked_ += node.up;
  walk_ = node.above;
  return false;
}

void Census::add(uint32_t id, Prefix& to, uint32_t depth) {
  if (!is_there(id, nodes_.at(id).stamp) || !is_there(to.first, to.stamp)) return;
  const Record& r = records_.at(id);
  ++to.chunks;
  to.bytes += records_.bytes_of(id);
  to.used = std::max(to.used, r.last_used);
  if (depth > to.last_chunks && uint64_t{records_.info(id).uses} * 2 >= records_.info(to.first).uses) {
    to.last = id;
    to.last_stamp = stamp(id);
    to.last_chunks = depth;
  }
}

uint32_t Census::rank(const Prefix& prefix) {
  if (!prefix.chunks || !is_there(prefix.first, prefix.stamp)) return 1;
  const Record& r = records_.at(prefix.first);
  Ranking& in = rankings_[r.space];
  ++in.count;
  PrefixCount one{r.space,      r.key, prefix.chunks, prefix.bytes, records_.born_ms(prefix.first), 0,
                  records_.info(prefix.first).uses, r.key, 1, prefix.first, prefix.stamp};
  if (in.top.size() == kMostPrefixes) {
    if (!comes_first(one, in.top.front())) return 1;
    std::pop_heap(in.top.begin(), in.top.end(), comes_first);
    in.top.pop_back();
  }
  one.used_ms = records_.used_ms(prefix.used);
  if (is_there(prefix.last, prefix.last_stamp))
    one.last = records_.at(prefix.last).key, one.last_chunks = prefix.last_chunks;
  in.top.push_back(one);
  std::push_heap(in.top.begin(), in.top.end(), comes_first);
  return kRankCost;
}

uint32_t Census::sort(Ranking& ranking) {
  std::sort_heap(ranking.top.begin(), ranking.top.end(), comes_first);
  return ranking.top.empty() ? 1 : kSortCost;
}

std::vector<std::pair<uint32_t, SpaceCount>> Census::spaces() const {
  std::vector<std::pair<uint32_t, SpaceCount>> out;
  for (uint32_t space = 0; space < spaces_.size(); ++space) {
    if (!spaces_[space].chunks) continue;
    SpaceCount count = spaces_[space];
    count.oldest = records_.used_ms(count.oldest);
    count.newest = records_.used_ms(count.newest);
    out.push_back({space, count});
  }
  return out;
}

std::pair<std::vector<PrefixCount>, uint64_t> Census::prefixes(const std::vector<uint32_t>& spaces, size_t most) const {
  using At = std::vector<PrefixCount>::const_iterator;
  std::vector<std::pair<At, At>> lists;  // the rest of each namespace's: a heap with the most used in front
  auto comes_later = [](const auto& a, const auto& b) { return comes_first(*b.first, *a.first); };
  uint64_t all = 0;
  for (uint32_t space : spaces) {
    const Ranking& ranking = rankings_.at(space);
    all += ranking.count;
    if (!ranking.top.empty()) lists.emplace_back(ranking.top.begin(), ranking.top.end());
  }
  std::make_heap(lists.begin(), lists.end(), comes_later);
  std::vector<PrefixCount> out;
  most = std::min(most, kMostPrefixes);
  for (uint32_t looks = 0; looks < kMostLooks && out.size() < most && !lists.empty(); ++looks) {
    std::pop_heap(lists.begin(), lists.end(), comes_later);
    auto& [at, end] = lists.back();
    if (is_there(at->record, at->stamp)) out.push_back(*at);
    else --all;
    if (++at == end) lists.pop_back();
    else std::push_heap(lists.begin(), lists.end(), comes_later);
  }
  return {out, all};
}

}  // namespace kvdock
