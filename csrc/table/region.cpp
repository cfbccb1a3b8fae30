#include "table/region.h"

#include "table/body_crc.h"

namespace kvdock {

namespace {

constexpr uint64_t kLastIncarnation = (1ull << 24) - 1;  // grant ids have 24 bits for it

struct Capacity {
  uint32_t grants, entry_blocks, pages;

  Capacity(uint64_t max_records, uint64_t max_grants)
      : grants(static_cast<uint32_t>(max_grants)),
        entry_blocks(static_cast<uint32_t>(max_grants * 4 + 1024)),
        // Pages for records of up to 4 parts, and a few more, since each record size starts its own page.
        pages(static_cast<uint32_t>(max_records / (kPageBytes / (sizeof(Record) + 4 * sizeof(StoredPart))) + 8)) {}
};

RegionMap map_of(const TableHeader& h) { return {h.max_grants, h.max_entry_blocks, h.max_pages}; }

template <class T>
T* array(void* base, uint64_t RegionMap::*where) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(base) + map_of(*static_cast<TableHeader*>(base)).*where);
}

}  // namespace

void refuse_adoption(const char* what, uint64_t where, Value wanted) {
  throw TableError("not_adoptable", what, static_cast<int64_t>(where), std::move(wanted));
}

Region::Region(void* at)
    : header(*static_cast<TableHeader*>(at)),
      spaces(array<Namespace>(at, &RegionMap::namespaces)),
      segments(array<SegmentEntry>(at, &RegionMap::segments)),
      slabs(array<Slab>(at, &RegionMap::slabs)),
      sessions(array<Session>(at, &RegionMap::sessions)),
      members(array<Member>(at, &RegionMap::members)),
      grants(array<Grant>(at, &RegionMap::grants)),
      blocks(array<EntryBlock>(at, &RegionMap::entry_blocks)),
      page_sizes(array<uint32_t>(at, &RegionMap::page_sizes)),
      pages(array<uint8_t>(at, &RegionMap::pages)) {}

uint64_t Region::bytes_for(uint64_t max_records, uint64_t max_grants) {
  Capacity c(max_records, max_grants);
  return RegionMap(c.grants, c.entry_blocks, c.pages).end;
}

Region Region::create(const Mapping& memory, const TableOptions& options) {
  if (options.max_records == 0 || options.max_grants == 0)
    throw TableError("bad_argument", "a table needs room for records and grants", 0, "1 or more");
  uint64_t need = bytes_for(options.max_records, options.max_grants);
  uint64_t bytes = memory.bytes();
  if (bytes < need)
    throw TableError("bad_argument", "the region is too small for the table", int64_t(bytes), int64_t(need));
  Capacity capacity(options.max_records, options.max_grants);
  auto& h = *reinterpret_cast<TableHeader*>(memory.data());
  h.crc = 0;
  h.max_grants = capacity.grants;
  h.max_entry_blocks = capacity.entry_blocks;
  h.max_pages = capacity.pages;
  h.pool_id = options.pool_id;
  h.region_bytes = bytes;
  h.lock_inode = options.lock_inode;
  h.first_incarnation = static_cast<uint32_t>(options.incarnation);
  h.incarnation = sealed(options.incarnation);
  h.limit_bytes = options.limit_bytes;
  h.geometry = table_geometry();
  h.crc = body_crc(h);
  h.magic = kTableMagic;
  return Region(memory.data());
}

void Region::finish() { publish(header.version, kTableVersion); }  // pairs with the acquire load in open()

Region Region::open(const Mapping& memory, const TableOptions& options) {
  uint64_t bytes = memory.bytes();
  if (bytes < sizeof(TableHeader)) refuse_adoption("the region is shorter than a table's header", bytes);
  auto& h = *reinterpret_cast<TableHeader*>(memory.data());
  if (h.magic != kTableMagic) refuse_adoption("the region holds no chunk table", h.magic);
  // Acquire: if the version is seen, so is everything that finish() stored before it.
  uint32_t version = std::atomic_ref<uint32_t>(h.version).load(std::memory_order_acquire);
  if (version == 0) refuse_adoption("the region was never finished");
  // Another release has another geometry, too: with that of this one, only the number of the version is wrong.
  if (version != kTableVersion && h.geometry == table_geometry() && h.crc == body_crc(h))
    refuse_adoption("the number of the table's version is damaged", version, kTableVersion);
  if (version != kTableVersion)
    throw TableError("wrong_version", "the table is of another version", version, kTableVersion);
  if (h.crc != body_crc(h)) refuse_adoption("the header does not match its CRC");
  if (h.geometry != table_geometry())
    throw TableError("wrong_version", "the table was laid out by another build", int64_t(h.geometry),
                     int64_t(table_geometry()));
  if (h.pool_id != options.pool_id)
    refuse_adoption("the table is another pool's", h.pool_id, int64_t(options.pool_id));
  if (h.region_bytes != bytes)
    refuse_adoption("the region has another size than it had", bytes, int64_t(h.region_bytes));
  if (h.lock_inode != options.lock_inode)
    refuse_adoption("the members hold their locks in another lock file", options.lock_inode, int64_t(h.lock_inode));
  if (map_of(h).end > bytes) refuse_adoption("the arrays do not fit", bytes);
  uint64_t present = h.incarnation & kWordMask;
  if (!whole(h.incarnation) || present < h.first_incarnation || present >= kLastIncarnation)
    refuse_adoption("the count of the pool's servers is damaged or used up", present);
  return Region(memory.data());
}

}  // namespace kvdock
