// Refusals that cross into Python as typed errors carrying the value found and the value wanted.
#pragma once

#include <exception>
#include <string>
#include <utility>
#include <variant>

namespace kvdock {

using Value = std::variant<long long, std::string>;

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

}  // namespace kvdock
