#include "table/promises.h"

#include "base/errors.h"

namespace kvdock {

const Promise* Promises::find(uint32_t space, const Key& key) const {
  auto it = at_.find({space, key});
  return it == at_.end() ? nullptr : &promises_.at(it->second);
}

void Promises::make(const Promise& wanted, std::span<const Key> keys, uint64_t now) {
  Name name{wanted.session, wanted.request};
  auto mine = promises_.find(name);
  if (mine != promises_.end() && mine->second.space != wanted.space) {  // the session has moved since
    forget(name, kMostKeysOf);
    mine = promises_.end();
  }
  if (mine != promises_.end()) mine->second.until_ms = now + kLastsMs;
  for (const Key& key : keys) {
    std::pair at_key{wanted.space, key};
    auto at = at_.lower_bound(at_key);
    bool is_promised = at != at_.end() && at->first == at_key;
    if (is_promised && at->second == name) continue;
    if (mine == promises_.end()) {
      mine = promises_.emplace(name, wanted).first;
      mine->second.until_ms = now + kLastsMs;
    }
    if (is_promised && at->second.first == wanted.session) {  // by an earlier request, as a rule
      pass_on(at, mine);
      continue;
    }
    if (!has_room(wanted) || (!is_promised && at_.size() == kMostKeys)) break;
    if (is_promised) at = remove(at);  // another session promised it
    ++keys_of_[wanted.session];
    ++keys_of_tenant_[wanted.tenant];
    at_.emplace_hint(at, at_key, name);
    mine->second.keys.insert(key);
  }
  if (mine != promises_.end() && mine->second.keys.empty()) promises_.erase(mine);
}

bool Promises::has_room(const Promise& of) const {
  auto of_session = keys_of_.find(of.session);
  if (of_session != keys_of_.end() && of_session->second == kMostKeysOf) return false;
  auto of_tenant = keys_of_tenant_.find(of.tenant);
  return of.tenant == Id16{} || of_tenant == keys_of_tenant_.end() || of_tenant->second < kMostKeysOfTenant;
}

void Promises::pass_on(At::iterator key, Made::iterator to) {
  auto from = promises_.find(key->second);
  to->second.keys.insert(from->second.keys.extract(key->first.second));
  key->second = to->first;
  if (from->second.keys.empty()) promises_.erase(from);
}

void Promises::stored(uint32_t space, const Key& key, uint64_t now) {
  auto at = at_.find({space, key});
  if (at == at_.end()) return;
  promises_.at(at->second).until_ms = now + kLastsMs;
  remove(at);
}

void Promises::drop(uint32_t space, const Key& key) {
  if (auto at = at_.find({space, key}); at != at_.end()) remove(at);
}

Promises::At::iterator Promises::remove(At::iterator key) {
  auto promise = promises_.find(key->second);
  auto of_session = keys_of_.find(key->second.first);
  if (--of_session->second == 0) keys_of_.erase(of_session);
  auto of_tenant = keys_of_tenant_.find(promise->second.tenant);
  if (--of_tenant->second == 0) keys_of_tenant_.erase(of_tenant);
  promise->second.keys.erase(key->first.second);
  if (promise->second.keys.empty()) promises_.erase(promise);
  return at_.erase(key);
}

uint32_t Promises::forget(Name name, uint32_t most) {
  auto it = promises_.find(name);
  if (it == promises_.end()) return 0;
  auto count = static_cast<uint32_t>(std::min<size_t>(it->second.keys.size(), most));
  for (uint32_t left = count; left > 0; --left)  // the removal of its last key ends the promise
    remove(at_.find({it->second.space, *it->second.keys.begin()}));
  return count;
}

void Promises::check() const {
  std::map<Name, uint32_t> open;
  std::map<uint64_t, uint32_t> of_session;
  std::map<Id16, uint32_t> of_tenant;
  for (const auto& [key, name] : at_) ++open[name], ++of_session[name.first], ++of_tenant[promises_.at(name).tenant];
  require(open.size() == promises_.size(), "a promise has no key", int64_t(open.size()));
  for (const auto& [name, promise] : promises_) {
    require(promise.keys.size() == open[name], "a promise's keys are counted wrongly", int64_t(name.first));
    require(of_session[name.first] <= kMostKeysOf, "a session promises too much", int64_t(name.first));
    require(promise.tenant == Id16{} || of_tenant[promise.tenant] <= kMostKeysOfTenant, "a tenant promises too much",
            promise.space);
  }
  require(of_session == keys_of_, "sessions' promised keys are counted wrongly");
  require(of_tenant == keys_of_tenant_, "tenants' promised keys are counted wrongly");
  require(at_.size() <= kMostKeys, "too many keys are promised", int64_t(at_.size()));
}

}  // namespace kvdock
