// Promises of requests to compute and store chunks, so that others can wait for these instead of computing them too.
//
// Ownership: derived from calls and kept on the heap alone: the next server begins without promises.
// Invariants: a key of a namespace is in one promise at most; a promise has a key or does not exist; there are at most
//   kMostKeys, kMostKeysOf of one session, and kMostKeysOfTenant of one tenant that is not the server's own user. A
//   promise pins and reserves nothing.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "table/layout.h"

namespace kvdock {

struct Promise {
  uint64_t session, member;  // the ids of its maker
  Id16 request;
  uint32_t space;
  Id16 tenant;  // the namespace's; zeros: the server's own user
  uint64_t until_ms = 0;  // the promise ends then; each chunk of it that is stored puts the end off
  std::set<Key> keys{};
};

class Promises {
 public:
  static constexpr uint32_t kMostKeys = 1u << 16, kMostKeysOf = 1u << 13, kMostKeysOfTenant = kMostKeys / 2;
  static constexpr uint64_t kLastsMs = 30'000;

  bool empty() const { return at_.empty(); }
  // The promise with the key, or nullptr. The caller decides whether it still holds.
  const Promise* find(uint32_t space, const Key& key) const;
  // The request promises the keys, as many as the limits allow, beside those that it has promised in the namespace
  // before. Other promises lose these keys. It ends kLastsMs from `now`.
  void make(const Promise& wanted, std::span<const Key> keys, uint64_t now);
  void stored(uint32_t space, const Key& key, uint64_t now);  // takes the key out of its promise, which lasts longer
  void drop(uint32_t space, const Key& key);
  void withdraw(uint64_t session, const Id16& request) { forget({session, request}, kMostKeysOf); }
  // Looks at some promises, from where the last call ended, and drops those for which `holds` is false: at most
  // kMostSwept keys in one call, so that no other call waits long.
  template <class F>
  void sweep(F&& holds) {
    uint32_t left = kMostSwept;
    for (size_t looks = std::min<size_t>(kMostSwept, promises_.size()); looks > 0 && left > 0; --looks) {
      auto it = promises_.lower_bound(swept_to_);
      if (it == promises_.end()) it = promises_.begin();
      auto following = std::next(it);
      swept_to_ = it->first;
      if (!holds(it->second)) left -= forget(swept_to_, left);
      if (left > 0) swept_to_ = following == promises_.end() ? Name{} : following->first;
    }
  }

  void check() const;  // Throws TableError corrupt

 private:
  using Name = std::pair<uint64_t, Id16>;  // session, request
  static constexpr uint32_t kMostSwept = 2048;
  uint32_t forget(Name name, uint32_t most);  // returns how many of its keys were dropped
  using Made = std::map<Name, Promise>;
  using At = std::map<std::pair<uint32_t, Key>, Name>;
  At::iterator remove(At::iterator key);              // returns what follows it
  void pass_on(At::iterator key, Made::iterator to);  // both of one session
  bool has_room(const Promise& of) const;             // for one key more of its session and tenant

  Made promises_;
  At at_;                                 // by namespace and key
  std::map<uint64_t, uint32_t> keys_of_;  // by session: how many keys
  std::map<Id16, uint32_t> keys_of_tenant_;
  Name swept_to_{};                       // the next to look at
};

}  // namespace kvdock
