// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/environment/elastic_terms.h"

namespace lamina::environment {

// Knowledge of the place at which newcomers join an elastic job ([Note: newcomers] in session/door.h). Addresses are
// "HOST PORT", with a numeric host.
struct JobDoor {
  std::string door;                    // at its first rank; "": nobody listens yet
  std::vector<std::string> launchers;  // of its machines, who know the newest door
  bool is_over = false;                // the job lets nobody in any more
  ElasticTerms terms;                  // of the job, where a launcher tells them
  std::string witness;                 // HOST:PORT of the job's; the same; "": it has none

  std::string text() const;
  // Throws base::FormatError.
  static JobDoor read(const std::string& text);
};

// The file that a launcher and all of its ranks have open (LAMINA_DOOR_FD): what its machine knows of the job's door.
class DoorPlate {
 public:
  static constexpr std::size_t kMostLaunchers = 16;

  explicit DoorPlate(int fd) : fd_(fd) {}
  // The one of the environment; none where the launcher gave none.
  static std::optional<DoorPlate> of_environment();

  void write(const JobDoor& door) const;
  JobDoor read() const;  // an empty one: nobody has written yet
  void write_over() const;

 private:
  int fd_;  // the owner's
};

// Asks the launcher at that address for what it knows. Throws base::PeerError where none answers until then.
JobDoor ask_launcher(const std::string& launcher, const base::Deadline& deadline,
                     const std::function<void()>& check_interrupt = {});

}  // namespace lamina::environment
