#include "segment/header.h"

#include "base/pause.h"

namespace kvdock {

void write_segment_header(void* base, uint64_t bytes, uint64_t pool_id, uint32_t segment, uint64_t data_offset) {
  auto* shared = static_cast<SegmentHeader*>(base);
  SegmentHeader header{kSegmentMagic, 0, sizeof(SegmentHeader), pool_id, bytes, data_offset, kSlotAlign, segment, 0};
  header.crc = segment_crc(header);
  *shared = header;
  KVDOCK_PAUSE("grow.header_half");
  std::atomic_ref<uint32_t>(shared->version).store(kSegmentVersion, std::memory_order_release);  // SYNC POINT version
}

}  // namespace kvdock
