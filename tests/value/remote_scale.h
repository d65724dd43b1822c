// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "lamina/value/torch_version.h"
#include "tests/value/sources.h"

namespace lamina::value {

// A call on another rank as autograd sees it: gives the sum of its inputs times `factor`, as a reference; so does its
// backward, along the edges that lead to another such call. Elsewhere the value goes.
class RemoteScale : public torch::autograd::Node {
 public:
  struct Options {
    bool keep = true;      // a strong reference to the gradients that it gave out
    bool without = false;  // references: all gradients are values
  };
  RemoteScale(double factor, Options options) : factor_(factor), options_(options) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const at::Tensor gradient = gradients.at(0);
    received.push_back(gradient);
    auto source = std::make_shared<Made>([gradient, factor = factor_] {
      materialise(gradient);
      return gradient * factor;
    });
    given.push_back(source);
    torch::autograd::variable_list result;
    for (const auto& edge : next_edges()) {
      result.push_back(make_reference(spec_of(gradient), source, Strides::kAsTheyArrive));
      const bool accepts = dynamic_cast<RemoteScale*>(edge.function.get()) != nullptr && !options_.without;
      if (!accepts) materialise(result.back());
      if (options_.keep) kept_.push_back(result.back());
    }
    return result;
  }

  std::vector<at::Tensor> received;          // the gradients of its output, one for each backward
  std::vector<std::shared_ptr<Made>> given;  // where those of its inputs come from

 private:
  const double factor_;
  const Options options_;
  std::vector<at::Tensor> kept_;
};

inline at::Tensor remote(const std::vector<at::Tensor>& inputs, double factor, RemoteScale::Options options = {}) {
  auto source = std::make_shared<Made>([inputs, factor] {
    at::Tensor total = inputs.at(0) * factor;
    for (std::size_t i = 1; i < inputs.size(); ++i) total = total + inputs[i] * factor;
    return total;
  });
  auto output = make_reference(spec_of(inputs.at(0)), std::move(source), Strides::kAsSpecified);
  const auto node = make_node<RemoteScale>(factor, options);
  torch::autograd::edge_list edges;
  for (const auto& input : inputs) edges.push_back(torch::autograd::impl::gradient_edge(input));
  node->set_next_edges(std::move(edges));
  torch::autograd::create_gradient_edge(output, node);
  return output;
}

inline RemoteScale& call_of(const at::Tensor& output) { return dynamic_cast<RemoteScale&>(*output.grad_fn()); }

}  // namespace lamina::value
