// Tenants, which share the pool: how much of it each uses, and how many bytes and chunks it may use.
//
// Ownership: usage is derived; the other parts of the table count it here. Each server sets the quotas again.
// Invariants: a tenant has a number while it has a namespace or a quota of its own; then the number may be used again.
//   Usage is what namespaces, records, sessions, members and grants add up to (Table::check_integrity).
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "base/errors.h"
#include "table/layout.h"

namespace kvdock {

constexpr uint64_t kNoQuota = ~0ull;

struct Quota {
  uint64_t bytes = kNoQuota, chunks = kNoQuota;
};

struct Usage {
  uint64_t bytes = 0, chunks = 0;  // of records that are not FREE
  uint64_t retained_bytes = 0;     // of records with a priority above 0
  uint32_t namespaces = 0, sessions = 0, members = 0, grants = 0;
  bool operator==(const Usage&) const = default;
};

struct TenantInfo {
  Id16 tenant;
  Usage usage;
  Quota quota;  // its own, or the default
};

class Tenants {
 public:
  // The tenant has one namespace more, or less. enter() returns the tenant's number.
  uint32_t enter(const Id16& tenant);
  void leave(uint32_t number);

  std::optional<uint32_t> find(const Id16& tenant) const {
    auto at = numbers_.find(tenant);
    return at == numbers_.end() ? std::nullopt : std::optional(at->second);
  }
  Usage& usage(uint32_t number) { return tenants_[number].usage; }
  uint32_t end() const { return static_cast<uint32_t>(tenants_.size()); }  // every number is below it

  void set_quota(const Id16& tenant, const Quota& quota);
  // For tenants without a quota of their own, except the server's own user (the tenant whose id is zeros).
  void set_default(const Quota& quota) { default_ = quota; }
  bool is_over(uint32_t number) const;
  // Whether more chunks, of `bytes` together, are within the quota; could_fit: whether they would be if the tenant had
  // no others.
  bool fits(uint32_t number, uint64_t bytes, uint64_t chunks = 1) const;
  bool could_fit(uint32_t number, uint64_t bytes, uint64_t chunks = 1) const;

  TenantInfo view(const Id16& tenant) const;  // of an unknown tenant: without usage
  std::vector<TenantInfo> views() const;

  void check(const std::vector<Usage>& counted) const;  // by number; throws TableError corrupt

 private:
  struct Tenant {
    Id16 id{};
    bool known = false;
    std::optional<Quota> own;
    Usage usage;
  };

  uint32_t number_of(const Id16& tenant);  // gives it one if it has none
  void forget_unused(uint32_t number);
  const Quota& quota(const Tenant& tenant) const;

  std::vector<Tenant> tenants_;
  std::map<Id16, uint32_t> numbers_;
  Quota default_;
};

}  // namespace kvdock
