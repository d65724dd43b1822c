// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>

// Autocast of a thread: at::ThreadLocalState has a part of it only, and cannot cross processes.
namespace lamina::pipeline {

// Where autocast is on in this thread, with its dtypes and whether it keeps what it cast, as bytes of one length.
std::string capture_autocast();

// Runs `work` in this thread under what was captured. Throws base::FormatError.
void run_with_autocast(std::string_view captured, const std::function<void()>& work);

}  // namespace lamina::pipeline
