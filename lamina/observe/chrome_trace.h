// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <istream>
#include <ostream>

#include "lamina/observe/event.h"

namespace lamina::observe {

// A timeline as a file in Chrome's trace format, which Perfetto opens. Each rank is a process with four rows: "steps",
// "compute" (forward and backward, per module and microbatch), "planned" (the same without waiting and messages), and
// "messages" (as many as there were at once). Arrows join messages to what is computed; waits and memory are shown,
// too. Times are those of rank 0's clock.
void write_chrome_trace(const Timeline& timeline, std::ostream& out);

// Reads what write_chrome_trace() wrote, with all clocks as rank 0's. Throws base::FormatError for any other file.
Timeline read_chrome_trace(std::istream& in);

}  // namespace lamina::observe
