// SPDX-License-Identifier: Apache-2.0
// The C++ side of tests/python/test_both_faces_split.py: what each case makes of its batch, as a line `case<TAB>parts`:
// those of each microbatch, or the code that refuses them.
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using at::Tensor;
using Words = std::vector<std::string>;
using Tensors = std::vector<Tensor>;
template <class T>
using Named = std::map<std::string, T>;

void join(std::string& text, const char* between, const std::string& more) {
  text += (text.empty() ? "" : between) + more;
}

// Writes what a microbatch has got, as both faces do.
std::string shown(const Value& value);

std::string shown(const std::vector<Value>& items) {
  std::string text;
  for (const auto& item : items) join(text, ", ", shown(item));
  return "(" + text + ")";
}

std::string shown(const Tensor& tensor) {
  std::string numbers;
  const auto flat = tensor.to_dense().flatten().to(torch::kLong);
  for (std::int64_t i = 0; i < flat.numel(); ++i) join(numbers, " ", std::to_string(flat[i].item<std::int64_t>()));
  return base::str(tensor.sizes(), "<", numbers, ">");
}

std::string shown(const Value& value) {
  if (const auto* tensor = value.get_if<Tensor>()) return shown(*tensor);
  if (const auto* list = value.get_if<value::List>()) return shown(list->items);
  if (const auto* tuple = value.get_if<value::Tuple>()) return shown(tuple->items);
  if (const auto* dict = value.get_if<value::Dict>()) {
    std::string text;
    for (const auto& [key, item] : dict->items) join(text, ", ", key.as<std::string>() + " " + shown(item));
    return "(" + text + ")";
  }
  const auto* text = value.get_if<std::string>();
  return text != nullptr ? *text : std::to_string(value.as<std::int64_t>());
}

// The parts of each batch, which one step function splits after the other.
template <class... T>
std::string parts(int microbatches, const std::vector<std::tuple<T...>>& batches) {
  init({{"microbatches", microbatches}});
  std::string got;
  const auto train =
      step([&](const auto&... given) { join(got, "; ", shown(std::vector<Value>{to_value(given)...})); });
  for (const auto& batch : batches) std::apply(train, batch);
  return got;
}

template <class... T>
std::string parts(const T&... arguments) {
  return parts(4, std::vector{std::tuple<T...>(arguments...)});
}

Tensor x(std::initializer_list<std::int64_t> shape) { return torch::arange(c10::multiply_integers(shape)).view(shape); }

Tensors pictures() {
  Tensors each;
  for (int i = 0; i < 4; ++i) each.push_back(torch::full({3, 1 + i % 2}, i));
  return each;
}

Tensors five_pictures() {
  auto each = pictures();
  each.push_back(each.front());
  return each;
}

template <class Returned, class Merge>
std::string merged(const Returned& returned, const Merge& merge, const Tensor& batch) {
  init({{"microbatches", 4}});
  return shown(merge(step(returned)(batch)));
}

Tensor sum(const Tensor& each) { return each.sum(); }
Tensor same(const Tensor& each) { return each; }

const Tensor kEnds = torch::tensor({0, 2, 3, 8}), kRising = torch::tensor({0, 2, 2, 6});
const Tensors kAlike(8, torch::ones({3, 2, 2}));
const std::tuple<int, int, int, int> kSize{3, 5, 3, 5};

using Case = std::pair<const char*, std::function<std::string()>>;

