// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>

// Autocast of a thread: at::ThreadLocalState has a part of it only, and cannot cross processes.
namespace lamina::runtime {

// Where autocast is on in this thread, with its dtypes, as bytes of one length.
std::string capture_autocast();

// Runs `work` in this thread under what was captured. Throws base::FormatError.
//
// Torch keeps what autocast cast once per process, so that a microbatch would find casts that another one made, perhaps
// without a graph, or not, as time decides. So `work` begins with torch's cache off. Code that turns it on finds casts
// of its own alone, since they are forgotten whenever the compute slot passes on.
void run_with_autocast(std::string_view captured, const std::function<void()>& work);
void forget_casts();

}  // namespace lamina::runtime
