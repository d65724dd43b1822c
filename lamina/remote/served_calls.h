// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lamina/remote/bursts.h"
#include "lamina/remote/graph.h"
#include "lamina/remote/issued.h"
#include "lamina/remote/protocol.h"
#include "lamina/value/failure.h"

namespace lamina::remote {

// Results of a call, which are to be sent as they were then.
struct Results {
  Results() = default;
  Results(std::string module, Tensors tensors, bool gradients);
  bool written(std::int64_t output) const;  // since then
  at::Tensor delivered(std::int64_t output) const;
  std::string module;
  Tensors tensors;
  bool gradients = false;
  std::vector<std::uint32_t> versions;
};

// The calls of one step that other ranks have made of modules here: each is kept until the caller has released it, or
// the step ends.
class ServedCalls {
 public:
  using Reader = std::function<void()>;  // of the end of a call

  // A call that runs, has run, or waits for its inputs. Guarded by the mutex of ServedCalls.
  struct Call {
    bool finished = false;
    std::vector<Delivery> owed;  // asked for before it has finished
    Results results;
    std::optional<value::Failure> failure;
    std::shared_ptr<CalleeGraph> graph;
    bool outputs_released = false;
    bool graph_released = false;  // but by the backwards that are asked for
    int backwards = 0;            // asked for, and not begun
    std::vector<Reader> readers;  // to be told that it has finished
  };

  void add(const base::CallId& id, std::vector<Delivery> owed);

  // Has `reader` told when a call ends. False where the call has ended already or is not known: then nobody will be
  // told.
  bool await(const base::CallId& id, const Reader& reader);
  // The forward whose backward was asked for; nullptr where it is not known.
  std::shared_ptr<Call> expect_backward(const base::CallId& forward);
  // Its graph, for a backward that begins; nullptr where it is gone. Throws the failure of the forward.
  std::shared_ptr<CalleeGraph> graph_of(Call& forward, bool keep);
  void keep_graph(const base::CallId& id, std::shared_ptr<CalleeGraph> graph);

  // Hands over, once, which calls an ended call made last, by module. The call that comes after it in the order takes
  // them, so that the calls which it makes itself run after those of the earlier one.
  CallOrder take_order(const base::CallId& id);

  // Notes that a call has ended. Gives the readers that are to be told and the deliveries that wait for it; nothing
  // where the step is over.
  struct End {
    std::vector<Delivery> owed;
    std::vector<Reader> readers;
  };
  std::optional<End> finish(const base::CallId& id, const Results& results, std::optional<value::Failure> failure,
                            const CallOrder& order);

  // Gives the results of a call that has finished, to be delivered now. Nothing where it still runs: then the delivery
  // is noted, and finish() gives it.
  struct Made {
    Results results;
    std::optional<value::Failure> failure;
  };
  std::optional<Made> ask(const Ask& ask, base::Rank self);

  // From the transport's thread, which must not wait for a lock of a face: what goes waits for take_garbage().
  void forget(const Release& release);
  using Garbage = std::vector<std::shared_ptr<void>>;
  Garbage take_garbage();

  void close();  // the step is over: forgets all

  Bursts bursts;  // of answers

 private:
  std::mutex mutex_;
  std::map<base::CallId, std::shared_ptr<Call>> calls_;
  std::map<base::CallId, CallOrder> orders_;  // of calls that have finished, for the next one
  Garbage garbage_;
};

}  // namespace lamina::remote
