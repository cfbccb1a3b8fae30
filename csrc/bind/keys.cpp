// Bindings of csrc/base/blake2b.h: the keys of many chunks in one call.
#include <pybind11/pybind11.h>

#include <string>

#include "base/blake2b.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;

int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Bytes as they are, or a text of hex digits.
std::string_view hash_of(const py::handle& given, std::string& decoded) {
  if (PyBytes_Check(given.ptr())) return {PyBytes_AS_STRING(given.ptr()), size_t(PyBytes_GET_SIZE(given.ptr()))};
  const auto text = given.cast<std::string_view>();
  decoded.clear();
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    const int high = digit_of(text[i]), low = digit_of(text[i + 1]);
    if (high < 0 || low < 0) break;
    decoded.push_back(char(high * 16 + low));
  }
  if (2 * decoded.size() != text.size())
    throw py::value_error("hash: found '" + std::string(text) + "', wanted bytes or hex digits");
  return decoded;
}

using Hashes = py::typing::Iterable<py::typing::Union<py::bytes, py::str>>;

// Keeps the interpreter lock: to get it back may take longer than the hashes do.
py::typing::List<py::bytes> hashed_keys(const py::bytes& person, const py::bytes& prefix, const Hashes& hashes) {
  const std::string_view named = person;
  if (named.size() > 16)
    throw py::value_error("person (bytes): found " + std::to_string(named.size()) + ", wanted at most 16");
  Blake2b begun(named);
  begun.update(std::string_view(prefix));
  py::typing::List<py::bytes> keys;
  std::string decoded;
  for (const py::handle hash : hashes) {
    Blake2b hashing = begun;
    hashing.update(hash_of(hash, decoded));
    const auto digest = hashing.digest();
    keys.append(py::bytes(digest.data(), digest.size()));
  }
  return keys;
}

}  // namespace

void bind_keys(py::module_& m) {
  m.def("hashed_keys", &hashed_keys, "person"_a, "prefix"_a, "hashes"_a,
        "For each of `hashes` (bytes, or their hex digits) blake2b with 32 bytes of digest over `prefix` and the hash; "
        "`person`: the personalisation, of at most 16 bytes. Raises ValueError for others.");
}

}  // namespace kvdock
