// Exceptions that become Python's. Refused always names the value found and the value wanted, TableError where there
// are such values.
#pragma once

#include <concepts>
#include <exception>
#include <string>
#include <utility>
#include <variant>

namespace kvdock {

using Value = std::variant<std::monostate, long long, std::string>;  // monostate: there is no such value

// `kind` is the Python class that the exception becomes: LayoutError, CopyError or CudaError.
enum class Refusal { layout, copy, cuda };

class Refused : public std::exception {
 public:
  Refused(Refusal kind, std::string what, Value found, Value wanted)
      : kind_(kind), what_(std::move(what)), found_(std::move(found)), wanted_(std::move(wanted)) {}
  const char* what() const noexcept override { return what_.c_str(); }
  Refusal kind() const { return kind_; }
  const Value& found() const { return found_; }
  const Value& wanted() const { return wanted_; }

 private:
  Refusal kind_;
  std::string what_;
  Value found_, wanted_;
};

inline Value value_of(std::integral auto number) { return static_cast<long long>(number); }
inline Value value_of(std::string text) { return text; }

// Throws with the message "what: found …, wanted …". Each value is an integer or a text.
[[noreturn]] void refuse(Refusal kind, const std::string& what, const auto& found, const auto& wanted) {
  auto text_of = [](const Value& value) {
    auto* number = std::get_if<long long>(&value);
    return number ? std::to_string(*number) : std::get<std::string>(value);
  };
  Value one = value_of(found), other = value_of(wanted);
  throw Refused(kind, what + ": found " + text_of(one) + ", wanted " + text_of(other), one, other);
}

// From the chunk table: Python's TableError, whose `code` the server sends to its clients (docs/operate/errors.md).
struct TableError : std::exception {
  std::string code, message;
  Value found, wanted;
  TableError(std::string c, std::string m, Value f = {}, Value w = {})
      : code(std::move(c)), message(std::move(m)), found(std::move(f)), wanted(std::move(w)) {}
  const char* what() const noexcept override { return message.c_str(); }
};

// For the table's checks of itself.
inline void require(bool sound, const char* what, long long where = 0) {
  if (!sound) throw TableError("corrupt", what, where);
}

}  // namespace kvdock
