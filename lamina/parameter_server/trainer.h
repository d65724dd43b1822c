// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/optim/functional.h"
#include "lamina/parameter_server/context.h"
#include "lamina/parameter_server/owned.h"
#include "lamina/parameter_server/protocol.h"
#include "lamina/parameter_server/requests.h"

namespace lamina::parameter_server {

// An optimizer of parameters on several ranks: its part on each owner.
struct RemoteOptimizer {
  std::vector<Address> parts;
  bool needs_norm = false;  // of the gradients of all parts
  value::Value hyper{};     // that its steps take in the place of those that it was made with; None: those
};

// A user of modules and parameters that other ranks own, from any thread. All throw base::UsageError for what belongs
// to another job, base::PeerError for an owner that is lost, base::TimeoutError, and what the owner threw as
// value::RemoteFailure.
class Trainer {
 public:
  // The requests outlive it.
  Trainer(base::Rank rank, std::int64_t job, Requests& requests) : rank_(rank), job_(job), requests_(requests) {}

  // Waits until `owner` has placed a module of that name.
  RemoteModule find(base::Rank owner, const std::string& name, const base::Patience& patience);
  // In a context, and with grad mode on, the outputs have a history.
  value::Value call(const Address& module, const std::string& label, value::Value arguments,
                    const base::Patience& patience);
  // See [Note: release]. Before an address is given to another rank.
  void share(Shared what, const Address& address, const base::Patience& patience);

  // Hyper-parameters of a functional optimizer, by their names, with the presets of those that are not given.
  std::vector<double> hyper_values(const std::string& functional,
                                   std::span<const std::pair<std::string_view, fused::HyperValue>> given) const;
  // One of the engine's, by its name, of parameters which may lie on several ranks.
  RemoteOptimizer make_optimizer(const std::string& functional, const std::vector<double>& hyper,
                                 const std::vector<Address>& parameters, const base::Patience& patience);

  // The gradients of all leaves behind `tensors`, on whatever rank, become the context's.
  void backward(AutogradContext& context, const std::vector<at::Tensor>& tensors,
                const std::vector<at::Tensor>& gradients, bool keep_graph, const base::Patience& patience);
  // Updates the optimizer's parameters with the context's gradients, on all owners at the same time. An optimizer steps
  // once in a context. Where an owner fails, the others have made their updates.
  void step(AutogradContext& context, const RemoteOptimizer& optimizer, const base::Patience& patience);

 private:
  remote::Tensors call_backward(const std::shared_ptr<AutogradContext>& context, const Address& module,
                                const std::string& what, std::int64_t call, const remote::Tensors& gradients,
                                const remote::BackwardOptions& options);
  void check_context(const AutogradContext& context) const;
  // Returns the answers of all the optimizer's parts to `verb`.
  std::vector<value::Value> ask_parts(AutogradContext& context, const RemoteOptimizer& optimizer, Verb verb,
                                      const value::Value& body, const base::Patience& patience);

  const base::Rank rank_;
  const std::int64_t job_;
  Requests& requests_;
};

// The rule of that name. Throws base::UsageError, which names the rank, where this process has none.
std::shared_ptr<const optim::Functional> functional(const std::string& name, base::Rank rank);

}  // namespace lamina::parameter_server
