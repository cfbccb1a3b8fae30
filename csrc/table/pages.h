// The memory of records: pages of 64 KiB, each for records of one size, and the ids that are free.
//
// Ownership: pages and their sizes lie in the region; everything else is derived.
// Invariants: an id is free or taken; a page with taken ids keeps its size. A page with taken and free ids is in
//   with_free_ under its size; a page whose ids are all free is in spare_, and may be used again for records of any
//   size.
#pragma once

#include <algorithm>
#include <map>
#include <set>

#include "table/region.h"

namespace kvdock {

class RecordPages {
 public:
  explicit RecordPages(const Region& region)
      : bytes_(region.pages), sizes_(region.page_sizes), max_pages_(region.header.max_pages) {}

  Record& at(uint32_t id) const { return *reinterpret_cast<Record*>(address(id)); }
  const uint8_t* address_of(uint32_t id) const { return address(id); }
  // nullopt: every page is in use.
  std::optional<uint32_t> take(uint32_t parts);
  void give(uint32_t id);
  // How many records with that number of parts fit in beside those that are there, or `enough` if these are fewer.
  size_t free_ids(uint32_t parts, size_t enough) const;

  uint32_t end() const { return static_cast<uint32_t>(pages_.size()) * kPageRecords; }  // ids are below it
  size_t most() const { return size_t{max_pages_} * kPageRecords; }  // every id is below it
  uint32_t page_count() const { return static_cast<uint32_t>(pages_.size()); }
  uint32_t records_in(uint32_t page) const { return std::min(kPageBytes / sizes_[page], kPageRecords); }
  // The first id from `id` on at which a record can lie; end() when there is none.
  uint32_t next_id(uint32_t id) const;

  // Adoption: judge() finds the pages in use and returns those of an impossible record size; clear_page() empties such
  // a page; rebuild() makes every id free that is not `taken`.
  std::vector<uint32_t> judge();
  void clear_page(uint32_t page);
  void rebuild(const std::vector<bool>& taken);
  uint32_t size_at(uint32_t id) const { return sizes_[id / kPageRecords]; }

  void check(const std::vector<bool>& taken) const;  // Throws TableError corrupt unless exactly those ids are taken

 private:
  struct Page {
    std::vector<uint32_t> free;  // ids
    uint32_t taken = 0;
  };
  uint8_t* address(uint32_t id) const {
    uint32_t page = id / kPageRecords;
    return bytes_ + uint64_t{page} * kPageBytes + uint64_t{id % kPageRecords} * sizes_[page];
  }
  std::optional<uint32_t> open_page(uint32_t size);

  uint8_t* bytes_;
  uint32_t* sizes_;
  uint32_t max_pages_;
  std::vector<Page> pages_;
  std::map<uint32_t, std::set<uint32_t>> with_free_;  // by record size
  std::vector<uint32_t> spare_;
};

}  // namespace kvdock
