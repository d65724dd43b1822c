// SPDX-License-Identifier: Apache-2.0
// The C++ side of tests/python/test_both_faces_slice.py: each case trains a net with a plan over two ranks, and whole,
// as a line `case<TAB>numbers<TAB>numbers of the whole`, or says what it is refused with.
//
//     lamina run -n 2 -c frontend_slicing_plans
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using at::Tensor;

constexpr std::int64_t kWidth = 8, kWords = 9, kHead = 2;

struct AttentionImpl : torch::nn::Module, WithHeads {
  torch::nn::Linear query{nullptr}, out{nullptr};
  Child<torch::nn::Linear> key, value;  // of which ranks may have the same heads
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  std::int64_t heads, keys, head_dim = kHead;
  std::string name;
  explicit AttentionImpl(std::int64_t key_heads = 4, double p = 0, std::string number = "num_heads",
                         std::int64_t count = kWidth / kHead)
      : heads(count), keys(key_heads), name(std::move(number)) {
    query = register_module("query", torch::nn::Linear(kWidth, kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    key = register_module("key", torch::nn::Linear(kWidth, keys * kHead));
    value = register_module("value", torch::nn::Linear(kWidth, keys * kHead));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kHead})));
    dropout = register_module("dropout", torch::nn::Dropout(p));
  }
  std::map<std::string, std::int64_t*> numbers() override {
    return {{name, &heads}, {"num_key_value_heads", &keys}, {"head_dim", &head_dim}};
  }
  Tensor forward(const Tensor& x) {
    const auto queries = norm(query(x).unflatten(-1, {heads, kHead})).transpose(1, 2);
    const auto of_keys = [&](const Child<torch::nn::Linear>& layer) {
      return layer(x).unflatten(-1, {keys, kHead}).transpose(1, 2).repeat_interleave(heads / keys, 1);
    };
    const auto found = dropout(queries.matmul(of_keys(key).transpose(-2, -1)).softmax(-1));
    return out(found.matmul(of_keys(value)).transpose(1, 2).flatten(2));
  }
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr};
  Child<torch::nn::Linear> down;
  bool gated;
  double p;
  explicit BlockImpl(std::int64_t inner = 7, bool is_gated = false, double dropout = 0) : gated(is_gated), p(dropout) {
    up = register_module("up", torch::nn::Linear(kWidth, (gated ? 2 : 1) * inner));
    down = register_module("down", torch::nn::Linear(inner, kWidth));
  }
  Tensor forward(const Tensor& given) {
    auto x = up(given).tanh();
    if (gated) x = x.chunk(2, -1)[0] * x.chunk(2, -1)[1];
    return down(torch::dropout(x, p, is_training()));
  }
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  torch::nn::Embedding words{nullptr};
  Child<Attention> attention;
  ChildList<Block> layers;
  torch::nn::Linear head{nullptr};
  explicit NetImpl(Attention first = Attention(), Block block = Block(),
                   const torch::nn::EmbeddingOptions& options = {kWords, kWidth})
      : layers(block, Block()) {
    words = register_module("words", torch::nn::Embedding(options));
    attention = register_module("attention", first);
    register_module("layers", layers);
    head = register_module("head", torch::nn::Linear(kWidth, kWords));
    to(torch::kDouble);
    std::int64_t number = 0;
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_((torch::arange(parameter.numel(), torch::kDouble) + number++).sin().view_as(parameter));
    }
  }
  Tensor forward(const Tensor& given) {
    auto x = words(given);
    x = x + attention(x);
    for (auto& layer : *layers) x = x + layer(x);
    return torch::nn::functional::cross_entropy(head(x.flatten(0, 1)), given.flatten());
  }
};
TORCH_MODULE(Net);

std::string shown(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.8g", number);
  return text;
}

// The losses of three steps, and a sum of all values.
template <class Model, class Optimizer, class State>
std::string trained(Model& model, Optimizer& optimizer, const State& state) {
  torch::manual_seed(7);
  std::string numbers;
  for (int number = 0; number < 3; ++number) {
    const auto loss = model((torch::arange(12).view({2, 6}) * (number + 2)).remainder(kWords));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    numbers += shown(loss.template item<double>()) + " ";
  }
  double sum = 0;
  for (const auto& item : state()) {
    const auto& value = item.value();
    sum += (value * torch::arange(value.numel()).view_as(value)).sum().template item<double>();
  }
  return numbers + shown(sum);
}

// An optimizer of parameters, each once, that are listed under each of their names.
auto sgd(const std::vector<Tensor>& listed) {
  std::vector<Tensor> parameters;
  for (const auto& each : listed) {
    if (std::ranges::none_of(parameters, [&](const auto& known) { return known.is_same(each); })) {
      parameters.push_back(each);
    }
  }
  return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(0.1));
}

// The numbers of a net with such a plan, and of a whole one.
std::string sliced(
    const SlicingPlan& plan, const std::function<Net()>& make = [] { return Net(); }, const HeadCount& heads = {},
    const SlicingPlan& inner = {}) {
  init({{"tensor_parallel_degree", 2}, {"ddp", true}, {"prescaled_batch", true}});
  auto plain = make(), net = make();
  set_tensor_parallelism(*net, plan, heads);
  if (!inner.empty()) set_tensor_parallelism(*(*net->layers)[0], inner);
  DistributedModel model(net);
  DistributedOptimizer ours(sgd(model.parameters()));
  auto theirs = sgd(plain->parameters());
  const auto numbers = trained(model, ours, [&] { return model.state_dict(); });
  return numbers + "\t" + trained(plain, theirs, [&] { return plain->named_parameters(); });
}