const std::vector<Case> kSplits{
    {"rows_of_a_tensor", [] { return parts(x({8, 2})); }},
    {"a_batch_that_does_not_divide", [] { return parts(x({6})); }},
    {"a_batch_of_fewer_samples", [] { return parts(x({2})); }},
    {"a_batch_of_no_samples", [] { return parts(x({0, 2})); }},
    {"several_rows_for_each_sample", [] { return parts(x({5}), x({10})); }},
    {"another_axis", [] { return parts(along(1, x({2, 4}))); }},
    {"the_last_axis", [] { return parts(along(-1, x({2, 4}))); }},
    {"a_tensor_without_axes", [] { return parts(x({4}), torch::tensor(7)); }},
    {"an_argument_that_is_whole", [] { return parts(x({4}), whole(x({3}))); }},
    {"numbers_and_words", [] { return parts(x({4}), 3, std::string("word")); }},
    {"containers_of_tensors",
     [] { return parts(Named<Tensors>{{"a", {x({4}), x({8})}}, {"b", {x({4})}}}, std::tuple(x({4, 2}), 5)); }},
    {"one_tensor_twice",
     [] {
       const auto each = x({5});
       return parts(each, Tensors{each, each});
     }},
    {"a_sparse_tensor", [] { return parts(torch::eye(4).to_sparse()); }},
    {"pictures_beside_classes", [] { return parts(pictures(), x({4})); }},
    {"pictures_in_a_dictionary", [] { return parts(Named<Tensors>{{"pictures", five_pictures()}}, x({5})); }},
    {"words_beside_rows", [] { return parts(Words{"a", "b", "c", "d"}, x({4})); }},
    {"words_of_another_number", [] { return parts(Words{"a", "b", "c"}, x({4})); }},
    {"a_size_as_long_as_the_batch", [] { return parts(kSize, x({4})); }},
    {"lists_of_rows_beside_rows", [] { return parts(Tensors{x({4, 1}), x({4})}, x({4})); }},
    {"a_list_in_a_smaller_batch",
     [] { return parts(4, std::vector{std::tuple(Tensors(3, x({8, 5, 1}))), std::tuple(Tensors(3, x({3, 5, 1})))}); }},
    {"one_microbatch", [] { return parts(1, std::vector{std::tuple(x({4}), x({3}))}); }},
    {"offsets_that_are_rows", [] { return parts(x({8}), along(0, kEnds)); }},
    {"a_tensor_that_does_not_fit", [] { return parts(x({8}), x({6})); }},
    {"a_list_that_may_be_either", [] { return parts(kAlike); }},
    {"a_list_inside_that_may_be_either", [] { return parts(Named<Tensors>{{"a", kAlike}}); }},
    {"an_axis_that_is_not_there", [] { return parts(along(1, x({8}))); }},
    {"offsets_into_another_tensor", [] { return parts(x({8}), kEnds); }},
    {"offsets_by_their_name", [] { return parts(x({8}), Named<Tensor>{{"cu_seqlens", kRising}}); }},
    {"sorted_classes", [] { return parts(x({8}), Named<Tensor>{{"classes", kRising}}); }},
    {"a_nested_tensor",
     [] { return parts(at::_nested_tensor_from_tensor_list({torch::ones({2}), torch::ones({1})})); }},
    {"a_compressed_tensor", [] { return parts(torch::eye(4).to_sparse_csr()); }},
};

const std::vector<Case> kMerges{
    {"a_mean_that_counts_samples",
     [] {
       return merged([](const Tensor& each) { return each.to(torch::kFloat).mean(); },
                     [](const StepOutput& output) { return 60 * output.reduce_mean(); }, x({6}));
     }},
    {"a_mean_of_integers",
     [] { return merged(sum, [](const StepOutput& output) { return 4 * output.reduce_mean(); }, x({7})); }},
    {"a_sum", [] { return merged(sum, [](const StepOutput& output) { return output.reduce_sum(); }, x({7})); }},
    {"rows_in_a_row", [] { return merged(same, [](const StepOutput& output) { return output.concat(); }, x({6})); }},
    {"losses_in_a_row", [] { return merged(sum, [](const StepOutput& output) { return output.concat(); }, x({6})); }},
    {"rows_that_do_not_stack",
     [] { return merged(same, [](const StepOutput& output) { return output.stack(); }, x({6})); }},
    {"rows_without_a_mean",
     [] { return merged(same, [](const StepOutput& output) { return output.reduce_mean(); }, x({6})); }},
};

// Runs cases in jobs of their own.
void run(const std::vector<Case>& cases) {
  for (const auto& [name, act] : cases) {
    std::string text;
    try {
      text = act();
    } catch (const base::UsageError& error) {
      const std::string code = error.code(), what = error.what();
      const auto begin = what.find("has no");
      text = "refused: " + (code.empty() ? what.substr(begin, what.find(':', begin) - begin) : code);
    }
    std::printf("%s\t%s\n", name, text.c_str());
    shutdown();
  }
}

}  // namespace

int main() {
  run(kSplits);
  run(kMerges);
}
