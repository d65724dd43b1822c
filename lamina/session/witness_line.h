// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/contact/line.h"
#include "lamina/membership/epoch_word.h"

namespace lamina::session {

// The connection of this process with the witness of its job, from which it has one in its life: see [Note: witness] in
// membership/witness.h. One thread calls it.
class WitnessLine {
 public:
  // The HOST:PORT of `lamina run --witness`; none: there is no witness.
  static std::optional<std::string> address();

  // Connects with it as a rank of that job, a name. Waits for it until the deadline: then the line is lost. Throws
  // base::ConfigError where it has another secret, or is the witness of another job. `silence`: after which one that
  // does not answer is lost.
  WitnessLine(std::string job, base::Clock::duration silence, const base::Deadline& deadline,
              const std::function<void()>& check_interrupt);

  const std::string& job() const { return job_; }
  // Why it is lost, a clause; "" while it is not.
  const std::string& lost() const { return lost_; }
  void give_up(const std::string& why);

  void ask(std::int64_t session, const membership::EpochWord& word);
  // Takes what it has answered, and finds out whether it is there still.
  std::vector<membership::EpochWord> hear();

 private:
  void connect(const base::Deadline& deadline, const std::function<void()>& check_interrupt);
  void await_welcome(const std::string& named, const base::Deadline& deadline,
                     const std::function<void()>& check_interrupt);
  void say(const std::string& text);

  const std::string job_;
  const base::Clock::duration silence_;
  std::optional<contact::Line> line_;
  std::string lost_;
  std::optional<base::Clock::time_point> unanswered_;  // since when
  base::Clock::time_point said_{};
};

}  // namespace lamina::session
