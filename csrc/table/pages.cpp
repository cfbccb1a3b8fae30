#include "table/pages.h"

namespace kvdock {

namespace {
constexpr uint32_t record_bytes(uint32_t parts) {
  return static_cast<uint32_t>(sizeof(Record) + parts * sizeof(StoredPart));
}
constexpr uint32_t kSmallestRecord = record_bytes(1);
}  // namespace

std::optional<uint32_t> RecordPages::take(uint32_t parts) {
  uint32_t size = record_bytes(parts);
  auto& pages = with_free_[size];
  if (pages.empty()) {
    auto page = open_page(size);
    if (!page) return std::nullopt;
    pages.insert(*page);
  }
  Page& page = pages_[*pages.begin()];
  uint32_t id = page.free.back();
  page.free.pop_back();
  ++page.taken;
  if (page.free.empty()) pages.erase(pages.begin());
  return id;
}

// A page for records of `size`: a spare one, or one that was never used. Of the latter an adopted pool may have bytes,
// if it has lost their size. State words of the new record size lie where the old one had bodies. Zeroed, all of them
// are FREE.
std::optional<uint32_t> RecordPages::open_page(uint32_t size) {
  uint32_t page;
  if (!spare_.empty()) {
    page = spare_.back();
    spare_.pop_back();
  } else if (pages_.size() < max_pages_) {
    page = static_cast<uint32_t>(pages_.size());
    pages_.emplace_back();
  } else {
    return std::nullopt;
  }
  if (sizes_[page] != size) std::memset(bytes_ + uint64_t{page} * kPageBytes, 0, kPageBytes);
  sizes_[page] = size;
  pages_[page].free.clear();
  for (uint32_t i = records_in(page); i-- > 0;) pages_[page].free.push_back(page * kPageRecords + i);
  return page;
}

void RecordPages::give(uint32_t id) {
  uint32_t at = id / kPageRecords;
  pages_[at].free.push_back(id);
  auto& pages = with_free_[sizes_[at]];
  if (--pages_[at].taken > 0) {
    pages.insert(at);
  } else {
    pages.erase(at);
    spare_.push_back(at);
  }
}

size_t RecordPages::free_ids(uint32_t parts, size_t enough) const {
  const uint32_t size = record_bytes(parts);
  size_t found = (spare_.size() + max_pages_ - pages_.size()) * std::min(kPageBytes / size, kPageRecords);
  if (auto pages = with_free_.find(size); pages != with_free_.end())
    for (auto at = pages->second.begin(); at != pages->second.end() && found < enough; ++at)
      found += pages_[*at].free.size();
  return std::min(found, enough);
}

uint32_t RecordPages::next_id(uint32_t id) const {
  if (id < end() && id % kPageRecords >= records_in(id / kPageRecords)) id = (id / kPageRecords + 1) * kPageRecords;
  return std::min(id, end());
}

std::vector<uint32_t> RecordPages::judge() {
  uint32_t used = max_pages_;
  while (used > 0 && sizes_[used - 1] == 0) --used;
  pages_.resize(used);
  std::vector<uint32_t> bad;
  for (uint32_t page = 0; page < used; ++page) {
    uint32_t size = sizes_[page];
    if (size <= sizeof(Record) || size > kPageBytes || (size - sizeof(Record)) % sizeof(StoredPart))
      bad.push_back(page);
  }
  return bad;
}

void RecordPages::clear_page(uint32_t page) {
  std::memset(bytes_ + uint64_t{page} * kPageBytes, 0, kPageBytes);
  sizes_[page] = kSmallestRecord;
}

void RecordPages::rebuild(const std::vector<bool>& taken) {
  for (uint32_t page = 0; page < pages_.size(); ++page) {
    Page& p = pages_[page];
    for (uint32_t i = records_in(page); i-- > 0;) {
      uint32_t id = page * kPageRecords + i;
      if (taken[id])
        ++p.taken;
      else
        p.free.push_back(id);
    }
    if (p.taken == 0)
      spare_.push_back(page);
    else if (!p.free.empty())
      with_free_[sizes_[page]].insert(page);
  }
}

void RecordPages::check(const std::vector<bool>& taken) const {
  std::set<uint32_t> spare(spare_.begin(), spare_.end());
  require(spare.size() == spare_.size(), "a spare page is listed twice", 0);
  size_t in_lists = 0;
  for (auto& [size, pages] : with_free_) in_lists += pages.size();
  for (uint32_t page = 0; page < pages_.size(); ++page) {
    const Page& p = pages_[page];
    std::set<uint32_t> free(p.free.begin(), p.free.end());
    uint32_t live = 0;
    for (uint32_t i = 0; i < records_in(page); ++i) {
      uint32_t id = page * kPageRecords + i;
      live += taken[id];
      require(taken[id] != (free.count(id) != 0), "a FREE record is not in a free list", id);
    }
    require(free.size() == p.free.size() && live == p.taken, "a page counts its records wrongly", page);
    require((live == 0) == (spare.count(page) != 0), "a page without records is not a spare page", page);
    auto pages = with_free_.find(sizes_[page]);
    bool listed = pages != with_free_.end() && pages->second.count(page);
    require(listed == (live > 0 && !p.free.empty()), "a page with free ids is not listed under its size", page);
    in_lists -= listed;
  }
  require(in_lists == 0, "a page is listed under a size that is not its own", 0);
}

}  // namespace kvdock
