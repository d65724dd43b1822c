// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/digests/recording.h"

namespace lamina::command {

// A folder for recordings. One that was asked for is kept; else it is in the folder for temporary files, and gone at
// the end. There it is locked while this process and its runs live: the next one removes what those have left that were
// killed.
class RecordingFolder {
 public:
  // Throws base::Error where it cannot be made, or has anything in it but recordings of two runs that were compared.
  explicit RecordingFolder(const std::string& wanted = "");
  ~RecordingFolder();
  RecordingFolder(const RecordingFolder&) = delete;

  // Itself, where it is to be gone at the end; else "".
  std::string temporary() const { return kept_ ? "" : path_.string(); }

  // An empty folder in it.
  std::string make(const std::string& name) const;

 private:
  std::filesystem::path path_;
  bool kept_;
  base::Fd lock_;
};

// One run of a script that is recorded.
struct RecordedRun {
  std::string what;                      // "the layout", for what is said of it
  std::optional<std::string> processes;  // -n of `lamina run`
  std::vector<std::string> words;        // what else follows `lamina run`
  std::string layout;                    // keys that replace the script's
  bool collapsed = false;                // the layout is taken away
  int steps = 0;                         // the script ends after so many
  bool bits = false;
  std::vector<std::string> looked_at;  // modules and parameters, whose calls and updates are
  bool quiet = false;                  // nothing of what it writes is shown
  std::string temporary;               // a folder that goes with this process, if it is killed; "": none
};

// Runs the script; each rank leaves its recording in the folder. What it prints goes to stderr, for stdout is the
// command's. Signals to this process are for the run. Returns its exit code.
int run_recorded(const RecordedRun& run, const std::string& folder);

// Says how the script is run, in words that a shell understands.
std::string quoted(const std::vector<std::string>& words);

}  // namespace lamina::command
