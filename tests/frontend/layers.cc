// SPDX-License-Identifier: Apache-2.0
// The C++ side of tests/python/layers/test_both_faces.py: the loss and the gradients of each case, as a line
// `case<TAB>bits`, or the error that refuses it.
//
//     frontend_layers CASES                       whole
//     lamina run -n 2 -c frontend_layers CASES    cut over two ranks
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "lamina/environment/world.h"
#include "lamina/layers/options.h"
#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

struct Case {
  std::string name;
  nn::TransformerOptions options{.hidden_size = 12,
                                 .hidden_dropout_prob = 0,
                                 .num_attention_heads = 3,
                                 .attention_head_size = 4,
                                 .attention_dropout_prob = 0,
                                 .intermediate_size = 10,
                                 .num_layers = 2,
                                 .vocab_size = 21,
                                 .num_positions = 16};
  std::set<std::string> given;

  bool has(const std::string& what) const { return given.contains(what); }
  at::ScalarType dtype() const { return has("@bfloat16") ? at::kBFloat16 : has("@double") ? at::kDouble : at::kFloat; }
};

void parse(const std::string& text, bool& value) { value = text == "true"; }
void parse(const std::string& text, std::int64_t& value) { value = std::stoll(text); }
void parse(const std::string& text, double& value) { value = std::stod(text); }
void parse(const std::string& text, std::string& value) { value = text; }
template <class Value>
void parse(const std::string& text, std::optional<Value>& value) {
  parse(text, value.emplace());
}

Case case_of(const std::string& line) {
  Case made;
  made.name = line.substr(0, line.find(": "));
  std::istringstream words(line.substr(made.name.size() + 2));
  for (std::string word; words >> word;) {
    const auto name = word.substr(0, word.find('='));
    if (name == word) made.given.insert(word);
    for (const auto& option : layers::every_option()) {
      if (option.name != name) continue;
      std::visit([&](auto field) { parse(word.substr(name.size() + 1), made.options.*field); }, option.field);
    }
  }
  return made;
}

struct Inputs {
  Tensor mask, types, others, labels;
};

struct ModelImpl : torch::nn::Module {
  Child<nn::DistributedTransformerLMHead> model;
  Inputs inputs;
  ModelImpl(const nn::TransformerOptions& options, Inputs given) : inputs(std::move(given)) {
    model = register_module("model", nn::DistributedTransformerLMHead(options));
  }
  Tensor forward(const Tensor& words) {
    return model->loss(model(words, inputs.mask, inputs.types, Tensor(), inputs.others, Tensor()), inputs.labels);
  }
};
TORCH_MODULE(Model);

std::string bits(const Tensor& tensor) {
  const auto plain = tensor.detach().contiguous();
  std::uint64_t hash = 14695981039346656037ULL;
  const auto* bytes = static_cast<const unsigned char*>(plain.const_data_ptr());
  for (std::size_t i = 0; i < plain.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211ULL;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

template <class Parameters>
std::string bits_of(const Tensor& loss, const Parameters& parameters) {
  auto text = bits(loss);
  for (const auto& [name, parameter] : parameters) {
    if (parameter.grad().defined()) text += " " + name + " " + bits(parameter.grad());
  }
  return text;
}

std::map<std::string, Tensor> named(const torch::nn::Module& model) {
  std::map<std::string, Tensor> found;
  for (const auto& item : model.named_parameters()) found[item.key()] = item.value();
  return found;
}

std::string result(const Case& each, int ranks) {
  torch::manual_seed(99);
  const auto words = torch::randint(0, 21, {4, 7}, torch::kLong), types = torch::randint(0, 3, {4, 7}, torch::kLong);
  const auto others = torch::randn({4, 5, 12}), hidden = torch::rand({4, 7});
  Inputs inputs{.labels = words.masked_fill(hidden.lt(0.3), -100)};
  if (each.has("@mask")) inputs.mask = hidden.gt(0.8);
  if (each.has("@types")) inputs.types = types;
  if (each.has("@others")) inputs.others = others.to(each.dtype());
  Model model(each.options, inputs);
  model->to(each.dtype());
  std::int64_t seed = 0;
  for (auto& [name, parameter] : named(*model)) {
    torch::manual_seed(++seed);
    const torch::NoGradGuard no_grad;
    parameter.copy_(torch::randn(parameter.sizes()) * 0.3);
  }
  torch::manual_seed(5);
  if (ranks == 1) {
    const auto loss = model(words);
    loss.backward();
    return bits_of(loss, named(*model));
  }
  init({{"tensor_parallel_degree", ranks}, {"ddp", true}, {"prescaled_batch", true}, {"timeout_s", 60}});
  DistributedModel cut(model);
  torch::manual_seed(5);
  const auto loss = cut(words);
  cut.backward(loss);
  const auto local = cut.local_parameters();
  return bits_of(loss, std::map<std::string, Tensor>(local.begin(), local.end()));
}

}  // namespace

int main(int, char** arguments) {
  const auto world = environment::read_world(environment::process_environment());
  std::ifstream cases(arguments[1]);
  for (std::string line; std::getline(cases, line);) {
    if (line.starts_with('#')) continue;
    const auto each = case_of(line);
    std::string text;
    try {
      text = result(each, world.size);
    } catch (const base::Error& error) {
      text = std::string("refused: ") + error.what();
    }
    if (world.rank.value == 0) std::printf("%s\t%s\n", each.name.c_str(), text.substr(0, text.find('\n')).c_str());
    shutdown();
  }
}
