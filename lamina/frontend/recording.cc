// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/recording.h"

#include <algorithm>

namespace lamina::frontend {
namespace {

thread_local Recording* recording = nullptr;

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<std::int64_t>(tensor.element_size()) : 0;
}

template <class Visit>
void for_each_tensor_of(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) visit(tensor);
    }
  }
}

const void* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

std::int64_t offset_of(const at::Tensor& tensor) { return tensor.has_storage() ? tensor.storage_offset() : 0; }

}  // namespace

struct Recording::Popped : Router::Scope {
  Popped(Recording& run, int node) : run(run), node(node) {}
  ~Popped() override { run.pop(); }
  bool wants_result() const override { return true; }
  void returned(const value::Value& result) override { run.returned(node, result); }
  Recording& run;
  const int node;
};

Recording::Recording(const TorchModuleTree& tree)
    : tree_(tree),
      costs_(tree.nodes().size()),
      outer_(router()),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&begins, &ends)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {
  recording = this;
  set_router(this);
  push(0);
}

Recording::~Recording() {
  set_router(outer_);
  recording = nullptr;
  at::removeCallback(handle_);
}

std::vector<Cost> Recording::finish() {
  pass_time();
  hand_on();
  return std::move(costs_);
}

std::optional<ModulePlace> Recording::find(const torch::nn::Module* module) {
  const int node = tree_.node(module);
  if (recording != this || node < 0) return std::nullopt;
  return ModulePlace{this, base::ModuleId(node), /*elsewhere=*/false};
}

std::unique_ptr<Router::Scope> Recording::enter(base::ModuleId id) {
  const int node = static_cast<int>(id.value);
  push(node);
  return std::make_unique<Popped>(*this, node);
}

void Recording::returned(int node, const value::Value& result) {
  latest_bytes_ = 0;
  const bool hands_on = in_stretch_ && !costs_[stack_.back()].stretches.back().works;
  value::for_each_tensor(result, [&](const at::Tensor& tensor) {
    latest_bytes_ += bytes_of(tensor);
    if (hands_on && tensor.defined()) read(tensor);
  });
  costs_[node].output_bytes += latest_bytes_;
}

void Recording::push(int node) {
  pass_time();
  hand_on();
  stack_.push_back(node);
  if (!costs_[node].order) costs_[node].order = calls_++;
  ++costs_[node].calls;
  begin_stretch();
}

void Recording::pop() {
  pass_time();
  hand_on();
  stack_.pop_back();
}

void Recording::begin_stretch() {
  auto& stretch = costs_[stack_.back()].stretches.emplace_back();
  stretch.at = stretches_++;
  stretch.weights_us = 0;
  stretch.reads.emplace();
  read_.clear();
  in_stretch_ = true;
}

void Recording::read(const at::Tensor& tensor) {
  auto& stretch = costs_[stack_.back()].stretches.back();
  const auto maker = makers_.of(tensor);
  if (!maker || maker == stretch.at || !read_.emplace(memory_of(tensor), offset_of(tensor)).second) return;
  const auto known = std::ranges::find(*stretch.reads, *maker, &plan::Read::at);
  plan::Read& of_maker = known == stretch.reads->end() ? stretch.reads->emplace_back() : *known;
  of_maker.at = *maker;
  of_maker.bytes += bytes_of(tensor);
}

void Recording::hand_on() {
  if (in_stretch_) costs_[stack_.back()].stretches.back().value_bytes = latest_bytes_;
  in_stretch_ = false;
}

double Recording::pass_time() {
  const auto now = clock_.now();
  const double passed_us = std::chrono::duration<double, std::micro>(now - since_).count();
  if (!stack_.empty()) {
    Cost& cost = costs_[stack_.back()];
    cost.forward_us += passed_us;
    if (in_stretch_) cost.stretches.back().forward_us += passed_us;
  }
  since_ = now;
  return passed_us;
}

std::unique_ptr<at::ObserverContext> Recording::begins(const at::RecordFunction& operation) {
  if (recording != nullptr) recording->note_inputs(operation);
  return nullptr;
}

void Recording::ends(const at::RecordFunction& operation, at::ObserverContext*) {
  if (recording != nullptr) recording->note_outputs(operation);
}

void Recording::note_inputs(const at::RecordFunction& operation) {
  const bool outermost = depth_++ == 0;
  if (outermost) {
    counted_.clear();
    pass_time();
    of_weights_ = false;
    if (!in_stretch_) begin_stretch();
    costs_[stack_.back()].stretches.back().works = true;
  }
  for (const c10::IValue& input : operation.inputs()) {
    for_each_tensor_of(input, [&](const at::Tensor& tensor) {
      const auto& holders = tree_.holders(tensor);
      if (outermost) {
        counted_.insert(memory_of(tensor));
        read(tensor);
        of_weights_ |= tensor.dim() > 1 && tensor.requires_grad() && !holders.empty();
      }
      if (std::ranges::find(holders, stack_.back()) != holders.end()) return;
      costs_[stack_.back()].reads.insert(holders.begin(), holders.end());
    });
  }
}

// Counts a result that is neither a view nor written in place, once where one operation is made of others. Of a product
// with a parameter one of two products of the backward is for that.
void Recording::note_outputs(const at::RecordFunction& operation) {
  const bool outermost = --depth_ == 0;
  auto& stretch = costs_[stack_.back()].stretches.back();
  if (outermost) {
    latest_bytes_ = 0;
    const double took_us = pass_time();
    if (of_weights_) *stretch.weights_us += took_us;
  }
  for (const c10::IValue& output : operation.outputs()) {
    for_each_tensor_of(output, [&](const at::Tensor& tensor) {
      if (outermost) {
        latest_bytes_ += bytes_of(tensor);
        makers_.made(tensor, stretch.at);
      }
      if (counted_.insert(memory_of(tensor)).second) costs_[stack_.back()].activation_bytes += bytes_of(tensor);
    });
  }
}

}  // namespace lamina::frontend
