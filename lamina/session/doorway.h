// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <signal.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/environment/elastic_terms.h"
#include "lamina/model/parameter_table.h"
#include "lamina/session/door.h"
#include "lamina/session/session.h"

namespace lamina::session {

// Ends a process that is to join a job where the job takes nobody in, because of that: throws ProcessEnds.
void end_if_newcomer(const std::string& why);

// Facts that newcomers are to have in common with a job that trains: of the program in that file (`kind`: "script"),
// the model's tensors, and the optimizer. `groups`: how many parameters each of its groups has.
// `table`: of a model that is cut, whose tensors are parts; nullptr: they are whole.
Facts facts_of_training(const std::string& kind, const std::string& file,
                        const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                        const model::ParameterTable* table, const std::string& optimizer,
                        const std::vector<std::size_t>& groups);

// The door of a job, which is at its first rank, as each rank knows it: see [Note: newcomers] in door.h. Here ranks
// leave, too.
class Doorway {
 public:
  // `facts`: of the training, asked when they are needed.
  explicit Doorway(std::function<Facts()> facts);
  ~Doorway();

  // A training of the program begins: newcomers come to the same one.
  void begin();
  // The door is at the first rank of that session. `why_not`: why the job cannot have so many ranks; "" where it can.
  void begin_epoch(Session& session, std::function<std::string(int)> why_not);
  // Tells whether newcomers wait, or copies want to leave: all copies alike, between the last pass of an update and the
  // next one.
  bool is_called(Session& session) const;
  // Tells whether newcomers wait at this rank, and whether they may come in.
  bool has_waiting() const { return door_ != nullptr && door_->has_waiting(); }
  // True where ranks may join or leave: the launcher watches over that.
  static bool is_open();
  int most() const { return terms_.most; }  // ranks with newcomers; 0: nobody comes
  // A training of another doorway goes on here: newcomers find the one closed, and the other one where it is told.
  void take_over(Doorway& before);
  // The training is over on a rank of that session.
  void end(const Session& session);

  Door* door() const { return door_.get(); }  // nullptr: elsewhere
  Facts facts() const;

  // Inside, SIGTERM has this rank leave in order, unless the program has said what that does. At the end it does what
  // it did before, where it has come, and the training was over.
  void watch_sigterm();
  void forget_sigterm();
  static bool leaves();
  // This rank is none of those who go on, if any do: throws ProcessEnds.
  [[noreturn]] void leave(bool others_go_on);

 private:
  const std::function<Facts()> facts_;
  const environment::ElasticTerms terms_;
  int training_ = 0;  // its number in this process
  std::unique_ptr<Door> door_;
  std::optional<struct sigaction> before_;
};

// A rank is lost: ends this process, too, where SIGTERM has told it to leave. Perhaps the launcher ends all.
void end_if_told();

}  // namespace lamina::session
