// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lamina/archive/store.h"
#include "lamina/base/wait.h"
#include "lamina/checkpoint/part.h"
#include "lamina/checkpoint/rank_files.h"
#include "lamina/checkpoint/snapshot.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/messaging/spread.h"

namespace lamina::checkpoint {

// The ranks of the job, who save and load together; the first one commits.
struct Peers {
  std::vector<base::Rank> world;
  messaging::Mailbox& mailbox;
  base::Patience patience;
  std::function<void()> alive = nullptr;  // told by a wait, about every second while something goes on; may be empty

  base::Rank rank() const { return mailbox.rank(); }
  base::Rank first() const { return world.front(); }
  bool is_first() const { return rank() == first(); }
  std::size_t index() const;  // of this rank
};

struct SaveRequest {
  archive::Path folder;  // of the checkpoints
  std::string tag;       // of this one
  archive::Store::Form form = archive::Store::Form::kPartial;
  std::vector<Part> parts;                   // that this rank writes
  std::vector<OwnFile> own_files;            // that it writes besides
  nlohmann::json about;                      // of the manifest; the first rank's counts, as those below do
  std::map<std::string, std::string> texts;  // further files, by name
  std::size_t keep = 0;  // how many partial checkpoints stay when this one, of parts, is there; 0: all
};

// [Note: saves] One save of all ranks. They make it together: they agree on the folder, which each must see, on the
// space, and on an id. Then each writes its parts, and hands in which files these are. The first rank commits ([Note:
// commit]) and tells the others how it ended: well, or with the same error on all. A save may run in a thread of its
// own, for its messages have a channel that nothing else uses.
//
// Words go along a tree ([Note: spreading]), those of the first rank down and those for it up. A rank hands in once all
// those below it have, for all of them. An error goes ahead of that, and comes down again as the end of the save. About
// every second a rank says both ways that it is there, and whether it, or one behind it, still writes. Who stand
// beside each other in the tree look at each other: one that is lost, or silent for as long as the patience, ends the
// save. Those below it hear no more from the first rank, and end with that loss.
//
// Where training goes on meanwhile, ranks hear of a failure at different times, and are to throw it before the same
// step. So once the save has failed, the first one hears how many steps ranks have begun since, and they begin no other
// before it answers. The answer is the first step that no rank had begun: before that one all throw.
// Steps cost nothing otherwise. Where a rank is lost, silent or gives the save up, no step can be agreed on, and each
// rank throws before its next one.
class Save {
 public:
  // Collective: all ranks ask for the same folder, tag and form (messaging::require_same). Throws the same error on all
  // ranks, before a byte of a part is written.
  Save(archive::FileSystem& files, SaveRequest request, Peers peers);
  // Gives it up, and waits for its end.
  ~Save();
  Save(const Save&) = delete;

  // Begins to write, in a thread of its own: from the snapshot, where there is one, and else from the parts' memory,
  // which then stays as it is until the end. Ranks wait for each other's words, so what fails here is told by wait().
  void start(Snapshot* snapshot = nullptr);
  bool is_over() const;
  // Waits for the end, and throws what it ended with. An interrupt of the wait gives the save up.
  void wait();
  // As wait(), without an error that was thrown already.
  void end();
  // Before each step of this rank: throws, once, what the save has failed with; on all ranks before the same step.
  void check_before_step();
  // Has it end soon, on all ranks, unless it is about to be committed. wait() throws base::CancelledError then.
  void give_up() { dropped_ = true; }

  const archive::Path& folder() const { return request_.folder; }
  const std::string& tag() const { return request_.tag; }

 private:
  // Ranks that are to be heard: when each was heard last, and how long they may be silent.
  struct Silence {
    std::map<base::Rank, base::Clock::time_point> since;
    base::Clock::duration most;
  };

  void claim();
  void look_around(std::uint64_t bytes);
  void agree();
  void write();
  std::exception_ptr outcome();
  void await_copies();
  archive::Manifest write_own();
  void went_on();
  void require_wanted() const;
  void require_peers();
  bool take(base::Rank from, const std::string& text);
  void attend();
  void hand_in();
  void tell_above(const std::string& word);
  void fail(const std::string& word);
  void fail_here();
  void decide(const std::string& word);
  void hear_others();
  std::vector<archive::Manifest> handed_in() const;
  void agree_on_step();
  void await_end();
  void hear(Silence& silence, const std::function<bool(base::Rank, const std::string&)>& take,
            const std::function<void()>& attend);
  void commit(std::vector<archive::Manifest> manifests);
  void pass_on(const std::string& word);

  archive::FileSystem& files_;
  SaveRequest request_;
  const Peers peers_;
  archive::Store store_;
  std::string id_, channel_;
  messaging::Spread spread_;                                  // of words of the first rank
  archive::Path place_;                                       // where files are written
  std::optional<archive::Save> claim_;                        // the first rank's
  std::set<base::Rank> awaited_;                              // that this rank tells, and that have not handed in
  std::map<base::Rank, std::vector<std::string>> manifests_;  // this rank's, and of each of those with all below it
  bool has_written_ = false, has_handed_in_ = false, all_handed_in_ = true;
  std::string failure_;                          // the first word of one, here or below
  bool told_failure_ = false;                    // above
  std::string word_;                             // how the save ended
  bool pass_on_ = false;                         // that, as it was taken from above
  std::exception_ptr cut_off_;                   // why nothing comes from above any more
  bool goes_on_ = false;                         // this rank, or one below, since others have heard so
  bool goes_on_above_ = false;                   // or one above
  base::Clock::time_point said_{};               // when others last heard that this rank goes on
  base::Clock::time_point heard_;                // when this one last heard the first rank
  std::shared_ptr<const devices::Mark> copied_;  // of a snapshot: then its copies are there

  std::thread thread_;
  std::atomic<bool> dropped_ = false;
  std::atomic<bool> decided_ = false;       // how it ends is known
  std::atomic<std::int64_t> progress_ = 0;  // grows while any rank writes
  mutable std::mutex mutex_;                // of what follows
  std::condition_variable ended_;
  bool over_ = false, told_ = false;
  std::exception_ptr error_;  // with which it ended; before, what kept it from beginning
  bool failed_ = false;       // no step begins until it is over
  std::int64_t steps_ = 0;    // that this rank has begun since
  std::int64_t begun_ = 0;    // that any rank had begun when it had failed
};

}  // namespace lamina::checkpoint
