// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "examples/cpp/gpt.h"
#include "lamina/lamina.h"

// Models whose shapes a pipeline of stages could not have. Each takes one tensor of (batch, kWidth) and returns a loss.
namespace lamina::frontend::test {

constexpr std::int64_t kWidth = 8;
using at::Tensor;

struct LayerImpl : torch::nn::Module {
  Child<torch::nn::Linear> linear;
  explicit LayerImpl(std::int64_t out = kWidth) { linear = register_module("linear", torch::nn::Linear(kWidth, out)); }
  Tensor forward(const Tensor& x) { return torch::tanh(linear(x)); }
};
TORCH_MODULE(Layer);

// The example's GPT over numbers made of the input; head and embedding share a parameter.
struct TiedGPTImpl : torch::nn::Module {
  Child<example::GPT> gpt;
  TiedGPTImpl() { gpt = register_module("gpt", example::GPT(16, kWidth, 3, 2, kWidth)); }
  Tensor forward(const Tensor& x) {
    const auto words = (x.abs() * 7).floor().clamp(0, 15).to(torch::kLong);
    return torch::nn::functional::cross_entropy(gpt(words).flatten(0, 1), words.roll(1, 1).flatten());
  }
};

// All later layers read what the first one returns, and it is added to itself at the end.
struct SkipImpl : torch::nn::Module {
  ChildList<Layer> layers;
  Child<torch::nn::Linear> join;
  SkipImpl() {
    register_module("layers", layers);
    for (int i = 0; i < 5; ++i) layers->push_back(Layer());
    join = register_module("join", torch::nn::Linear(2 * kWidth, 1));
  }
  Tensor forward(const Tensor& x) {
    const auto first = (*layers)[0](x);
    auto y = first;
    for (std::size_t i = 1; i < layers->size(); ++i) y = (*layers)[i](y + 0.5 * first) + x;
    return join(torch::cat({y, first + y}, 1)).pow(2).mean();
  }
};

// One module called twice, by two others.
struct TwiceImpl : torch::nn::Module {
  struct UserImpl : torch::nn::Module {
    Child<Layer> shared;
    Child<torch::nn::Linear> own;
    explicit UserImpl(Layer layer) {
      shared = register_module("shared", std::move(layer));
      own = register_module("own", torch::nn::Linear(kWidth, kWidth));
    }
    Tensor forward(const Tensor& x) { return shared(own(shared(x))); }
  };
  TORCH_MODULE(User);
  Child<User> a, b;
  TwiceImpl() {
    Layer shared;
    a = register_module("a", User(shared));
    b = register_module("b", User(shared));
  }
  Tensor forward(const Tensor& x) { return (b(a(x)) - x).pow(2).mean(); }
};

// Arguments and results of many types.
using Named = std::map<std::string, Tensor>;
struct HeadsImpl : torch::nn::Module {
  Child<Layer> left, right;
  HeadsImpl() {
    left = register_module("left", Layer());
    right = register_module("right", Layer());
  }
  Named forward(const std::vector<Tensor>& xs, std::optional<Tensor> scale, double factor, const std::string& which) {
    Named named{{"left", left(xs.at(0)) * factor}, {"right", right(xs.at(1))}};
    if (scale) named.at(which) = named.at(which) * *scale;
    return named;
  }
};
TORCH_MODULE(Heads);
struct PairsImpl : torch::nn::Module {
  Child<torch::nn::Linear> linear;
  PairsImpl() { linear = register_module("linear", torch::nn::Linear(kWidth, kWidth)); }
  std::tuple<Tensor, std::pair<Tensor, std::optional<Tensor>>> forward(const Tensor& x, bool both) {
    const auto y = linear(x);
    return {y, {y.sin(), both ? std::optional(x.detach()) : std::nullopt}};
  }
};
TORCH_MODULE(Pairs);
struct NestedImpl : torch::nn::Module {
  Child<Heads> heads;
  Child<Pairs> pairs;
  NestedImpl() {
    heads = register_module("heads", Heads());
    pairs = register_module("pairs", Pairs());
  }
  Tensor forward(const Tensor& x) {
    const auto [y, rest] = pairs(x, true);
    const auto scaled = heads(std::vector<Tensor>{y, rest.first}, rest.second, 0.5, std::string("right"));
    const auto plain = heads(std::vector<Tensor>{x, x}, std::optional<Tensor>(), 2.0, std::string("left"));
    return (scaled.at("left") * plain.at("right") + scaled.at("right") - plain.at("left")).pow(2).mean();
  }
};

// A Sequential with parts that may live apart, and one of torch's, which lives in one place.
struct ChainImpl : torch::nn::Module {
  Child<Sequential> chain;
  Child<torch::nn::Sequential> whole;
  ChainImpl() {
    chain = register_module("chain", Sequential(torch::nn::Linear(kWidth, 2 * kWidth), torch::nn::GELU(),
                                                Sequential(torch::nn::Linear(2 * kWidth, kWidth), Layer())));
    whole = register_module("whole", torch::nn::Sequential(Layer(), torch::nn::Linear(kWidth, 1)));
  }
  Tensor forward(const Tensor& x) { return whole(chain(x)).pow(2).mean(); }
};

// Draws random numbers here and there.
struct DropsImpl : torch::nn::Module {
  Child<torch::nn::Dropout> drop;
  Child<Layer> a, b;
  Child<Sequential> rest;
  DropsImpl() {
    drop = register_module("drop", torch::nn::Dropout(0.3));
    a = register_module("a", Layer());
    b = register_module("b", Layer());
    rest = register_module("rest", Sequential(torch::nn::Dropout(0.5), Layer(), torch::nn::Dropout(0.2)));
  }
  Tensor forward(const Tensor& x) { return (rest(b(drop(a(x)))) + torch::rand_like(x)).pow(2).mean(); }
};

// One that is called as no Child, as a mean over all calls.
struct NormsItselfImpl : torch::nn::Module {
  torch::nn::BatchNorm1d norm{nullptr};
  NormsItselfImpl() {
    norm =
        register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(kWidth).momentum(std::nullopt)));
  }
  Tensor forward(const Tensor& x) { return norm(norm(x)); }
};
TORCH_MODULE(NormsItself);

// With running statistics.
struct NormedImpl : torch::nn::Module {
  Child<torch::nn::BatchNorm1d> norm;
  Child<Layer> a, b;
  Child<NormsItself> itself;
  NormedImpl() {
    a = register_module("a", Layer());
    norm = register_module("norm", torch::nn::BatchNorm1d(kWidth));
    b = register_module("b", Layer());
    itself = register_module("itself", NormsItself());
  }
  Tensor forward(const Tensor& x) { return b(norm(itself(a(x)))).pow(2).mean(); }
};

using Normed = torch::nn::ModuleHolder<NormedImpl>;
using Drops = torch::nn::ModuleHolder<DropsImpl>;
using TiedGPT = torch::nn::ModuleHolder<TiedGPTImpl>;
using Skip = torch::nn::ModuleHolder<SkipImpl>;
using Twice = torch::nn::ModuleHolder<TwiceImpl>;
using Nested = torch::nn::ModuleHolder<NestedImpl>;
using Chain = torch::nn::ModuleHolder<ChainImpl>;

}  // namespace lamina::frontend::test
