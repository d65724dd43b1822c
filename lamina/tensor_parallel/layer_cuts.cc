// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/layer_cuts.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <set>
#include <string_view>
#include <tuple>

#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/outer.h"
#include "lamina/base/str.h"
#include "lamina/tensor_parallel/slices.h"

namespace lamina::tensor_parallel {
namespace {

constexpr std::array<std::string_view, 5> kLinearStyles{"colwise", "packed_colwise", "colwise_gather_output", "rowwise",
                                                        "rowwise_split_input"};
constexpr std::array<std::string_view, 5> kEmbeddingStyles{"colwise", "colwise_gather_output", "embedding_colwise",
                                                           "rowwise", "embedding_rowwise"};

bool is_one_of(const std::string& style, const auto& styles) {
  return std::ranges::find(styles, style) != styles.end();
}

bool is_by_rows(const PlannedLayer& layer) {
  return layer.style == "rowwise" || layer.style == "rowwise_split_input" || layer.style == "embedding_rowwise";
}

bool is_linear(const PlannedLayer& layer) {
  return layer.kind == LayerKind::kLinear || layer.kind == LayerKind::kConv1d;
}

bool gives_parts(const PlannedLayer& layer) { return is_by_columns(layer.style) && is_linear(layer); }

// The dimension of its weight that is cut.
int dim_of(const PlannedLayer& layer) {
  const bool is_turned = layer.kind != LayerKind::kLinear;  // inputs come first, or words
  return is_by_rows(layer) != is_turned ? 1 : 0;
}

// The number of features, or words, of what is cut.
std::int64_t extent_of(const PlannedLayer& layer) { return layer.shape.at(static_cast<std::size_t>(dim_of(layer))); }

template <class... Words>
base::UsageError layer_error(const Words&... words) {
  return base::UsageError(base::str(words...), base::Code{"tp-layer"});
}

// The cuts of rows that are all cut.
class Cutter {
 public:
  // `rows` by their numbers; the first ones have names of their own, the others are elsewhere.
  Cutter(const PlannedLayers& planned, std::vector<std::size_t> layers, std::vector<std::size_t> elsewhere, int degree,
         int member)
      : planned_(planned),
        layers_(std::move(layers)),
        elsewhere_(std::move(elsewhere)),
        degree_(degree),
        member_(member) {
    find_parents();
    require_said_heads();
    require_same_heads();
  }

  LayerCuts cuts() const {
    LayerCuts result;
    for (const auto number : layers_) result.layers.push_back(cut(row(number)));
    for (const auto parent : order_) result.parents.push_back(parent_cut(parent, result.layers));
    return result;
  }

 private:
  const PlannedLayer& row(std::size_t number) const {
    const auto count = planned_.layers.size();
    return number < count ? planned_.layers[number] : planned_.elsewhere.at(number - count);
  }
  const ParentModule& parent(std::size_t number) const { return planned_.parents.at(number); }

  // Keeps parents with layers that give parts, in the order of their first rows, and their heads.
  void find_parents() {
    std::vector<std::size_t> seen;
    std::map<std::size_t, std::vector<std::size_t>> rows;
    for (const auto* numbers : {&layers_, &elsewhere_}) {
      for (const auto number : *numbers) {
        auto& members = rows[row(number).parent];
        if (members.empty()) seen.push_back(row(number).parent);
        members.push_back(number);
      }
    }
    for (const auto parent : seen) {
      if (std::ranges::none_of(rows[parent], [&](auto number) { return gives_parts(row(number)); })) continue;
      order_.push_back(parent);
      heads_[parent] = heads_of_rows(rows[parent]);
      members_[parent] = std::move(rows[parent]);
    }
  }

  std::optional<Heads> heads_of_rows(const std::vector<std::size_t>& members) const {
    std::vector<std::int64_t> columns, rows;
    std::optional<SaidHeads> said;
    for (const auto number : members) {
      const auto& layer = row(number);
      if (gives_parts(layer)) columns.push_back(extent_of(layer));
      if (layer.style == "rowwise" && is_linear(layer)) rows.push_back(extent_of(layer));
      if (!said) said = layer.heads;
    }
    return heads_of(parent(row(members.front()).parent), columns, rows, degree_, said);
  }

  // Null for a module without heads, and for one of which no layer gives parts.
  const Heads* heads_in(std::size_t parent) const {
    const auto found = heads_.find(parent);
    return found == heads_.end() || !found->second ? nullptr : &*found->second;
  }

