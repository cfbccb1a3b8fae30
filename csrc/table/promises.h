// What engines have said that they compute and will store, so that others can wait for it instead of computing it too.
//
// Ownership: derived from calls and kept on the heap alone: the next server begins without promises.
// Invariants: a key of a namespace is in one promise at most; a promise has a key or does not exist; there are at most
//   kMostKeys, and kMostKeysOf of one session. A promise pins and reserves nothing.
#pragma once

#include <map>
#include <set>
#include <span>
#include <utility>

#include "table/layout.h"

namespace kvdock {

struct Promise {
  uint64_t session, member;  // ids of who made it
  Id16 request;
  uint32_t space;
  uint64_t until_ms = 0;  // unless some of it is stored by then
  std::set<Key> keys{};
};

class Promises {
 public:
  static constexpr uint32_t kMostKeys = 1u << 16, kMostKeysOf = 1u << 13;
  static constexpr uint64_t kLastsMs = 30'000;

  bool empty() const { return at_.empty(); }
  // The promise with the key, or nullptr. Whether it still holds is for the caller to say.
  const Promise* find(uint32_t space, const Key& key) const;
  // The request promises the keys, in place of what it or another has promised of them; as many as there is room for.
  void make(const Promise& wanted, std::span<const Key> keys, uint64_t now);
  void stored(uint32_t space, const Key& key, uint64_t now);  // the rest of its promise lasts longer
  void drop(uint32_t space, const Key& key);
  void withdraw(uint64_t session, const Id16& request);
  // Drops promises that are over, and those of which `holds` says so.
  template <class F>
  void keep_if(F&& holds) {
    for (auto it = promises_.begin(); it != promises_.end();) {
      auto next = std::next(it);
      if (!holds(it->second)) forget(it->first);
      it = next;
    }
  }

  void check() const;  // TableError corrupt

 private:
  using Name = std::pair<uint64_t, Id16>;  // session, request
  void forget(Name name);
  void remove(std::map<std::pair<uint32_t, Key>, Name>::iterator key);

  std::map<Name, Promise> promises_;
  std::map<std::pair<uint32_t, Key>, Name> at_;  // by namespace and key
  std::map<uint64_t, uint32_t> keys_of_;         // by session: how many keys
};

}  // namespace kvdock
