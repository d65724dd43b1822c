// SPDX-License-Identifier: Apache-2.0
// Locks: the mutexes of the parameters that are updated, in the order of their addresses; then what an Updater takes,
// which is Python's GIL at most. Nobody waits for another rank with one of them.
#include "lamina/parameter_server/optimizer.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/optim/step.h"
#include "lamina/optim/update_tensors.h"

namespace lamina::parameter_server {
namespace {

constexpr std::int64_t kElementsAtOnce = 1 << 16;  // enough that a call's own cost does not matter

class FunctionalUpdater : public Updater {
 public:
  FunctionalUpdater(std::shared_ptr<const optim::Functional> functional, std::vector<double> hyper,
                    std::size_t parameters, std::shared_ptr<optim::Threads> threads)
      : functional_(std::move(functional)),
        hyper_(std::move(hyper)),
        states_(parameters),
        threads_(std::move(threads)) {
    functional_->check(hyper_);
  }

  bool divides() const override { return !functional_->declaration().gradient_norm; }

  void check(std::span<const at::Tensor> parameters, std::span<const at::Tensor> gradients) const override {
    optim::State none;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!gradients[i].defined()) continue;
      optim::check_update(functional_->declaration(),
                          {.parameter = &parameters[i], .gradient = &gradients[i], .state = &none});
    }
  }

  void update(Indices indices, std::span<const at::Tensor> parameters, std::span<const at::Tensor> gradients,
              const StepOptions& options) override {
    std::vector<optim::Update> updates;
    updates.reserve(indices.size());
    for (const auto i : indices) {
      updates.push_back({.parameter = &parameters[i], .gradient = &gradients[i], .state = &states_[i]});
    }
    const auto others = hyper_of(options.hyper);
    optim::Step step{.hyper = others ? *others : hyper_};
    if (functional_->declaration().gradient_norm) {
      step.gradient_norm =
          options.norm ? *options.norm : std::sqrt(optim::squared_gradient_norm(updates, 1, *threads_));
    }
    functional_->measure(step, updates, *threads_);
    functional_->update(step, updates, *threads_);
  }

 private:
  std::optional<std::vector<double>> hyper_of(const value::Value& given) const {
    if (given.get_if<value::None>() != nullptr) return {};
    std::vector<double> hyper;
    for (const auto& one : given.as<value::List>().items) hyper.push_back(one.as<double>());
    if (hyper.size() != hyper_.size()) {
      throw base::FormatError(base::str(hyper.size(), " hyper-parameters in the place of ", hyper_.size()));
    }
    functional_->check(hyper);
    return hyper;
  }

  const std::shared_ptr<const optim::Functional> functional_;
  const std::vector<double> hyper_;
  std::vector<optim::State> states_;  // each under the mutex of its parameter
  const std::shared_ptr<optim::Threads> threads_;
};

}  // namespace

std::shared_ptr<Updater> make_functional_updater(std::shared_ptr<const optim::Functional> functional,
                                                 std::vector<double> hyper, std::size_t parameters,
                                                 std::shared_ptr<optim::Threads> threads) {
  return std::make_shared<FunctionalUpdater>(std::move(functional), std::move(hyper), parameters, std::move(threads));
}

Optimizer::Optimizer(std::vector<std::shared_ptr<Parameter>> parameters, std::shared_ptr<Updater> updater)
    : parameters_(std::move(parameters)), updater_(std::move(updater)), order_(parameters_.size()) {
  for (const auto& parameter : parameters_) tensors_.push_back(parameter->tensor);
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::sort(order_, {}, [&](std::size_t i) { return parameters_[i].get(); });
  const auto same = [&](std::size_t a, std::size_t b) { return parameters_[a] == parameters_[b]; };
  if (const auto twice = std::ranges::adjacent_find(order_, same); twice != order_.end()) {
    throw base::UsageError(base::str("an optimizer with one parameter twice: numbers ", *twice, " and ",
                                     *std::next(twice), " of those it was given are the same"));
  }
}

void Optimizer::step(const std::vector<at::Tensor>& gradients, const StepOptions& options) {
  base::internal_check(gradients.size() == parameters_.size(), "a gradient for each parameter");
  updater_->check(tensors_, gradients);
  const auto most = updater_->divides() ? kElementsAtOnce : std::numeric_limits<std::int64_t>::max();
  std::vector<std::unique_lock<std::mutex>> locks;
  std::vector<std::size_t> held;
  std::int64_t elements = 0;
  std::vector<at::Tensor> writable(parameters_.size());
  const auto update = [&] {
    if (!held.empty()) updater_->update(held, writable, gradients, options);
    locks.clear();
    held.clear();
    elements = 0;
  };
  for (const auto i : order_) {
    if (!gradients[i].defined()) continue;
    locks.emplace_back(parameters_[i]->mutex);
    writable[i] = parameters_[i]->writable();
    held.push_back(i);
    elements += gradients[i].numel();
    if (elements >= most) update();
  }
  update();
}

}  // namespace lamina::parameter_server
