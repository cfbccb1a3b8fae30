// The parts of a lookup or reservation as bytes of JSON or MessagePack, so that no Python object is made for each.
#pragma once

#include <string>

#include "table/calls.h"

namespace kvdock {

// For each chunk an array of [group, writer, segment, offset, length, checksum], the checksum as 16 hex digits.
std::string parts_json(const LookupResult& found);
// The same as MessagePack, the checksum as an unsigned integer.
std::string parts_msgpack(const LookupResult& found);

// One map for each chunk: {"index": into the keys of the call, "parts": arrays of [group, writer, segment, offset,
// length]}.
std::string granted_json(const ReserveResult& granted);
std::string granted_msgpack(const ReserveResult& granted);

}  // namespace kvdock