  void require_said_heads() const {
    std::set<std::string> names, types;
    for (const auto parent : order_) {
      types.insert(this->parent(parent).type);
      for (const auto number : members_.at(parent)) {
        if (const auto& said = row(number).heads; said && !said->name.empty()) names.insert(said->name);
      }
    }
    for (const auto& [parent, heads] : heads_) {
      if (heads) names.erase(heads->said);
    }
    if (names.empty()) return;
    throw base::UsageError(base::str("set_tensor_parallelism(heads=\"", *names.begin(),
                                     "\"): no module around layers of the plan that are cut by columns has such a "
                                     "number: there are ",
                                     base::joined(types)),
                           base::Code{"tp-plan"});
  }

  void require_same_heads() const {
    for (const auto number : elsewhere_) {
      const auto& other = row(number);
      const auto layer = std::ranges::find_if(layers_, [&](auto each) { return row(each).name == other.name; });
      const auto *first = heads_in(row(*layer).parent), *second = heads_in(other.parent);
      const auto numbers = [](const Heads& heads) { return std::tuple(heads.count, heads.keys, heads.width); };
      if (first == nullptr || second == nullptr || numbers(*first) == numbers(*second)) continue;
      throw layer_error(other.name, " is in ", parent(other.parent).place,
                        ", too, which has other heads: leave it out of the plan");
    }
  }

  LayerCut cut(const PlannedLayer& layer) const {
    if (layer.style == kReplicated) return cut_of(layer);
    if (layer.kind == LayerKind::kEmbedding) return cut_of_embedding(layer);
    if (!is_linear(layer) || !is_one_of(layer.style, kLinearStyles)) {
      throw layer_error(layer.name, " is a ", layer.type,
                        ", and a plan slices torch's Linear and Embedding and transformers' Conv1D alone, here as \"",
                        layer.style, "\": leave it out of the plan");
    }
    return cut_of_linear(layer);
  }

  static LayerCut cut_of(const PlannedLayer& layer) {
    LayerCut cut;
    cut.name = layer.name;
    cut.style = layer.style;
    return cut;
  }

  // A cut in which each section of so many features is shared out apart from the others.
  LayerCut shared_out(const PlannedLayer& layer, const layout::Section& section) const {
    const auto shares = shares_of(section.extent, section.unit, degree_);
    require_each(base::str(layer.name, " has ", section.extent, " features in units of ", section.unit), shares);
    auto cut = cut_of(layer);
    cut.sizes = sizes_of(shares);
    const auto& own = shares.at(static_cast<std::size_t>(member_));
    cut.part = {own.count(), own.begin, section.extent};
    cut.by_parent = layer.by_parent;
    return cut;
  }

  // A Linear, or a wrapper that is computed whole around one, whose layer is no slice.
  LayerCut cut_of_linear(const PlannedLayer& layer) const {
    if (auto chosen = shared_keys(layer)) {
      auto cut = cut_of(layer);
      cut.style = layer.is_around ? kGivingPart : kChosen;
      cut.chosen = std::move(chosen);
      if (layer.is_around) cut.sections = {{extent_of(layer), 1}};
      return cut;
    }
    auto sections = sections_of(layer);
    auto cut = shared_out(layer, sections.front());
    if (layer.is_around) {
      cut_around(layer, cut, std::move(sections));
    } else {
      cut_parameters(layer, cut, sections);
    }
    return cut;
  }

  void cut_parameters(const PlannedLayer& layer, LayerCut& cut, const std::vector<layout::Section>& sections) const {
    const auto count = cut.part.own * static_cast<std::int64_t>(sections.size());
    cut.slices.push_back({"weight", {dim_of(layer), sections, degree_}});
    if (!is_by_rows(layer) && layer.has_bias) cut.slices.push_back({"bias", {0, sections, degree_}});
    if (sees_parts(layer)) {
      cut.numbers = is_by_rows(layer) ? decltype(cut.numbers){{"in_features", count}, {"nx", count}}
                                      : decltype(cut.numbers){{"out_features", count}, {"nf", count}};
    }
  }

  static void cut_around(const PlannedLayer& layer, LayerCut& cut, std::vector<layout::Section> sections) {
    cut.style = is_by_rows(layer) ? kTakingParts : kGivingPart;
    if (!is_by_rows(layer)) {
      auto& chosen = cut.chosen.emplace();
      for (std::size_t number = 0; number < sections.size(); ++number) {
        const auto begin = static_cast<std::int64_t>(number) * cut.part.all + cut.part.first;
        for (std::int64_t at = 0; at < cut.part.own; ++at) chosen.push_back(begin + at);
      }
    }
    cut.sections = std::move(sections);
  }