const SlicingPlan kHeads{{"attention.query", "colwise"},
                         {"attention.key", "colwise"},
                         {"attention.value", "colwise"},
                         {"attention.out", "rowwise"},
                         {"attention.norm", "replicated_with_grad_allreduce"}};
const SlicingPlan kBlocks{{"layers.*.up", "colwise"}, {"layers.*.down", "rowwise"}};

// The parameters of a module, to tie one: torch lets none be given again.
struct Opened : torch::nn::Module {
  static auto& parameters(torch::nn::Module& module) { return module.*(&Opened::parameters_); }
};

Net tied() {
  Net net;
  net->head->weight = Opened::parameters(*net->head)["weight"] = net->words->weight;
  return net;
}

std::function<Net()> with(std::function<Attention()> attention) {
  return [=] { return Net(attention()); };
}
std::function<Net()> with_block(std::int64_t inner, bool gated = false, double dropout = 0) {
  return [=] { return Net(Attention(), Block(inner, gated, dropout)); };
}
std::function<Net()> with_words(const torch::nn::EmbeddingOptions& options) {
  return [=] { return Net(Attention(), Block(), options); };
}

torch::nn::EmbeddingOptions words() { return {kWords, kWidth}; }

}  // namespace

int main() {
  torch::set_num_threads(1);
  const std::map<std::string, std::function<std::string()>> cases{
      {"columns_and_rows", [] { return sliced(kBlocks); }},
      {"whole_inputs_and_outputs",
       [] { return sliced({{"layers.*.up", "colwise_gather_output"}, {"layers.*.down", "rowwise_split_input"}}); }},
      {"other_names_of_styles",
       [] {
         return sliced({{"layers.*.up", "colwise_rep"}, {"layers.*.down", "rowwise_rep"}, {"head", "replicate"}});
       }},
      {"matrices_side_by_side",
       [] { return sliced({{"layers.0.up", "packed_colwise"}, {"layers.0.down", "rowwise"}}, with_block(7, true)); }},
      {"an_embedding_by_words",
       [] { return sliced({{"words", "embedding_rowwise"}}, with_words(words().padding_idx(7))); }},
      {"an_embedding_by_features",
       [] { return sliced({{"words", "embedding_colwise"}}, with_words(words().padding_idx(7))); }},
      {"a_tied_head", [] { return sliced({{"words", "embedding_rowwise"}, {"head", "colwise_gather_output"}}, tied); }},
      {"heads_by_their_own_number", [] { return sliced(kHeads); }},
      {"fewer_heads_of_keys_than_ranks", [] { return sliced(kHeads, with([] { return Attention(1); })); }},
      {"heads_under_another_name",
       [] { return sliced(kHeads, with([] { return Attention(4, 0, "nhead"); }), "nhead"); }},
      {"dropout_between_layers", [] { return sliced(kBlocks, with_block(7, false, 0.3)); }},
      {"dropout_of_heads", [] { return sliced(kHeads, with([] { return Attention(4, 0.3); })); }},
      {"a_plan_inside_another",
       [] { return sliced(kBlocks, [] { return Net(); }, {}, {{"up", "replicate"}, {"down", "replicate"}}); }},
      {"a_plan_around_another",
       [] { return sliced({{"head", "colwise_gather_output"}, {"layers.0.*", "replicate"}}); }},
      {"a_name_that_is_not_there", [] { return sliced({{"layers.*.upp", "colwise"}}); }},
      {"a_style_that_is_not_known", [] { return sliced({{"layers.*.up", "colwis"}}); }},
      {"a_module_that_is_no_layer", [] { return sliced({{"attention", "colwise"}}); }},
      {"a_layer_in_a_style_of_embeddings", [] { return sliced({{"head", "embedding_rowwise"}}); }},
      {"an_embedding_with_options",
       [] { return sliced({{"words", "embedding_rowwise"}}, with_words(words().max_norm(1.0))); }},
      {"fewer_features_than_ranks", [] { return sliced({{"layers.0.up", "colwise"}}, with_block(1)); }},
      {"matrices_that_do_not_divide", [] { return sliced({{"layers.0.up", "packed_colwise"}}); }},
      {"heads_that_do_not_divide", [] { return sliced(kHeads, with([] { return Attention(3, 0, "num_heads", 3); })); }},
      {"a_name_of_heads_that_is_not_there", [] { return sliced(kHeads, [] { return Net(); }, "nhead"); }},
      {"a_name_of_heads_that_is_none", [] { return sliced(kHeads, [] { return Net(); }, "4 heads"); }},
      {"a_head_that_is_tied_to_what_is_whole", [] { return sliced({{"head", "colwise_gather_output"}}, tied); }}};
  for (const auto& [name, act] : cases) {
    std::string text;
    try {
      text = act();
    } catch (const base::Error& error) {
      text = error.what();
    }
    if (!is_initialized() || rank() == 0) std::printf("%s\t%s\n", name.c_str(), text.c_str());
    shutdown();
  }
}
