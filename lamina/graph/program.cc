// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/program.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "lamina/base/str.h"

namespace lamina::graph {
namespace {

std::vector<Program::Passage> with_gradients(const std::vector<Program::Passage>& passages) {
  std::vector<Program::Passage> found;
  std::ranges::copy_if(passages, std::back_inserter(found), &Program::Passage::gradient);
  return found;
}

std::string name_of(const Segment& segment, const std::vector<std::string>& names) {
  if (segment.operations.empty()) return "what follows the model";
  return base::str("level ", segment.level, " (", names[segment.operations.front()], " to ",
                   names[segment.operations.back()], ")");
}

}  // namespace

std::vector<Program::Passage> Program::awaited(Direction pass, int segment) const {
  return pass == Direction::kForward ? segments[segment].receives : with_gradients(segments[segment].sends);
}

std::vector<Program::Passage> Program::sent(Direction pass, int segment) const {
  return pass == Direction::kForward ? segments[segment].sends : with_gradients(segments[segment].receives);
}

schedule::Phase Program::phase(Direction pass, int segment) const {
  using schedule::Phase;
  const auto& own = segments[segment];
  if (pass == Direction::kBackward) return own.makes_result ? Phase::kBackwardStart : Phase::kBackward;
  return segment == 0 && own.receives.empty() ? Phase::kStart : Phase::kForward;
}

Program program_of(const GraphCut& cut, const std::vector<OperationOutput>& results, base::Partition partition,
                   const std::vector<base::Rank>& owners, const std::vector<std::string>& names,
                   const std::string& title) {
  Program program{.title = title, .ranks = owners};
  std::vector<int> own(cut.segments.size(), -1);  // per segment of the graph: its position here
  for (std::size_t i = 0; i < cut.segments.size(); ++i) {
    if (cut.segments[i].partition != partition) continue;
    own[i] = static_cast<int>(program.segments.size());
    program.segments.push_back({name_of(cut.segments[i], names)});
  }
  for (const OperationOutput& result : results) {
    const int maker = own[cut.segment_of[result.operation]];
    if (maker >= 0) program.segments[maker].makes_result = true;
  }
  for (std::size_t i = 0; i < cut.crossings.size(); ++i) {
    const auto& [value, maker, reader, gradient] = cut.crossings[i];
    // The passages of one value have one number.
    const bool again = i > 0 && cut.crossings[i - 1].value == value;
    if (!again) program.values.push_back(names[value.operation]);
    const int number = static_cast<int>(program.values.size()) - 1;
    const auto owner = [&](int segment) { return owners[cut.segments[segment].partition.value]; };
    if (own[maker] >= 0) program.segments[own[maker]].sends.push_back({number, owner(reader), gradient});
    if (own[reader] >= 0) program.segments[own[reader]].receives.push_back({number, owner(maker), gradient});
  }
  return program;
}

}  // namespace lamina::graph
