// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lamina::digests {

// Environment variables by which `lamina verify` tells the ranks of its runs what to record.
constexpr const char* kFolderVariable = "LAMINA_VERIFY_FOLDER";        // for the recordings
constexpr const char* kStepsVariable = "LAMINA_VERIFY_STEPS";          // so many
constexpr const char* kBitsVariable = "LAMINA_VERIFY_BITS";            // set: with hashes of bits
constexpr const char* kLayoutVariable = "LAMINA_VERIFY_LAYOUT";        // keys that replace the script's
constexpr const char* kCollapsedVariable = "LAMINA_VERIFY_COLLAPSED";  // set: the layout is taken away
// Names, with commas between them, of modules and parameters: calls and updates that are looked at.
constexpr const char* kLookedAtVariable = "LAMINA_VERIFY_LOOKED_AT";

}  // namespace lamina::digests
