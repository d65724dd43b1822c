// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "lamina/graph/border.h"
#include "lamina/graph/current.h"
#include "lamina/messaging/messenger.h"

namespace lamina::session {

inline constexpr transport::Kind kGraphValue = "graph value";
inline constexpr transport::Kind kGraphFailure = "graph failed";
inline constexpr transport::Kind kCopiesValue = "copies value";
inline constexpr transport::Kind kCopiesFailure = "copies fail";

// The borders of a session's graphs, with the messages that they send and hear: a value of a step as its bytes, and a
// step that has failed. See [Note: copies of a model].
class GraphLinks {
 public:
  // Before the messenger starts. Those ranks share each.
  GraphLinks(const graph::BorderOptions& options, std::vector<base::Rank> one_copy, std::vector<base::Rank> copies,
             messaging::Messenger& messenger);

  graph::Border& border(graph::Among among);

 private:
  class Way : public graph::Links {
   public:
    Way(graph::BorderOptions options, std::vector<base::Rank> ranks, transport::Kind value, transport::Kind failure,
        messaging::Messenger& messenger);
    void send(base::Rank to, const graph::ValueName& name, const graph::TensorBytes& value) override;
    void tell_failure(base::Step step, const std::string& why) override;
    graph::Border& border() { return border_; }

   private:
    messaging::Messenger& messenger_;
    const std::vector<base::Rank> ranks_;
    const transport::Kind value_, failure_;
    graph::Border border_;
  };
  Way one_copy_, copies_;
};

}  // namespace lamina::session
