#include "bind/part_codec.h"

#include <charconv>

#include "base/limits.h"

namespace kvdock {

namespace {

void put_decimal(std::string* out, uint64_t v) {
  char text[20];
  out->append(text, std::to_chars(text, text + sizeof text, v).ptr);
}

void put_hex16(std::string* out, uint64_t v) {
  for (int shift = 60; shift >= 0; shift -= 4) out->push_back("0123456789abcdef"[v >> shift & 15]);
}

// MessagePack: big-endian, each value in its shortest form.
void put_big_endian(std::string* out, uint64_t v, int bytes) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) out->push_back(static_cast<char>(v >> shift));
}

void put_uint(std::string* out, uint64_t v) {
  if (v < 0x80) return out->push_back(static_cast<char>(v));
  int bytes = v >> 8 == 0 ? 1 : v >> 16 == 0 ? 2 : v >> 32 == 0 ? 4 : 8;
  out->push_back(static_cast<char>(bytes == 1 ? 0xcc : bytes == 2 ? 0xcd : bytes == 4 ? 0xce : 0xcf));
  put_big_endian(out, v, bytes);
}

void put_array(std::string* out, uint32_t count) {
  if (count < 16) return out->push_back(static_cast<char>(0x90 | count));
  out->push_back(static_cast<char>(count >> 16 ? 0xdd : 0xdc));
  put_big_endian(out, count, count >> 16 ? 4 : 2);
}

// Reads MessagePack. After the first value that is not the wanted one, or is cut off, all values are 0.
class Reader {
 public:
  explicit Reader(std::string_view data) : left_(data) {}
  bool is_sound() const { return sound_; }
  bool at_end() const { return left_.empty(); }

  uint64_t uint() {
    const uint64_t kind = take(1);
    if (kind < 0x80) return kind;
    if (kind < 0xcc || kind > 0xcf) return fail();
    return take(size_t{1} << (kind - 0xcc));
  }

  // An unsigned integer that is below 2^63.
  int64_t number() {
    const uint64_t found = uint();
    return int64_t(found >> 63 ? fail() : found);
  }

  uint64_t array() {
    const uint64_t kind = take(1);
    if (kind >> 4 == 9) return kind & 15;
    if (kind != 0xdc && kind != 0xdd) return fail();
    return take(kind == 0xdc ? 2 : 4);
  }

 private:
  uint64_t fail() {
    sound_ = false;
    left_ = {};
    return 0;
  }

  uint64_t take(size_t bytes) {  // big-endian
    if (left_.size() < bytes) return fail();
    uint64_t found = 0;
    for (size_t i = 0; i < bytes; ++i) found = found << 8 | uint8_t(left_[i]);
    left_.remove_prefix(bytes);
    return found;
  }

  std::string_view left_;
  bool sound_ = true;
};

}  // namespace

std::string parts_json(const LookupResult& found) {
  std::string out = "[";
  out.reserve(found.parts.size() * 64 + found.part_ends.size() * 4 + 2);
  uint32_t at = 0;
  for (uint32_t end : found.part_ends) {
    out += out.size() > 1 ? ",[" : "[";
    for (uint32_t first = at; at < end; ++at) {
      const PartAt& p = found.parts[at];
      out += at > first ? ",[" : "[";
      for (uint64_t v : {uint64_t{p.group}, uint64_t{p.writer}, uint64_t{p.segment}, p.offset, p.length}) {
        put_decimal(&out, v);
        out += ',';
      }
      out += '"';
      put_hex16(&out, p.checksum);
      out += "\"]";
    }
    out += ']';
  }
  return out += ']';
}

std::string parts_msgpack(const LookupResult& found) {
  std::string out;
  out.reserve(found.parts.size() * 28 + found.part_ends.size() * 3 + 5);
  put_array(&out, static_cast<uint32_t>(found.part_ends.size()));
  uint32_t at = 0;
  for (uint32_t end : found.part_ends) {
    put_array(&out, end - at);
    for (; at < end; ++at) {
      const PartAt& p = found.parts[at];
      put_array(&out, 6);
      for (uint64_t v : {uint64_t{p.group}, uint64_t{p.writer}, uint64_t{p.segment}, p.offset, p.length, p.checksum})
        put_uint(&out, v);
    }
  }
  return out;
}

std::optional<PartTable> parts_from_msgpack(std::string_view packed) {
  PartTable table;
  Reader reader(packed);
  for (uint64_t chunks = reader.array(); chunks > 0 && reader.is_sound(); --chunks) {
    for (uint64_t parts = reader.array(); parts > 0 && reader.is_sound(); --parts) {
      if (reader.array() != 6) return std::nullopt;
      PlannedPart& part = table.parts.emplace_back();
      for (int64_t* field : {&part.group, &part.writer, &part.segment}) *field = reader.number();
      for (uint64_t* field : {&part.offset, &part.length, &part.checksum}) *field = reader.uint();
      if (part.checksum >= kChecksumPrime) return std::nullopt;
    }
    table.ends.push_back(table.parts.size());
  }
  if (!reader.is_sound() || !reader.at_end()) return std::nullopt;
  return table;
}

std::string granted_json(const ReserveResult& granted) {
  std::string out = "[";
  out.reserve(granted.chunks.size() * 80 + 2);
  for (const auto& [index, parts] : granted.chunks) {
    out += out.size() > 1 ? ",{\"index\":" : "{\"index\":";
    put_decimal(&out, index);
    out += ",\"parts\":[";
    for (const PartAt& p : parts) {
      out += out.back() == '[' ? "[" : ",[";
      for (uint64_t v : {uint64_t{p.group}, uint64_t{p.writer}, uint64_t{p.segment}, p.offset}) {
        put_decimal(&out, v);
        out += ',';
      }
      put_decimal(&out, p.length);
      out += ']';
    }
    out += "]}";
  }
  return out += ']';
}

std::string granted_msgpack(const ReserveResult& granted) {
  std::string out;
  out.reserve(granted.chunks.size() * 40 + 5);
  put_array(&out, static_cast<uint32_t>(granted.chunks.size()));
  for (const auto& [index, parts] : granted.chunks) {
    out += "\x82\xa5index";  // a map of 2; the keys are strings of 5
    put_uint(&out, index);
    out += "\xa5parts";
    put_array(&out, static_cast<uint32_t>(parts.size()));
    for (const PartAt& p : parts) {
      put_array(&out, 5);
      for (uint64_t v : {uint64_t{p.group}, uint64_t{p.writer}, uint64_t{p.segment}, p.offset, p.length})
        put_uint(&out, v);
    }
  }
  return out;
}

}  // namespace kvdock
