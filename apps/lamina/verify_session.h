// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lamina/digests/comparison.h"

namespace lamina::command {

// The terms of `lamina verify`: which script it runs, and how it compares.
struct VerifyTerms {
  std::optional<std::string> processes;  // -n
  std::vector<std::string> words;        // of `lamina run`, after it
  std::string layout;                    // keys that replace the script's, in both runs
  std::optional<std::string> against;    // and in the second one; nothing: it has no layout
  int steps = 3;
  std::string keep;  // a folder for the recordings
  digests::ComparisonOptions compared;
};

// Each of these says what it found on stdout, and returns the exit code of the command. They throw base::Error where
// two runs cannot be compared.

// Compares two folders of recordings.
int compare_recordings(const std::string& first, const std::string& second, const VerifyTerms& terms);
// Runs the script in its layout and without, and compares.
int verify_once(const VerifyTerms& terms);
// Does so and, where they differ, looks for the smallest layout that still does.
int verify_and_bisect(const VerifyTerms& terms);

}  // namespace lamina::command