  LayerCut cut_of_embedding(const PlannedLayer& layer) const {
    if (!is_one_of(layer.style, kEmbeddingStyles) || layer.has_options) {
      throw layer_error(layer.name, " is an Embedding, and \"", layer.style,
                        "\" is not available for it, nor max_norm, scale_grad_by_freq and sparse for one that is "
                        "sliced: leave it out of the plan");
    }
    const auto extent = extent_of(layer);
    const auto* heads = layer.style == "colwise" ? heads_in(layer.parent) : nullptr;
    const layout::Section section{extent,
                                  heads != nullptr && extent == heads->count ? heads->count / heads->units() : 1};
    auto cut = shared_out(layer, section);
    cut.slices.push_back({"weight", {dim_of(layer), {section}, degree_}});
    const auto own = cut.part.own, first = cut.part.first;
    if (dim_of(layer) == 1) {
      cut.padding = layer.padding;
      if (sees_parts(layer)) cut.numbers = {{"embedding_dim", own}};
      return cut;
    }
    if (layer.padding && *layer.padding >= first && *layer.padding < first + own) cut.padding = *layer.padding - first;
    if (sees_parts(layer)) cut.numbers = {{"num_embeddings", own}, {"padding_idx", cut.padding}};
    return cut;
  }

  // False for a layer whose own forward takes and gives wholes, and so has the sizes of the whole.
  static bool sees_parts(const PlannedLayer& layer) {
    const bool is_embedding = layer.kind == LayerKind::kEmbedding;
    return !layer.has_own_forward || is_by_columns(layer.style) || (layer.style == "rowwise" && !is_embedding);
  }

  // The outputs of a layer that gives heads of keys of which members have the same; none for any other.
  std::optional<std::vector<std::int64_t>> shared_keys(const PlannedLayer& layer) const {
    const auto* heads = heads_in(layer.parent);
    if (layer.style != "colwise" || heads == nullptr || !heads->are_shared_keys(extent_of(layer))) return {};
    std::vector<std::int64_t> chosen;
    for (const auto key : heads->own_keys(member_)) {
      for (std::int64_t at = 0; at < heads->width; ++at) chosen.push_back(key * heads->width + at);
    }
    return chosen;
  }

  // The sections of what is cut, all alike.
  std::vector<layout::Section> sections_of(const PlannedLayer& layer) const {
    const auto extent = extent_of(layer);
    const auto* heads = heads_in(layer.parent);
    if (layer.style == "rowwise" && !members_.contains(layer.parent)) heads = heads_near(layer);
    const auto count = matrices_in(layer, heads);
    if (extent % count != 0) {
      throw layer_error(layer.name, " has ", extent, " features, which are no ", count,
                        " matrices side by side: take another style");
    }
    layout::Section section{extent / count, 1};
    if (heads != nullptr && (is_by_columns(layer.style) || layer.style == "rowwise")) {
      section.unit = heads->unit_of(layer.name, section.extent);
      require_not_fused(layer, *heads, section.extent);
    }
    return std::vector<layout::Section>(static_cast<std::size_t>(count), section);
  }

  // The number of matrices that lie side by side in a layer.
  std::int64_t matrices_in(const PlannedLayer& layer, const Heads* heads) const {
    const auto extent = extent_of(layer);
    if (layer.style == "packed_colwise") {
      if (heads == nullptr) return 2;
      const auto width = heads->width != 0 ? heads->width : extent / 3 / heads->count;
      return std::max<std::int64_t>(1, extent / std::max<std::int64_t>(1, heads->count * width));
    }
    if (layer.style != "colwise") return 1;
    const auto& numbers = parent(layer.parent).numbers;
    const auto split = numbers.find("split_size");
    const bool is_split = split != numbers.end() && extent % split->second == 0;
    return is_split ? std::max<std::int64_t>(1, extent / split->second) : 1;
  }

  static void require_not_fused(const PlannedLayer& layer, const Heads& heads, std::int64_t size) {
    const bool is_fused =
        layer.style == "colwise" && heads.width != 0 && size == (heads.count + 2 * heads.keys) * heads.width;
    if (!is_fused || layer.may_stay_whole || heads.module.in_transformers) return;
    throw layer_error(
        layer.name,
        " gives queries, keys and values in one: say \"packed_colwise\" where they lie side by side; where "
        "they lie by heads, leave it out of the plan");
  }

