#include "table/promises.h"

#include "base/errors.h"

namespace kvdock {

const Promise* Promises::find(uint32_t space, const Key& key) const {
  auto it = at_.find({space, key});
  return it == at_.end() ? nullptr : &promises_.at(it->second);
}

void Promises::make(const Promise& wanted, std::span<const Key> keys, uint64_t now) {
  Name name{wanted.session, wanted.request};
  if (auto it = promises_.find(name); it != promises_.end()) it->second.until_ms = now + kLastsMs;
  for (const Key& key : keys) {
    auto at = at_.find({wanted.space, key});
    if (at != at_.end()) {
      if (at->second == name) continue;
      remove(at);
    }
    uint32_t& of_session = keys_of_[wanted.session];
    if (of_session == kMostKeysOf || at_.size() == kMostKeys) {
      if (of_session == 0) keys_of_.erase(wanted.session);
      return;
    }
    ++of_session;
    at_.emplace(std::pair{wanted.space, key}, name);
    Promise& p = promises_.try_emplace(name, wanted).first->second;
    p.until_ms = now + kLastsMs;
    p.keys.insert(key);
  }
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

void Promises::remove(std::map<std::pair<uint32_t, Key>, Name>::iterator key) {
  auto promise = promises_.find(key->second);
  auto of_session = keys_of_.find(key->second.first);
  if (--of_session->second == 0) keys_of_.erase(of_session);
  promise->second.keys.erase(key->first.second);
  at_.erase(key);
  if (promise->second.keys.empty()) promises_.erase(promise);
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
  for (const auto& [key, name] : at_) ++open[name], ++of_session[name.first];
  require(open.size() == promises_.size(), "a promise has no key", int64_t(open.size()));
  for (const auto& [name, promise] : promises_) {
    require(promise.keys.size() == open[name], "a promise's keys are counted wrongly", int64_t(name.first));
    require(of_session[name.first] <= kMostKeysOf, "a session promises too much", int64_t(name.first));
  }
  require(of_session == keys_of_, "sessions' promised keys are counted wrongly");
  require(at_.size() <= kMostKeys, "too many keys are promised", int64_t(at_.size()));
}

}  // namespace kvdock
