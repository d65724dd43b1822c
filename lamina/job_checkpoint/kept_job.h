// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lamina/checkpoint/snapshot.h"
#include "lamina/job_checkpoint/held_job.h"
#include "lamina/membership/keepers.h"

namespace lamina::job_checkpoint {

// A job as it was some updates ago, in the memory of its ranks and of their keepers: see [Note: kept states] in
// membership/keepers.h. Its parts are those of a checkpoint ([Note: parts]), and those who go on bring them into
// another layout as a change of the layout does ([Note: held pieces]). Newcomers get theirs so, too. It outlives the
// job's sessions.
class KeptJob {
 public:
  KeptJob() = default;
  // Waits until what is sent was taken.
  ~KeptJob();
  KeptJob(const KeptJob&) = delete;

  // Copies what this rank has of a job whose model is cut, as it is after so many updates, and begins to send it to its
  // keeper, beside the next step. `word`: what the face goes on with. Collective over the world. Throws the same
  // base::UsageError on all ranks where something cannot be kept; base::PeerError where one is lost meanwhile.
  void keep(JobAccess& job, std::int64_t epoch, std::int64_t updates, value::Value word);

  // Ranks join or leave: waits until each has what it keeps for others of the newest version, which was kept in this
  // job. Collective over the world.
  void complete(const checkpoint::Peers& peers);
  // Then: which of those that want to leave may do so at once, from what each has told.
  std::vector<bool> may_leave(const std::vector<value::Value>& told, const std::vector<bool>& want) const;

  // Ranks are lost, join or leave: says what is here, to those who go on. The mailbox is that of the job until now.
  value::Value told(messaging::Mailbox& mailbox);
  // Decides, from what each of them has told, with which version all go on. Throws base::PeerError on all of them where
  // none is whole. In one that has no parts yet nothing is decided.
  void decide(const std::vector<value::Value>& told);
  // True of who told that, where it has no parts of that version: it has come since.
  bool is_new(const value::Value& told) const;
  // The updates of that version, and the word that this rank kept with it.
  std::int64_t updates() const { return own_.back().version.updates; }
  const value::Value& word() const { return own_.back().word; }
  // True where nothing was kept yet, in a rank that has not come to a job that was there.
  bool has_none() const { return own_.empty() && !has_come_; }
  // False in a rank that comes to the job, until its first version.
  bool has_parts() const { return !own_.empty() && own_.back().rank != kCame; }
  // This rank comes to a job. It has nothing, until it gets the outline of the version with which all go on: what they
  // all know of that.
  void come();
  value::Value outline() const;
  void take_outline(const value::Value& outline);
  // Makes it a job in the memory of those who go on; collective over them, as they are connected from now on.
  HeldJob hold(const checkpoint::Peers& peers) const;

  // So much this rank has given to keepers.
  std::uint64_t sent_bytes() const { return sent_bytes_; }

 private:
  static constexpr int kCame = -1;
  struct Own {
    membership::KeptVersion version;
    int rank = 0;  // of this one, then; kCame: it was none
    membership::Holdings holdings;
    std::vector<std::string> rows;       // of the model, in their order
    std::vector<base::Rank> first_copy;  // the ranks that had the model's first copy together
    value::Value about, word;
    std::vector<checkpoint::Part> written, others;
    std::size_t memory = 0;  // which snapshot these lie in
  };
  struct Package {
    membership::KeptVersion version;
    int rank = 0;  // whose parts it has, then
    std::string text;
    value::Value about, parts;
  };

  std::vector<int> wards() const;
  void receive_packages(const checkpoint::Peers& peers);
  std::map<membership::KeptVersion, membership::Holdings> holdings() const;
  bool has(int ward) const;
  void take(const value::Value& told, int from);
  void begin_to_send(base::Rank keeper, const checkpoint::Peers& peers, std::shared_ptr<const devices::Mark> copied);
  void end_sending();
  About merged(const std::map<int, About>& known) const;

  std::deque<Own> own_;           // two at most, the newer one last
  std::deque<Package> packages_;  // of other ranks, as they came
  std::set<int> left_;            // ranks of the version that all go on with
  bool has_come_ = false;         // to a job that was there
  membership::KeptVersion came_with_;
  std::array<checkpoint::Snapshot, 2> memory_;
  std::vector<std::optional<int>> keepers_;  // of the ranks of the newest version
  std::optional<std::uint64_t> sent_text_;   // the hash of what the keeper knows already, of this epoch
  std::int64_t text_epoch_ = -1;
  std::thread sending_;         // to the keeper
  std::exception_ptr failure_;  // of that; read once it is joined
  std::uint64_t sent_bytes_ = 0;
};

}  // namespace lamina::job_checkpoint
