// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <type_traits>

#include "lamina/frontend/child.h"
#include "lamina/frontend/job.h"
#include "lamina/frontend/model.h"
#include "lamina/frontend/on_partition.h"

namespace lamina {

// A model spread over the ranks of its pipeline. There is one per job. What can live on another rank is what its
// modules declare as lamina::Child; everything else lives with the module that holds it.
//
// With more than one partition the model is cut in the first step. World rank 0 runs the body's first call of the model
// a few times without gradients, takes the time of each module, and plans. Then everybody gets the values of what it
// owns, and lets go of the rest. Until shutdown the model is then called inside of steps. With one partition it may be
// called anywhere. With several replicas and `ddp`, gradients are their mean over the replicas when a step, or a
// backward outside of one, returns.
//
// lamina::change() has the ranks share it in another way; it goes on as the same object.
//
// T is a module holder or a module. Throws UsageError where there is a model already.
template <class T>
class DistributedModel {
  using Holder = frontend::HolderOf<T>;
  using Impl = typename Holder::ContainedType;

 public:
  explicit DistributedModel(Holder module, ModelOptions options = {})
      : root_(std::move(module)), held_(frontend::set_model(std::make_shared<frontend::Model>(root_.ptr(), options))) {}

  // A call of the model: what its forward returns. Throws UsageError, with more than one partition, outside of steps
  // and in other threads than the one that runs the step's body.
  template <class... Args>
  auto operator()(Args&&... args) {
    using Kind = frontend::CallKind<Impl, Args...>;
    auto& model = this->model();
    const auto call = model.begin_call();
    const bool is_compared =
        model.wants_first_call() &&
        model.first_call(frontend::Example{Kind::number, value::Tuple{{to_value<std::decay_t<Args>>(args)...}}});
    if (model.compares_calls()) model.note_call(value::Tuple{{to_value<std::decay_t<Args>>(args)...}});
    const auto call_root = [&]() -> decltype(auto) { return root_(std::forward<Args>(args)...); };
    using Output = decltype(call_root());
    if constexpr (std::is_void_v<Output>) {
      static_cast<void>(is_compared);  // and refused by Child: nothing is returned
      model.in_team(call_root);
      model.end_call(call, {});
    } else {
      Output output = model.in_team(call_root);
      if (is_compared) model.see_outputs(to_value(output));
      if constexpr (std::is_same_v<std::decay_t<Output>, at::Tensor>) {
        model.end_call(call, output);
      } else {
        model.end_call(call, {});
      }
      return output;
    }
  }

  // The module that is wrapped.
  Impl* operator->() { return root_.get(); }
  Impl& operator*() { return *root_; }
  const std::shared_ptr<Impl>& ptr() const { return root_.ptr(); }

  // The backward of `tensors` over all ranks. In a step the gradients are divided by the number of microbatches, unless
  // ModelOptions say otherwise (torch's loss.backward(), which works there too, never does). A tensor that is no scalar
  // needs its gradient. Throws UsageError, with more than one partition, outside of steps.
  void backward(const at::Tensor& tensor, const at::Tensor& gradient = {}) { model().backward({tensor}, {gradient}); }
  void backward(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gradients = {}) {
    model().backward(tensors, gradients);
  }

  // All parameters, those without a value on this rank included: what an optimizer is made of.
  std::vector<at::Tensor> parameters() const { return root_->parameters(); }
  auto named_parameters() const { return root_->named_parameters(); }

  // As torch's; zero_grad() on every rank, and not inside a step.
  void zero_grad(bool set_to_none = true) {
    frontend::everywhere("zero_grad()");
    model().zero_grad(set_to_none);
  }
  void train(bool on = true) { root_->train(on); }
  void eval() { root_->eval(); }

  // (name, tensor) of what this rank owns. Throws UsageError before the first step.
  auto local_parameters() const { return local(model().tree().parameters()); }
  auto local_buffers() const { return local(model().tree().buffers()); }

