#include "table/tenants.h"

namespace kvdock {

namespace {
constexpr Id16 kOwnUser{};
constexpr Quota kUnlimited{};
}  // namespace

uint32_t Tenants::number_of(const Id16& tenant) {
  auto [at, fresh] = numbers_.try_emplace(tenant, 0);
  if (!fresh) return at->second;
  auto unused = std::find_if(tenants_.begin(), tenants_.end(), [](const Tenant& t) { return !t.known; });
  at->second = static_cast<uint32_t>(unused - tenants_.begin());
  if (unused == tenants_.end()) unused = tenants_.emplace(unused);
  unused->id = tenant;
  unused->known = true;
  return at->second;
}

void Tenants::forget_unused(uint32_t number) {
  Tenant& t = tenants_[number];
  if (t.usage.namespaces > 0 || t.own) return;
  numbers_.erase(t.id);
  t = Tenant{};
}

uint32_t Tenants::enter(const Id16& tenant) {
  uint32_t number = number_of(tenant);
  ++tenants_[number].usage.namespaces;
  return number;
}

void Tenants::leave(uint32_t number) {
  --tenants_[number].usage.namespaces;
  forget_unused(number);
}

void Tenants::set_quota(const Id16& tenant, const Quota& quota) {
  uint32_t number = number_of(tenant);
  tenants_[number].own = quota;
}

const Quota& Tenants::quota(const Tenant& tenant) const {
  if (tenant.own) return *tenant.own;
  return tenant.id == kOwnUser ? kUnlimited : default_;
}

bool Tenants::is_over(uint32_t number) const {
  const Tenant& t = tenants_[number];
  return t.usage.bytes > quota(t).bytes || t.usage.chunks > quota(t).chunks;
}

bool Tenants::could_fit(uint32_t number, uint64_t bytes, uint64_t chunks) const {
  const Quota& q = quota(tenants_[number]);
  return bytes <= q.bytes && chunks <= q.chunks;
}

bool Tenants::fits(uint32_t number, uint64_t bytes, uint64_t chunks) const {
  const Tenant& t = tenants_[number];
  return t.usage.bytes + bytes <= quota(t).bytes && t.usage.chunks + chunks <= quota(t).chunks;
}

TenantInfo Tenants::view(const Id16& tenant) const {
  auto at = numbers_.find(tenant);
  Tenant found;
  found.id = tenant;
  if (at != numbers_.end()) found = tenants_[at->second];
  return {tenant, found.usage, quota(found)};
}

std::vector<TenantInfo> Tenants::views() const {
  std::vector<TenantInfo> out;
  for (auto& [id, number] : numbers_) out.push_back({id, tenants_[number].usage, quota(tenants_[number])});
  return out;
}

void Tenants::check(const std::vector<Usage>& counted) const {
  for (uint32_t number = 0; number < end(); ++number) {
    const Tenant& t = tenants_[number];
    Usage want = number < counted.size() ? counted[number] : Usage{};
    require(t.usage == want, "what a tenant uses is counted wrongly", number);
    require(t.known == (want.namespaces > 0 || t.own), "a tenant without namespaces and quota is known", number);
  }
  require(counted.size() <= end(), "a tenant is not known", int64_t(counted.size()));
}

}  // namespace kvdock
