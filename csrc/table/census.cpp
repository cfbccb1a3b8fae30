#include "table/census.h"

#include <algorithm>

namespace kvdock {

Census::Census(const Chunks& chunks)
    : chunks_(chunks), end_(chunks.records_end()), above_(end_, kNone), spaces_(kMaxNamespaces) {}

bool Census::is_ready(uint32_t id) const { return chunks_.record(id).state() == RecordState::kReady; }

// First every chunk finds the one before it, then each is added to its first one: both in slices.
bool Census::step(uint32_t budget) {
  for (;;) {
    for (at_ = chunks_.next_record(at_); at_ < end_; at_ = chunks_.next_record(at_ + 1)) {
      if (budget-- == 0) return false;
      if (!is_ready(at_)) continue;
      if (is_linked_) add(at_);
      else link(at_);
    }
    if (is_linked_) return true;
    is_linked_ = true;
    at_ = 0;
  }
}

void Census::link(uint32_t id) {
  const Record& r = chunks_.record(id);
  const KeyEntry* before = r.parent.names_chunk() ? chunks_.find(r.space, r.parent) : nullptr;
  above_[id] = before && before->ready < end_ ? before->ready : id;
  SpaceCount& space = spaces_[r.space];
  ++space.chunks;
  space.bytes += chunks_.bytes_of(id);
  space.oldest = std::min(space.oldest, r.last_used);
  space.newest = std::max(space.newest, r.last_used);
}

// Shortens the way on it. A record that was used again meanwhile can lead in a circle: that ends at one of its chunks.
uint32_t Census::first_of(uint32_t id) {
  while (above_[id] != id && above_[id] != kNone) {
    above_[id] = above_[above_[id]] == kNone ? above_[id] : above_[above_[id]];
    if (above_[above_[id]] == kNone) return id;
    id = above_[id];
  }
  return id;
}

void Census::add(uint32_t id) {
  if (above_[id] == kNone) return;  // it came while the others were counted
  uint32_t first = first_of(id);
  if (!is_ready(first) || chunks_.record(first).space != chunks_.record(id).space) return;
  Sum& sum = prefixes_[first];
  ++sum.chunks;
  sum.bytes += chunks_.bytes_of(id);
  sum.used = std::max(sum.used, chunks_.record(id).last_used);
}

std::vector<std::pair<uint32_t, SpaceCount>> Census::spaces() const {
  std::vector<std::pair<uint32_t, SpaceCount>> out;
  for (uint32_t space = 0; space < spaces_.size(); ++space) {
    if (!spaces_[space].chunks) continue;
    SpaceCount count = spaces_[space];
    count.oldest = chunks_.used_ms(count.oldest);
    count.newest = chunks_.used_ms(count.newest);
    out.push_back({space, count});
  }
  return out;
}

std::pair<std::vector<PrefixCount>, size_t> Census::prefixes(const std::vector<uint32_t>& spaces, size_t most) const {
  std::vector<bool> wanted(spaces_.size());
  for (uint32_t space : spaces) wanted.at(space) = true;
  std::vector<PrefixCount> out;
  for (auto& [first, sum] : prefixes_) {
    const Record& r = chunks_.record(first);
    if (!is_ready(first) || !wanted[r.space]) continue;
    out.push_back({r.space, r.key, sum.chunks, sum.bytes, chunks_.born_ms(first), chunks_.used_ms(sum.used),
                   chunks_.uses_of(first)});
  }
  size_t all = out.size();
  auto comes_first = [](const PrefixCount& a, const PrefixCount& b) {
    if (a.uses != b.uses) return a.uses > b.uses;
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.first < b.first;
  };
  size_t shown = std::min(most, all);
  std::partial_sort(out.begin(), out.begin() + static_cast<ptrdiff_t>(shown), out.end(), comes_first);
  out.resize(shown);
  return {out, all};
}

}  // namespace kvdock
