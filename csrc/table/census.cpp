#include "table/census.h"

#include <algorithm>

namespace kvdock {

namespace {

// The costs of the other kinds of work, in units of looking at one chunk.
constexpr uint32_t kRankCost = 4, kSortCost = 1024, kFreeCost = 256;
// The most prefixes that are ranked of each namespace, and of what goes on from one chunk. The last is also the number
// of places that pages reach.
constexpr uint32_t kMostPrefixes = 256, kMostPlaces = 2048;

bool comes_first(const PrefixCount& a, const PrefixCount& b) {
  if (a.uses != b.uses) return a.uses > b.uses;
  return a.bytes != b.bytes ? a.bytes > b.bytes : a.first < b.first;
}

}  // namespace

Census::Census(const Records& records, Survey survey)
    : records_(records),
      of_(std::move(survey)),
      most_ranked_(of_.space == kNone ? kMostPrefixes : kMostPlaces),
      end_(records.end()),
      spaces_(kMaxNamespaces),
      rankings_(kMaxNamespaces),
      places_(of_.named.size()),
      is_sought_(kMaxNamespaces, !of_.is_search) {
  for (uint32_t space : of_.spaces) is_sought_.at(space) = true;
}

bool Census::step(uint32_t budget) {
  for (int64_t left = budget; left > 0 && phase_ != Phase::done;) left -= work();
  return phase_ == Phase::done;
}

// Does one piece of the work and returns its cost. First every chunk is linked to its parent, then each is added to its
// first ancestor, which shows where the prefix forks, then to the part before that fork. At last prefixes are ranked.
uint32_t Census::work() {
  switch (phase_) {
    case Phase::link:
    case Phase::add:
    case Phase::share:
      return look();
    case Phase::name:
      if (at_ < of_.named.size()) name(at_++);
      else enter(Phase::add);
      return 1;
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
    enter(phase_ == Phase::link ? Phase::name : phase_ == Phase::add ? Phase::share : Phase::rank);
  } else if (phase_ != Phase::link) {
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
  if (of_.space != kNone && r.space != of_.space) return;
  const KeyEntry* before = r.parent.names_chunk() ? records_.find(r.space, r.parent) : nullptr;
  if (is_first(id, before)) {
    nodes_.at(id).move(id, new_prefix(id), stamp(id), 0);
  } else if (before && before->ready < end_ && before->ready != id) {
    nodes_.at(id).move(before->ready, 1, stamp(id), stamp(before->ready));
    ++nodes_.at(before->ready).children;
  }
  SpaceCount& space = spaces_[r.space];
  ++space.chunks;
  space.bytes += records_.bytes_of(id);
  space.oldest = std::min(space.oldest, r.last_used);
  space.newest = std::max(space.newest, r.last_used);
}

bool Census::is_first(uint32_t id, const KeyEntry* before) const {
  const Record& r = records_.at(id);
  if (of_.space != kNone) return r.parent == of_.below;
  return !r.parent.names_chunk() || (before && before->ready == id);
}

uint32_t Census::new_prefix(uint32_t id) {
  prefixes_.at(prefix_count_) = {0, 0, id, stamp(id), 0, id, stamp(id), 1, id, stamp(id), kNone, 0, 0, false, false};
  return prefix_count_++;
}

void Census::name(uint32_t index) {
  const auto& [space, key] = of_.named[index];
  const KeyEntry* e = records_.find(space, key);
  if (e && e->ready < end_) nodes_.at(e->ready).name = index;
}

// One step from chunk at_ towards the first chunk of its prefix; it also shortens the path for later walks. Returns
// true when chunk at_ has been added to its prefix, or to the part that all of it shares, or has no prefix.
bool Census::climb() {
  if (walk_ == kNone) walk_ = at_, walked_ = 0;
  Node& node = nodes_.at(walk_);
  if (node.above == walk_) {
    Prefix& to = prefixes_.at(node.up);
    if (!is_there(at_, nodes_.at(at_).stamp) || !is_there(to.first, to.stamp)) return true;
    if (phase_ == Phase::add) add(at_, to, walked_ + 1);
    else if (walked_ < to.shared_chunks()) to.shared_bytes += records_.bytes_of(at_);
    return true;
  }
  if (node.above == kNone) return true;  // it was stored during the count, or an ancestor was removed
  Node over = nodes_.at(node.above);
  if (over.stamp != node.above_stamp) {  // another chunk took that record
    node.above = kNone;
    return true;
  }
  if (over.above != node.above && over.above != kNone) {
    node.move(over.above, node.up + over.up, node.stamp, over.above_stamp);
    // Chunks that name each other as parents form a circle: any of them serves as the first.
    if (node.above == walk_) {
      if (of_.space == kNone && is_there(walk_, node.stamp)) node.move(walk_, new_prefix(walk_), node.stamp, 0);
      else node = Node{};
      return false;
    }
  }
  walked_ += node.up;
  walk_ = node.above;
  return false;
}

void Census::add(uint32_t id, Prefix& to, uint32_t depth) {
  const Record& r = records_.at(id);
  ++to.chunks;
  to.bytes += records_.bytes_of(id);
  to.used = std::max(to.used, r.last_used);
  if (depth > to.last_chunks && uint64_t{records_.info(id).uses} * 2 >= records_.info(to.first).uses) {
    to.last = id;
    to.last_stamp = stamp(id);
    to.last_chunks = depth;
  }
  // Of the chunks that do not go on with one child, the shallowest ends what all of the prefix shares.
  if (nodes_.at(id).children != 1 && depth < to.fork_chunks) {
    to.fork = id;
    to.fork_stamp = stamp(id);
    to.fork_chunks = depth;
    to.branches = nodes_.at(id).children;
  }
  to.kept |= records_.info(id).kept;
  find(id, to, depth);
}

// Notes what the chunk is to the survey: named or sought.
void Census::find(uint32_t id, Prefix& in, uint32_t depth) {
  uint32_t name = nodes_.at(id).name;
  if (name != kNone && of_.named[name].second == records_.at(id).key) {
    places_[name] = {in.first, in.stamp, depth};
    in.is_sought |= name < of_.sought;
  }
  const Key& key = records_.at(id).key;
  in.is_sought |= of_.is_search && of_.from <= key && key <= of_.to;
}

uint32_t Census::rank(const Prefix& prefix) {
  if (!prefix.chunks || !is_there(prefix.first, prefix.stamp)) return 1;
  const Record& r = records_.at(prefix.first);
  if (!is_sought_[r.space] && !prefix.is_sought) return 1;
  Ranking& in = rankings_[r.space];
  ++in.count;
  PrefixCount one{r.space, r.key, prefix.chunks, prefix.bytes, records_.born_ms(prefix.first), 0,
                  records_.info(prefix.first).uses, r.key, 1, r.key, 1, 0, prefix.shared_bytes, prefix.kept,
                  prefix.first, prefix.stamp};
  if (in.top.size() == most_ranked_) {
    if (!comes_first(one, in.top.front())) return 1;
    std::pop_heap(in.top.begin(), in.top.end(), comes_first);
    in.top.pop_back();
  }
  one.used_ms = records_.used_ms(prefix.used);
  if (is_there(prefix.last, prefix.last_stamp))
    one.last = records_.at(prefix.last).key, one.last_chunks = prefix.last_chunks;
  if (is_there(prefix.fork, prefix.fork_stamp)) {
    one.fork = records_.at(prefix.fork).key;
    one.shared_chunks = prefix.shared_chunks();
    one.branches = prefix.branches;
  }
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

Census::Page Census::prefixes(const std::vector<uint32_t>& spaces, size_t most, uint32_t start) const {
  using At = std::vector<PrefixCount>::const_iterator;
  std::vector<std::pair<At, At>> lists;  // the rest of each namespace's: a heap with the most used in front
  auto comes_later = [](const auto& a, const auto& b) { return comes_first(*b.first, *a.first); };
  Page out;
  for (uint32_t space : spaces) {
    const Ranking& ranking = rankings_.at(space);
    out.all += ranking.count;
    if (!ranking.top.empty()) lists.emplace_back(ranking.top.begin(), ranking.top.end());
  }
  std::make_heap(lists.begin(), lists.end(), comes_later);
  most = std::min(most, kMostListed);
  uint32_t place = 0;
  for (; place < kMostPlaces && out.found.size() < most && !lists.empty(); ++place) {
    std::pop_heap(lists.begin(), lists.end(), comes_later);
    auto& [at, end] = lists.back();
    if (!is_there(at->record, at->stamp)) --out.all;
    else if (place >= start) out.found.push_back(*at);
    if (++at == end) lists.pop_back();
    else std::push_heap(lists.begin(), lists.end(), comes_later);
  }
  if (place < kMostPlaces && !lists.empty()) out.next = place;
  return out;
}

std::vector<NamedChunk> Census::named() const {
  std::vector<NamedChunk> out;
  for (uint32_t name = 0; name < places_.size(); ++name) {
    const Place& place = places_[name];
    if (place.first != kNone && is_there(place.first, place.stamp))
      out.push_back({name, records_.at(place.first).key, place.depth});
  }
  return out;
}

}  // namespace kvdock
