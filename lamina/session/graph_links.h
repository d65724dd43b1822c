// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "lamina/graph/border.h"
#include "lamina/messaging/messenger.h"

namespace lamina::session {

inline constexpr transport::Kind kGraphValue = "graph value";
inline constexpr transport::Kind kGraphFailure = "graph failed";

// The border of a session's graphs, with the messages that it sends and hears: a value of a step as its bytes, and a
// step that has failed.
class GraphLinks : private graph::Links {
 public:
  // Before the messenger starts. `ranks` share the graphs.
  GraphLinks(graph::BorderOptions options, std::vector<base::Rank> ranks, messaging::Messenger& messenger);

  graph::Border& border() { return border_; }

 private:
  void send(base::Rank to, const graph::ValueName& name, const graph::TensorBytes& value) override;
  void tell_failure(base::Step step, const std::string& why) override;

  messaging::Messenger& messenger_;
  const std::vector<base::Rank> ranks_;
  graph::Border border_;
};

}  // namespace lamina::session
