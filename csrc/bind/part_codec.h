// The parts of a lookup or reservation as bytes of JSON or MessagePack, so that no Python object is made for each.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "copy/plan.h"
#include "table/calls.h"

namespace kvdock {

// For each chunk an array of [group, writer, segment, offset, length, checksum], the checksum as 16 hex digits.
std::string parts_json(const LookupResult& found);
// The same as MessagePack, the checksum as an unsigned integer.
std::string parts_msgpack(const LookupResult& found);
// What parts_msgpack() has written. nullopt: the bytes are anything else.
std::optional<PartTable> parts_from_msgpack(std::string_view packed);

// One map for each chunk: {"index": into the keys of the call, "parts": arrays of [group, writer, segment, offset,
// length]}.
std::string granted_json(const ReserveResult& granted);
std::string granted_msgpack(const ReserveResult& granted);

}  // namespace kvdock
