// Sessions, their members, and whether each member is alive.
//
// Ownership: the cells of sessions and members lie in the region; which of them are in use is derived.
// Invariants: a member belongs to one open session; a rank of a session belongs to at most one of its members that are
//   not gone; a session whose members are all gone is closed by the call that made the last one gone. A member that is
//   gone keeps its cell only as long as an open grant names it.
//
// Ids are `use << 20 | cell`, so that none is used twice. Members knows no grants (csrc/table/grants.h).
#pragma once

#include <map>
#include <set>

#include "base/work.h"
#include "table/namespaces.h"

namespace kvdock {

struct NewMember {
  Id16 nonce;
  std::vector<uint32_t> ranks;
  bool scheduler;
  uint64_t lock_offset;
};

class Members {
 public:
  struct Asker {
    uint32_t session, member;  // cells
  };
  struct Due {  // what became due as time passed
    std::vector<uint32_t> settled, empty;  // members that are gone now; sessions that never got a member
  };

  Members(const Region& region, Namespaces& spaces)
      : sessions_(region.sessions), members_(region.members), spaces_(spaces) {}
  void begin_empty();

  // Cells of ids. Throws TableError unknown_session, unknown_member.
  uint32_t session_cell(uint64_t id) const;
  std::optional<uint32_t> find_session(uint64_t id) const;
  std::optional<uint32_t> find_member(uint64_t id) const;
  uint32_t member_cell(uint64_t id) const;
  // Only a live member of the session gets new grants. Throws TableError member_suspect, member_dead as well.
  Asker asker(uint64_t session, uint64_t member) const;
  const Session& session(uint32_t cell) const { return sessions_[cell]; }
  const Member& member(uint32_t cell) const { return members_[cell]; }
  bool is_live(uint64_t member) const;  // by its id
  // Whether the session has members that have not left, and all of these are known to be alive.
  bool lives(uint32_t session) const;
  static uint64_t session_id(uint32_t cell, uint64_t use) { return use << 20 | cell; }
  uint64_t session_id(uint32_t cell) const { return session_id(cell, sessions_[cell].use()); }
  uint64_t member_id(uint32_t cell) const { return members_[cell].use() << 20 | cell; }

  uint64_t open_session(const Id16& nonce, uint32_t space, uint64_t now);
  uint64_t add_member(uint64_t session_id, const NewMember& wanted, uint64_t now);
  void heartbeat(uint32_t member, uint64_t now);
  void report_pinned(uint64_t member_id, uint32_t through);
  // The least pinned_through of the session's living members; kNone when none of them page-locks segments.
  uint32_t pinned_through(uint32_t session) const { return open_.at(session).pinned_through; }
  // The member that answers for a rank's grants: the one that has the rank, else the one that asked for the grant.
  uint32_t speaker(uint32_t session, uint32_t rank, uint32_t asker) const {
    uint32_t m = sessions_[session].rank_member[rank];
    return m != kNone ? m : asker;
  }

  Due age(uint64_t now, const TableOptions& options, Work& work);
  void set_dead(uint32_t member, uint64_t now);
  enum class Left { some, none };
  Left set_gone(uint32_t member);  // Left::none: the session has to be closed
  // Gives the cell of a member that is gone to the next one. REQUIRES: no open grant names it.
  void forget(uint32_t member);
  void close_session(uint32_t session);
  void file_session(uint32_t session, uint32_t space);  // its lookups and stores are in `space` from now on
  uint64_t session_of(const Id16& nonce) const;         // the session's id; 0: none is open

  size_t session_count() const { return open_.size(); }
  uint32_t members_of(uint32_t session) const { return static_cast<uint32_t>(open_.at(session).members.size()); }
  size_t member_count() const { return kMaxMembers - free_members_.size(); }
  bool is_open(uint32_t session) const { return open_.count(session) != 0; }
  bool of_one_tenant(uint32_t session, uint32_t other) const {
    return spaces_.tenant_of(sessions_[session].space()) == spaces_.tenant_of(sessions_[other].space());
  }
  // The cells of the open sessions among `named`; nullopt: of all open sessions.
  std::vector<uint32_t> open_sessions(const std::optional<std::vector<uint64_t>>& named = std::nullopt) const;
  std::vector<MemberInfo> views() const;
  std::vector<MemberInfo> views_of(const std::vector<uint64_t>& members) const;  // of those that there still are

  // Adoption: judge() checks sessions and members and takes them over, or refuses them; it writes nothing. restart():
  // no heartbeat has come yet, so living members are suspect until one does, and dead ones settle once more.
  void judge(const std::vector<bool>& namespaces, Adoption* found);
  void restart(uint64_t clock_ms);
  std::vector<uint32_t> sessions_without_members() const;
  std::vector<uint32_t> gone() const;

  void check() const;  // Throws TableError corrupt

 private:
  struct Open {
    std::set<uint32_t> members;
    uint32_t pinned_through = kNone;
  };

  uint64_t come_back(uint32_t cell, const NewMember& wanted, uint64_t now);
  void set_state(uint32_t cell, MemberState state);
  uint32_t least_pinned(const Open& session) const;
  bool all_gone(const Open& session) const;
  uint32_t& count_of(uint32_t session) { return spaces_.usage(sessions_[session].space()).members; }

  Session* sessions_;
  Member* members_;
  Namespaces& spaces_;  // counts their sessions and members
  void open(uint32_t session);
  MemberInfo info_of(uint32_t cell) const;

  std::map<uint32_t, Open> open_;  // by session cell
  std::map<Id16, uint32_t> by_nonce_;  // the cells of the same sessions
  std::vector<uint32_t> free_sessions_, free_members_;
};

}  // namespace kvdock