  // The heads whose results a layer takes that does not lie in their module, but beside it; null for none.
  const Heads* heads_near(const PlannedLayer& layer) const {
    const auto near = base::outer(parent(layer.parent).place);
    std::vector<const Heads*> found;
    for (const auto parent : order_) {
      const auto* heads = heads_in(parent);
      if (heads == nullptr || heads->width == 0 || base::outer(this->parent(parent).place) != near) continue;
      if (heads->count * heads->width == extent_of(layer)) found.push_back(heads);
    }
    return found.size() == 1 ? found.front() : nullptr;
  }

  ParentCut parent_cut(std::size_t parent, const std::vector<LayerCut>& cuts) const {
    ParentCut result;
    result.parent = parent;
    for (const auto number : members_.at(parent)) {
      const auto& layer = row(number);
      if (gives_parts(layer)) {
        result.members.push_back({number, std::ranges::find(cuts, layer.name, &LayerCut::name)->part});
      } else if (layer.style == "rowwise") {
        result.members.push_back({number, {}});
      }
    }
    if (const auto* heads = heads_in(parent)) {
      const auto own = heads->own(member_);
      result.heads = SlicePart{own.count(), own.begin, heads->count};
      result.own_keys = heads->own_keys(member_);
      result.keys = heads->keys;
      result.numbers = heads->numbers(member_);
    }
    return result;
  }

  const PlannedLayers& planned_;
  std::vector<std::size_t> layers_, elsewhere_;  // numbers of rows
  int degree_, member_;
  std::vector<std::size_t> order_;                           // of parents
  std::map<std::size_t, std::vector<std::size_t>> members_;  // rows, by parent
  std::map<std::size_t, std::optional<Heads>> heads_;        // by parent
};

// Parameters with several names that are not cut alike under all of these.
std::vector<std::vector<std::string>> torn(const PlannedLayers& planned, const LayerCuts& cuts) {
  std::map<std::string, const layout::Slicing*> ways;
  for (const auto& cut : cuts.layers) {
    for (const auto& [parameter, slicing] : cut.slices) ways.emplace(cut.name + "." + parameter, &slicing);
  }
  const auto way = [&](const std::string& name) {
    const auto found = ways.find(name);
    return found == ways.end() ? std::nullopt : std::optional(*found->second);
  };
  std::vector<std::vector<std::string>> result;
  for (const auto& names : planned.tied) {
    const auto first = way(names.front());
    if (std::ranges::any_of(names, [&](const auto& name) { return way(name) != first; })) result.push_back(names);
  }
  return result;
}

// Takes the layers out of a plan that have a parameter with these names.
void leave_whole(const PlannedLayers& planned, std::vector<std::size_t>& layers,
                 const std::vector<std::string>& names) {
  std::vector<std::size_t> holders;
  for (const auto& name : names) {
    const auto layer = base::outer(name);
    const auto found = std::ranges::find_if(layers, [&](auto each) { return planned.layers[each].name == layer; });
    if (found != layers.end()) holders.push_back(*found);
  }
  const auto is_asked = [&](auto each) {
    return !planned.layers[each].may_stay_whole || planned.layers[each].by_parent;
  };
  if (std::ranges::any_of(holders, is_asked)) {
    throw layer_error(planned.layers[holders.front()].name, " cannot be sliced: ", base::joined(names, " and "),
                      " are one parameter, and the plan does not cut it alike in both: name both, as embedding_rowwise "
                      "and colwise_gather_output say, or neither, or untie them");
  }
  std::erase_if(layers, [&](auto each) { return std::ranges::find(holders, each) != holders.end(); });
}

}  // namespace

bool is_by_columns(std::string_view style) { return style == "colwise" || style == "packed_colwise"; }

LayerCuts cut_layers(const PlannedLayers& planned, int degree, int member) {
  std::vector<std::size_t> layers(planned.layers.size());
  std::iota(layers.begin(), layers.end(), std::size_t{0});
  while (true) {
    std::set<std::string> names;
    for (const auto number : layers) names.insert(planned.layers[number].name);
    std::vector<std::size_t> elsewhere;
    for (std::size_t number = 0; number < planned.elsewhere.size(); ++number) {
      if (names.contains(planned.elsewhere[number].name)) elsewhere.push_back(planned.layers.size() + number);
    }
    auto cuts = Cutter(planned, layers, elsewhere, degree, member).cuts();
    const auto apart = torn(planned, cuts);
    if (apart.empty()) return cuts;
    for (const auto& parameter : apart) leave_whole(planned, layers, parameter);
  }
}

}  // namespace lamina::tensor_parallel