  // The values of all parameters and buffers, by name, on every rank. Collective over the ranks of the pipeline.
  auto state_dict(CallSite site = CallSite::current()) {
    torch::OrderedDict<std::string, at::Tensor> state;
    for (auto& [name, tensor] : frontend::model_outside_step("state_dict()").state(site)) state.insert(name, tensor);
    return state;
  }

  // Takes over what this rank owns of a state that has the names and shapes of state_dict(). Throws UsageError, and
  // changes nothing, for any other: it names all that is missing, extra or of another shape.
  void load_state_dict(const torch::OrderedDict<std::string, at::Tensor>& state) {
    std::map<std::string, at::Tensor> named;
    for (const auto& item : state) named[item.key()] = item.value();
    frontend::model_outside_step("load_state_dict()").load(named);
  }

  // The norm of the gradients over the whole model, each parameter counted once; the same on every rank of the
  // pipeline. All of them call it, after the step.
  at::Tensor grad_norm(double norm_type = 2, CallSite site = CallSite::current()) {
    return frontend::model_outside_step("grad_norm()").grad_norm(norm_type, site);
  }

  // Scales the gradients so that their norm over the whole model is at most `max_norm`; returns the norm before, the
  // same on every rank of the pipeline. All of them call it, after the step.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2, CallSite site = CallSite::current()) {
    return frontend::model_outside_step("clip_grad_norm_()").clip_grad_norm(max_norm, norm_type, site);
  }

  // Has `hook` make the gradients what they become at the end of a backward pass, in the place of averaging them over
  // the replicas. It is called on every replica for each bucket, in the same order; process_group(Group::kDp) is what
  // they can use. It does all of the averaging: backward() then divides by no number of microbatches either. Throws
  // UsageError without `ddp`, or a second time.
  void register_comm_hook(CommHook hook) {
    frontend::model_outside_step("register_comm_hook()").register_comm_hook(std::move(hook));
  }

  // Runs `loop`, a training loop in which replicas may have different numbers of batches. A replica whose loop has
  // ended takes part in the reductions of the others, with zero gradients, until all have ended. Then all have the
  // parameters and buffers of the one that trained longest; the states of optimizers stay as they are. Every replica
  // makes at least one step. Throws UsageError without `ddp`, inside a step, or where the loop made no step.
  void join(const std::function<void()>& loop, const JoinOptions& options = {}) {
    frontend::model_outside_step("join()").join(loop, options);
  }

  // Runs `loop`, in which gradients of backwards stay with this replica, and add up; the next backward after it that
  // averages gradients averages these, too, and so does an update. Nobody waits for others in it, so that replicas may
  // have different numbers of backwards there.
  void no_sync(const std::function<void()>& loop) { frontend::model_outside_step("no_sync()").no_sync(loop); }

  // Returns who owns what, and what the plan promises, as a table. Throws UsageError before the first step.
  const std::string& partition_report() const { return model().report(); }

 private:
  frontend::Model& model() const { return *held_->now; }
  std::vector<std::pair<std::string, at::Tensor>> local(const std::vector<frontend::ModuleTensor>& all) const {
    std::vector<std::pair<std::string, at::Tensor>> mine;
    for (const auto& held : all) {
      if (model().table().is_here(held.tensor)) mine.emplace_back(held.name, held.tensor);
    }
    return mine;
  }

  Child<T> root_;
  std::shared_ptr<frontend::HeldModel> held_;
};

template <class Holder>
DistributedModel(Holder) -> DistributedModel<Holder>;
template <class Module>
DistributedModel(std::shared_ptr<Module>) -> DistributedModel<Module>;
template <class Module>
DistributedModel(std::shared_ptr<Module>, ModelOptions) -> DistributedModel<Module>;
template <class Holder>
DistributedModel(Holder, ModelOptions) -> DistributedModel<Holder>;

}  // namespace lamina
