// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/team.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"

namespace lamina::tensor_parallel {
namespace {

using Operation = collective::SameOrder::Operation;
using Sizes = std::vector<std::int64_t>;

constexpr auto kAllReduce = "all-reduce", kAllGather = "all-gather", kReduceScatter = "reduce-scatter",
               kAllToAll = "all-to-all";

std::int64_t most(const Sizes& sizes) { return std::ranges::max(sizes); }
std::int64_t total(at::IntArrayRef sizes) { return c10::sum_integers(sizes); }
std::int64_t numel(at::IntArrayRef shape) { return c10::multiply_integers(shape); }

at::Tensor narrowed(const at::Tensor& whole, const Cut& cut, int member) {
  const at::IntArrayRef sizes = cut.sizes;
  const auto at = static_cast<std::size_t>(member);
  return whole.narrow(cut.dim, total(sizes.slice(0, at)), sizes[at]);
}

// A part in memory for the largest one.
at::Tensor padded(const at::Tensor& part, const Cut& cut) {
  const auto lacks = most(cut.sizes) - part.size(cut.dim);
  if (lacks == 0) return part.contiguous();
  auto shape = part.sizes().vec();
  shape[static_cast<std::size_t>(cut.dim)] = lacks;
  return at::cat({part, at::zeros(shape, part.options())}, cut.dim);
}

// Parts of all members side by side, where each has the beginning of this one.
at::Tensor repeated(const at::Tensor& part, const Cut& cut) {
  std::vector<at::Tensor> parts;
  for (const auto size : cut.sizes) parts.push_back(padded(part, cut).narrow(cut.dim, 0, size));
  return at::cat(parts, cut.dim);
}

// How many elements each member gets of this member's part of `to`, and so gives in the other direction.
Sizes counts(const Sizes& shape, const Cut& from, const Cut& to, int member) {
  const auto rows =
      numel(shape) / std::max<std::int64_t>(total(from.sizes), 1) / std::max<std::int64_t>(total(to.sizes), 1);
  Sizes result;
  for (const auto size : from.sizes) result.push_back(rows * size * to.sizes.at(static_cast<std::size_t>(member)));
  return result;
}

base::DesyncError differ(const std::string& difference) {
  return base::DesyncError(difference +
                               ": ranks of a TP_GROUP compute the same modules on tensors of the same shapes: give all "
                               "of them the same batch, and let no branch depend on the rank",
                           base::Code{"tp-order"});
}

thread_local bool alone_here = false;

}  // namespace

Team::Team(collective::Group& group, messaging::Mailbox& mailbox, base::Patience patience,
           std::shared_ptr<value::Failures> failures, collective::SameOrder::Turn turn)
    : size_(group.size()),
      rank_(group.rank()),
      group_(&group),
      mailbox_(&mailbox),
      patience_(std::move(patience)),
      failures_(failures ? std::move(failures) : std::make_shared<value::Failures>()),
      order_(std::in_place, mailbox, group.members(), group.rank(),
             collective::SameOrder::Words{"slices", [this](const Operation& operation) { return in_words(operation); },
                                          &differ,
                                          [this](base::Rank self, const Operation& own, base::Rank other,
                                                 const Operation& others) { compare_given(self, own, other, others); }},
             std::move(turn)) {}

Cut Team::checked(const Cut& cut, at::IntArrayRef given, bool is_part) const {
  const auto dims = std::ssize(given);
  Cut result{cut.dim < 0 ? cut.dim + dims : cut.dim, cut.sizes};
  if (result.dim < 0 || result.dim >= dims) {
    throw base::UsageError(base::str("a tensor of shape ", given, " has no dimension ", cut.dim));
  }
  const auto extent = given[static_cast<std::size_t>(result.dim)];
  if (result.sizes.empty()) {
    if (!is_part && extent % size() != 0) {
      throw base::UsageError(base::str("dimension ", result.dim, " of a tensor of shape ", given,
                                       " cannot be cut into ", size(), " equal parts: give the size of each"));
    }
    result.sizes.assign(static_cast<std::size_t>(size()), is_part ? extent : extent / size());
  }
  const bool fits = std::ssize(result.sizes) == size() && std::ranges::min(result.sizes) >= 0 &&
                    extent == (is_part ? result.sizes[static_cast<std::size_t>(rank())] : total(result.sizes));
  if (!fits) {
    throw base::UsageError(base::str("dimension ", result.dim, " of a tensor of shape ", given, " is not ",
                                     is_part ? base::str("the part of member ", rank()) : "the whole", " of ",
                                     at::IntArrayRef(result.sizes), ", for a team of ", size()));
  }
  return result;
}

at::Tensor Team::all_reduce(const at::Tensor& given) {
  if (Alone::here()) return given.clone(at::MemoryFormat::Contiguous);
  return run(meaning(kAllReduce, given, {}), given.clone(at::MemoryFormat::Contiguous)).view(given.sizes());
}

at::Tensor Team::all_gather(const at::Tensor& part, const Cut& wanted) {
  const auto cut = checked(wanted, part.sizes(), /*is_part=*/true);
  if (Alone::here()) return repeated(part, cut);
  const auto sent = padded(part, cut);
  const auto all = run(meaning(kAllGather, part, {cut}, &cut), sent);
  std::vector<at::Tensor> parts;
  for (int member = 0; member < size(); ++member) {
    const auto of_member = all.narrow(0, member * sent.numel(), sent.numel()).view(sent.sizes());
    parts.push_back(of_member.narrow(cut.dim, 0, cut.sizes[static_cast<std::size_t>(member)]));
  }
  return at::cat(parts, cut.dim);
}

at::Tensor Team::reduce_scatter(const at::Tensor& given, const Cut& wanted) {
  const auto cut = checked(wanted, given.sizes(), /*is_part=*/false);
  if (Alone::here()) return scatter(given, cut);
  std::vector<at::Tensor> parts;
  for (int member = 0; member < size(); ++member) parts.push_back(padded(narrowed(given, cut, member), cut));
  auto shape = parts.front().sizes().vec();
  const auto sum = run(meaning(kReduceScatter, given, {cut}), at::stack(parts)).view(shape);
  return sum.narrow(cut.dim, 0, cut.sizes[static_cast<std::size_t>(rank())]).contiguous();
}

at::Tensor Team::scatter(const at::Tensor& whole, const Cut& wanted) const {
  const auto cut = checked(wanted, whole.sizes(), /*is_part=*/false);
  return narrowed(whole, cut, rank()).clone(at::MemoryFormat::Contiguous);
}

at::Tensor Team::all_to_all(const at::Tensor& given, const Cut& wanted_from, const Cut& wanted_to) {
  const auto from = checked(wanted_from, given.sizes(), /*is_part=*/false);
  const auto to = checked(wanted_to, given.sizes(), /*is_part=*/true);
  if (from.dim == to.dim) {
    throw base::UsageError(base::str("an exchange of parts along dimension ", from.dim, " alone"));
  }
  if (Alone::here()) return repeated(scatter(given, from), to);
  std::vector<at::Tensor> sent;
  for (int member = 0; member < size(); ++member) sent.push_back(narrowed(given, from, member).reshape({-1}));
  const auto received = run(meaning(kAllToAll, given, {from, to}, &to), at::cat(sent));
  auto shape = given.sizes().vec();
  shape[static_cast<std::size_t>(from.dim)] = from.sizes[static_cast<std::size_t>(rank())];
  std::vector<at::Tensor> parts;
  std::int64_t at = 0;
  for (const auto size : to.sizes) {
    shape[static_cast<std::size_t>(to.dim)] = size;
    parts.push_back(received.narrow(0, at, numel(shape)).view(shape));
    at += numel(shape);
  }
  return at::cat(parts, to.dim);
}

void Team::together(const std::function<void()>& act) {
  std::exception_ptr own;
  try {
    act();
  } catch (...) {
    own = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    order_->end_together(own ? std::optional(failures_->describe_to_send(own, mailbox_->rank())) : std::nullopt,
                         patience_);
  }
  if (own) std::rethrow_exception(own);
}

void Team::require_nobody_failed() {
  const std::unique_lock lock(mutex_, std::try_to_lock);  // who has it waits in a collective, and finds the same
  if (lock) order_->require_nobody_gave_up();
}

void Team::give_up(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  given_.reset();
  order_->give_up(failures_->describe_to_send(error, mailbox_->rank()));
}

// Comparisons of what members are given.

void Team::note_given(const CallHashes& given) {
  if (Alone::here()) return;
  const std::lock_guard lock(mutex_);
  if (!given_) given_.emplace();
  for (std::size_t i = 0; i < given.size(); ++i) {
    (*given_)[i] = static_cast<std::int64_t>(base::hash64(given[i], static_cast<std::uint64_t>((*given_)[i])));
  }
}

std::vector<std::int64_t> Team::take_given() {
  std::vector<std::int64_t> taken;
  if (given_) taken.assign(given_->begin(), given_->end());
  given_.reset();
  return taken;
}

void Team::compare_given(base::Rank self, const Operation& own, base::Rank other, const Operation& others) {
  if (own.beside.size() != others.beside.size()) return;  // they are in different places, as the collectives tell
  for (std::size_t i = 0; i < own.beside.size(); ++i) {
    if (own.beside[i] != others.beside[i]) throw given_apart(static_cast<CallTrait>(i), self, other);
  }
}

// Operations as members compare them.

Team::Meaning Team::meaning(const char* what, const at::Tensor& given, std::vector<Cut> cuts, const Cut* part_of) {
  Meaning meaning{what, given.scalar_type(), given.device().type(), std::move(cuts), given.sizes().vec()};
  if (part_of != nullptr) meaning.shape[static_cast<std::size_t>(part_of->dim)] = total(part_of->sizes);
  return meaning;
}

Operation Team::to_operation(const Meaning& meaning) {
  Operation operation{
      meaning.what,
      {static_cast<std::int64_t>(meaning.dtype), static_cast<std::int64_t>(meaning.device), std::ssize(meaning.cuts)}};
  auto& numbers = operation.numbers;
  for (const auto& cut : meaning.cuts) {
    numbers.push_back(cut.dim);
    numbers.insert(numbers.end(), cut.sizes.begin(), cut.sizes.end());
  }
  numbers.insert(numbers.end(), meaning.shape.begin(), meaning.shape.end());
  return operation;
}

Team::Meaning Team::to_meaning(const Operation& operation) const {
  const auto& numbers = operation.numbers;
  std::size_t at = 0;
  const auto next = [&] { return numbers.at(at++); };
  Meaning meaning{operation.what, static_cast<at::ScalarType>(next()), static_cast<at::DeviceType>(next()), {}, {}};
  for (auto cuts = next(); cuts > 0; --cuts) {
    auto& cut = meaning.cuts.emplace_back(Cut{next(), {}});
    for (int member = 0; member < size(); ++member) cut.sizes.push_back(next());
  }
  while (at < numbers.size()) meaning.shape.push_back(next());
  return meaning;
}

std::string Team::in_words(const Operation& operation) const {
  const auto meaning = to_meaning(operation);
  auto text = base::str(meaning.what, " of a ", c10::toString(meaning.dtype), " tensor of shape ",
                        at::IntArrayRef(meaning.shape));
  for (const auto& cut : meaning.cuts) {
    text += base::str(", dimension ", cut.dim, " in parts of ", at::IntArrayRef(cut.sizes));
  }
  return text;
}

// `given` lies in memory as the collective takes it, or is not defined: zeros then, whose result nobody wants.
Team::Begun Team::start(std::int64_t number, const Meaning& meaning, const at::Tensor& given) {
  const auto options = at::TensorOptions(meaning.dtype).device(meaning.device);
  collective::CallOptions call_options{"computing with slices", order_->watched(number, patience_),
                                       /*outlives_wait=*/true, base::str(" ", number),
                                       /*keeps_turn=*/true};
  Begun begun;
  const auto whole = numel(meaning.shape);
  const auto given_or_zeros = [&](std::int64_t count) {
    return given.defined() ? given.reshape({-1}) : at::zeros({count}, options);
  };
  if (meaning.what == kAllReduce) {
    begun.result = given_or_zeros(whole);
    begun.work = group_->all_reduce(begun.result, collective::Reduction::kSum, std::move(call_options));
    return begun;
  }
  if (meaning.what == kAllToAll) {
    const auto& [from, to] = std::tie(meaning.cuts.at(0), meaning.cuts.at(1));
    const auto sent = counts(meaning.shape, from, to, rank()), received = counts(meaning.shape, to, from, rank());
    begun.result = at::empty({total(received)}, options);
    begun.work =
        group_->all_to_all(begun.result, given_or_zeros(total(sent)), std::move(call_options), {received, sent});
    return begun;
  }
  const auto& cut = meaning.cuts.at(0);
  const auto largest = total(cut.sizes) == 0 ? 0 : whole / total(cut.sizes) * most(cut.sizes);
  const bool gathers = meaning.what == kAllGather;
  begun.result = at::empty({gathers ? largest * size() : largest}, options);
  begun.work = gathers ? group_->all_gather(begun.result, given_or_zeros(largest), std::move(call_options))
                       : group_->reduce_scatter(begun.result, given_or_zeros(largest * size()),
                                                collective::Reduction::kSum, std::move(call_options));
  return begun;
}

// Members compare what they begin before they begin it: one that differs leaves nothing under way.
at::Tensor Team::run(const Meaning& meaning, at::Tensor given) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  for (const auto& lacking : order_->lacking(patience_)) start(order_->begin(lacking), to_meaning(lacking), {});
  auto operation = to_operation(meaning);
  operation.beside = take_given();
  const auto number = order_->begin(operation);
  try {
    order_->check(number, patience_);
  } catch (...) {
    order_->take_back();
    throw;
  }
  auto begun = start(number, meaning, given);
  begun.work->wait();
  order_->note_end(number);
  return std::move(begun.result);
}

// Teams by name.

namespace {

struct Teams {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Team>> by_name;
};

// Operators of a compiled graph know a name alone.
Teams& teams() {
  static Teams all;
  return all;
}

}  // namespace

std::string team_name(base::Rank member) { return base::str("of rank ", member); }

void note_team(const std::string& name, std::shared_ptr<Team> team) {
  const std::lock_guard lock(teams().mutex);
  teams().by_name[name] = std::move(team);
}

void forget_team(const std::string& name) {
  const std::lock_guard lock(teams().mutex);
  teams().by_name.erase(name);
}

std::shared_ptr<Team> find_team(const std::string& name) {
  const std::lock_guard lock(teams().mutex);
  const auto found = teams().by_name.find(name);
  if (found == teams().by_name.end()) {
    throw base::UsageError(base::str("no job of this process has a team of ranks ", name,
                                     ": lamina.init() makes it, and lamina.shutdown() ends it"));
  }
  return found->second;
}

Alone::Alone() : before_(alone_here) { alone_here = true; }
Alone::~Alone() { alone_here = before_; }
bool Alone::here() { return alone_here; }

}  // namespace lamina::tensor_parallel
